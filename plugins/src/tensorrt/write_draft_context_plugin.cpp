#include "tensorrt/write_draft_context_plugin.h"

#include "operations/page_write.h"
#include "tensorrt/input_dims.h"

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

void WriteDraftContextPlugin::prepare(nvinfer1::Dims const* inputs, FloatType type, Device const& device) const
{
    prepare_page_write(geometry(inputs, type), true, step_shape(inputs).num_requests, device);
}

void WriteDraftContextPlugin::run(Call const& call, FloatType type, Device const& device) const
{
    InputDims const dims(contract(), call.descs);
    DraftContextBuffers const context{call.input("context_k"), call.input("context_v"), pool(call),
        call.input("positions"), call.input("token_offsets"), call.input("page_table"),
        call.input("next_context_lens")};
    write_draft_context(geometry(dims.data(), type), step_shape(dims.data()), context, device, call.stream);
}

} // namespace dflash_trt
