#include "tensorrt/previous_rows_plugin.h"

#include <utility>

namespace dflash_trt
{

PreviousRowsPlugin::PreviousRowsPlugin(PluginFields fields, nvinfer1::TensorRTPhase phase)
    : StepPlugin(kPreviousRows, std::move(fields), phase)
{
}

std::unique_ptr<StepPlugin> PreviousRowsPlugin::copy() const
{
    return std::make_unique<PreviousRowsPlugin>(*this);
}

void PreviousRowsPlugin::set_output_shapes(
    nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs, nvinfer1::IExprBuilder&) const
{
    outputs[0] = inputs[input_index("x")];
}

void PreviousRowsPlugin::check_build(nvinfer1::Dims const* max, FloatType type) const
{
    require_previous_rows(rows(max, type));
}

size_t PreviousRowsPlugin::workspace_bytes(nvinfer1::Dims const*, FloatType) const
{
    return 0;
}

PreparedLaunches PreviousRowsPlugin::prepare(nvinfer1::Dims const* inputs, FloatType type, Device const& device) const
{
    return prepare_previous_rows(rows(inputs, type), device);
}

PreviousRows PreviousRowsPlugin::rows(nvinfer1::Dims const* inputs, FloatType type) const
{
    nvinfer1::Dims const& x = inputs[input_index("x")];
    nvinfer1::Dims const& page_table = inputs[input_index("page_table")];
    return {type, x.d[0], page_table.d[0], x.d[1], fields().integer("page_size"), page_table.d[1],
        fields().integer("state")};
}

} // namespace dflash_trt
