// AllReduce and AllGather: NCCL's collectives over all ranks, as alternatives to TensorRT's own layer.
#pragma once

#include "operations/collective.h"
#include "tensorrt/step_plugin.h"

namespace dflash_trt
{

/// Its contract is kAllReduce or kAllGather.
class CollectivePlugin final : public StepPlugin
{
public:
    using StepPlugin::StepPlugin;

private:
    [[nodiscard]] bool is_gather() const { return &contract() == &kAllGather; }
    [[nodiscard]] int64_t num_ranks() const { return fields().integer("num_ranks"); }

    [[nodiscard]] std::unique_ptr<StepPlugin> copy() const override;
    void set_output_shapes(nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs,
        nvinfer1::IExprBuilder& builder) const override;
    void check_build(nvinfer1::Dims const* max, FloatType type) const override;
    [[nodiscard]] size_t workspace_bytes(nvinfer1::Dims const* max, FloatType type) const override;
    /// No launches: NCCL makes its own.
    [[nodiscard]] PreparedLaunches prepare(
        nvinfer1::Dims const* inputs, FloatType type, Device const& device) const override;
    void run_prepared(PreparedLaunches const& launches, nvinfer1::PluginTensorDesc const* inputs,
        CallTensors const& tensors, CUstream stream) const override;
};

} // namespace dflash_trt
