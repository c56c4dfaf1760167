// DraftTokens: the drafter's token at every slot of the blocks, in the noise of the target's tokens there or apart.
#pragma once

#include "tensorrt/step_plugin.h"

namespace dflash_trt
{

class DraftTokensPlugin final : public StepPlugin
{
public:
    DraftTokensPlugin(PluginFields fields, nvinfer1::TensorRTPhase phase);

private:
    [[nodiscard]] std::unique_ptr<StepPlugin> copy() const override;
    void set_output_shapes(nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs,
        nvinfer1::IExprBuilder& builder) const override;
    void check_build(nvinfer1::Dims const* max, FloatType type) const override;
    [[nodiscard]] size_t workspace_bytes(nvinfer1::Dims const* max, FloatType type) const override;
    [[nodiscard]] PreparedLaunches prepare(
        nvinfer1::Dims const* inputs, FloatType type, Device const& device) const override;
    [[nodiscard]] int64_t num_choices() const;
    [[nodiscard]] bool has_map() const;
};

} // namespace dflash_trt
