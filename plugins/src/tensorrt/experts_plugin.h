// Experts: the rows of a step through their chosen experts, whose weights stay packed.
#pragma once

#include "operations/experts.h"
#include "tensorrt/step_plugin.h"

namespace dflash_trt
{

class ExpertsPlugin final : public StepPlugin
{
public:
    ExpertsPlugin(PluginFields fields, nvinfer1::TensorRTPhase phase);

private:
    [[nodiscard]] std::unique_ptr<StepPlugin> copy() const override;
    void set_output_shapes(nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs,
        nvinfer1::IExprBuilder& builder) const override;
    void check_build(nvinfer1::Dims const* max, FloatType type) const override;
    [[nodiscard]] size_t workspace_bytes(nvinfer1::Dims const* max, FloatType type) const override;
    [[nodiscard]] PreparedLaunches prepare(
        nvinfer1::Dims const* inputs, FloatType type, Device const& device) const override;

    [[nodiscard]] ExpertsShape shape(nvinfer1::Dims const* inputs, FloatType type) const;
    [[nodiscard]] ExpertsOptions options(nvinfer1::Dims const* inputs) const;
    [[nodiscard]] ExpertMatrix matrix(nvinfer1::Dims const* inputs, std::string const& prefix) const;
    /// Throws Problem for tensors whose sizes contradict each other.
    void check_sizes(nvinfer1::Dims const* inputs, FloatType type) const;
};

} // namespace dflash_trt
