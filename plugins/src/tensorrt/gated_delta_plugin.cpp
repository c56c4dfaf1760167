#include "tensorrt/gated_delta_plugin.h"

#include "runtime/problem.h"
#include "tensorrt/expect_size.h"

#include <string>
#include <utility>

namespace dflash_trt
{
namespace
{

constexpr int64_t kNumStateTensors = 6; // addresses of a state

} // namespace

GatedDeltaPlugin::GatedDeltaPlugin(PluginFields fields, nvinfer1::TensorRTPhase phase)
    : StepPlugin(kGatedDelta, std::move(fields), phase)
{
}

std::unique_ptr<StepPlugin> GatedDeltaPlugin::copy() const
{
    return std::make_unique<GatedDeltaPlugin>(*this);
}

void GatedDeltaPlugin::set_output_shapes(
    nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs, nvinfer1::IExprBuilder& builder) const
{
    outputs[0].nbDims = 2;
    outputs[0].d[0] = inputs[input_index("qkvz")].d[0];
    outputs[0].d[1] = builder.operation(nvinfer1::DimensionOperation::kPROD, *inputs[input_index("log_rate")].d[0],
        *inputs[input_index("norm")].d[0]);
}

void GatedDeltaPlugin::check_build(nvinfer1::Dims const* max, FloatType type) const
{
    static_cast<void>(workspace_bytes(max, type)); // throws where there are no kernels
}

size_t GatedDeltaPlugin::workspace_bytes(nvinfer1::Dims const* max, FloatType type) const
{
    return gated_delta_workspace_bytes(shape(max, type), options());
}

PreparedLaunches GatedDeltaPlugin::prepare(nvinfer1::Dims const* inputs, FloatType type, Device const& device) const
{
    return prepare_gated_delta(shape(inputs, type), options(), device);
}

DeltaShape GatedDeltaPlugin::shape(nvinfer1::Dims const* inputs, FloatType type) const
{
    auto const size = [&](char const* name, int32_t axis) { return inputs[input_index(name)].d[axis]; };
    DeltaShape const found{type, size("qkvz", 0), size("slot_ids", 0), size("conv", 0), size("conv", 1),
        fields().integer("num_key_heads"), size("log_rate", 0), size("norm", 0)};
    expect_size("qkvz", size("qkvz", 1), found.num_channels + found.value_size());
    expect_size("ba", size("ba", 0), found.num_rows);
    expect_size("ba", size("ba", 1), 2 * found.value_heads);
    expect_size("dt_bias", size("dt_bias", 0), found.value_heads);
    expect_size("token_offsets", size("token_offsets", 0), found.num_requests + 1);
    expect_size("context_lens", size("context_lens", 0), found.num_requests);
    int64_t const num_needed = options().state + kNumStateTensors;
    if (size("state_pools", 0) < num_needed)
    {
        throw Problem("state_pools", std::to_string(num_needed) + " addresses or more",
            std::to_string(size("state_pools", 0)), "A state has six, from the node's index on.");
    }
    return found;
}

DeltaOptions GatedDeltaPlugin::options() const
{
    return {fields().integer("state"), fields().integer("num_records"), fields().real("eps")};
}

} // namespace dflash_trt
