#include "tensorrt/attend_pages_plugin.h"

#include "operations/page_write.h"
#include "tensorrt/input_dims.h"

#include <utility>

namespace dflash_trt
{

AttendPagesPlugin::AttendPagesPlugin(PluginFields fields, nvinfer1::TensorRTPhase phase)
    : PagePlugin(kAttendPages, std::move(fields), phase, "k")
{
}

std::unique_ptr<StepPlugin> AttendPagesPlugin::copy() const
{
    return std::make_unique<AttendPagesPlugin>(*this);
}

void AttendPagesPlugin::set_output_shapes(
    nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs, nvinfer1::IExprBuilder& builder) const
{
    outputs[0] = attended_shape(inputs[input_index("q")], builder);
}

void AttendPagesPlugin::check_build(nvinfer1::Dims const* max, FloatType type) const
{
    PageGeometry const pages = geometry(max, type);
    check_rows(max, "q", pages, 0);
    check_rows(max, "k", pages, pages.kv_heads);
    check_rows(max, "v", pages, pages.kv_heads);
    int64_t const max_requests = step_shape(max).num_requests;
    require_page_write(pages, false, max_requests);
    require_attention(pages, false, max_requests);
}

size_t AttendPagesPlugin::workspace_bytes(nvinfer1::Dims const* max, FloatType type) const
{
    return attention_workspace_bytes(geometry(max, type), false);
}

void AttendPagesPlugin::prepare(nvinfer1::Dims const* inputs, FloatType type, Device const& device) const
{
    PageGeometry const pages = geometry(inputs, type);
    int64_t const num_requests = step_shape(inputs).num_requests;
    prepare_page_write(pages, false, num_requests, device);
    prepare_attention(pages, false, num_requests, device);
}

void AttendPagesPlugin::run(Call const& call, FloatType type, Device const& device) const
{
    InputDims const dims(contract(), call.descs);
    PageGeometry const pages = geometry(dims.data(), type);
    int64_t const heads = check_rows(dims.data(), "q", pages, 0);
    AttendPagesBuffers const buffers{call.input("q"), call.input("k"), call.input("v"), pool(call),
        call.input("positions"), call.input("token_offsets"), call.input("context_lens"), call.input("page_table"),
        call.output("attended"), call.workspace};
    attend_pages(pages, heads, fields().integer("window"), step_shape(dims.data()), buffers, device, call.stream);
}

} // namespace dflash_trt
