// AttendLatents: attention of a layer over latent pages, which are found by address.
#pragma once

#include "operations/latents.h"
#include "tensorrt/step_plugin.h"

namespace dflash_trt
{

class AttendLatentsPlugin final : public StepPlugin
{
public:
    AttendLatentsPlugin(PluginFields fields, nvinfer1::TensorRTPhase phase);

private:
    [[nodiscard]] std::unique_ptr<StepPlugin> copy() const override;
    void set_output_shapes(nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs,
        nvinfer1::IExprBuilder& builder) const override;
    void check_build(nvinfer1::Dims const* max, FloatType type) const override;
    [[nodiscard]] size_t workspace_bytes(nvinfer1::Dims const* max, FloatType type) const override;
    [[nodiscard]] PreparedLaunches prepare(
        nvinfer1::Dims const* inputs, FloatType type, Device const& device) const override;

    /// Throws Problem for tensors whose sizes contradict each other.
    [[nodiscard]] LatentShape shape(nvinfer1::Dims const* inputs, FloatType type) const;
    [[nodiscard]] LatentOptions options() const;
};

} // namespace dflash_trt
