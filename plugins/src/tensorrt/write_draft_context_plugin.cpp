#include "tensorrt/write_draft_context_plugin.h"

#include "operations/page_write.h"

#include <utility>

namespace dflash_trt
{

WriteDraftContextPlugin::WriteDraftContextPlugin(PluginFields fields, nvinfer1::TensorRTPhase phase)
    : PagePlugin(kWriteDraftContext, std::move(fields), phase, "context_k")
{
}

std::unique_ptr<StepPlugin> WriteDraftContextPlugin::copy() const
{
    return std::make_unique<WriteDraftContextPlugin>(*this);
}

void WriteDraftContextPlugin::set_output_shapes(
    nvinfer1::DimsExprs const*, nvinfer1::DimsExprs* outputs, nvinfer1::IExprBuilder& builder) const
{
    outputs[0].nbDims = 1;
    outputs[0].d[0] = builder.constant(1);
}

void WriteDraftContextPlugin::check_build(nvinfer1::Dims const* max, FloatType type) const
{
    PageGeometry const pages = geometry(max, type);
    check_rows(max, "context_k", pages, pages.kv_heads);
    check_rows(max, "context_v", pages, pages.kv_heads);
    require_page_write(pages, true, step_shape(max).num_requests);
}

size_t WriteDraftContextPlugin::workspace_bytes(nvinfer1::Dims const*, FloatType) const
{
    return 0;
}

PreparedLaunches WriteDraftContextPlugin::prepare(
    nvinfer1::Dims const* inputs, FloatType type, Device const& device) const
{
    return prepare_write_draft_context(geometry(inputs, type), step_shape(inputs), device);
}

} // namespace dflash_trt
