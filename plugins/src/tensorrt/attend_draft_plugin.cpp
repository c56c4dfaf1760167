#include "tensorrt/attend_draft_plugin.h"

#include "operations/page_write.h"
#include "runtime/problem.h"
#include "tensorrt/attended_shape.h"

#include <string>
#include <utility>

namespace dflash_trt
{
namespace
{

AttentionOptions options_of(PluginFields const& fields)
{
    AttentionMask const mask{fields.integer("window"), fields.integer("is_causal") != 0,
        fields.integer("is_window_anchored") != 0, 0, fields.integer("first_key")};
    return {mask, fields.real("score_scale"), fields.real("softcap"), false, fields.integer("shares_kv") != 0};
}

/// S, from the rows of all requests' blocks.
int64_t block_rows(int64_t num_rows, int64_t num_requests)
{
    if (num_requests < 1 || num_rows % num_requests != 0)
    {
        throw Problem("q", "the same number of rows for each of " + std::to_string(num_requests) + " requests",
            std::to_string(num_rows) + " rows", "Every request has S block slots.");
    }
    return num_rows / num_requests;
}

} // namespace

AttendDraftPlugin::AttendDraftPlugin(PluginFields fields, nvinfer1::TensorRTPhase phase)
    : PagePlugin(kAttendDraft, std::move(fields), phase, "context_k")
{
}

std::unique_ptr<StepPlugin> AttendDraftPlugin::copy() const
{
    return std::make_unique<AttendDraftPlugin>(*this);
}

void AttendDraftPlugin::set_output_shapes(
    nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs, nvinfer1::IExprBuilder& builder) const
{
    outputs[0] = attended_shape(inputs[input_index("q")], builder);
}

void AttendDraftPlugin::check_build(nvinfer1::Dims const* max, FloatType type) const
{
    PageGeometry const pages = geometry(max, type);
    check_rows(max, "q", pages, 0);
    for (char const* name : {"context_k", "context_v", "block_k", "block_v"})
    {
        check_rows(max, name, pages, pages.kv_heads);
    }
    int64_t const max_requests = step_shape(max).num_requests;
    AttentionOptions const options = options_of(fields());
    if (!options.shares_kv)
    {
        require_page_write(pages, true, max_requests);
    }
    require_attention(pages, options.kind(true), max_requests);
}

size_t AttendDraftPlugin::workspace_bytes(nvinfer1::Dims const* max, FloatType type) const
{
    return attention_workspace_bytes(geometry(max, type), options_of(fields()).kind(true));
}

PreparedLaunches AttendDraftPlugin::prepare(nvinfer1::Dims const* inputs, FloatType type, Device const& device) const
{
    PageGeometry const pages = geometry(inputs, type);
    int64_t const heads = check_rows(inputs, "q", pages, 0);
    StepShape shape = step_shape(inputs);
    shape.block_rows = block_rows(inputs[input_index("q")].d[0], shape.num_requests);
    return prepare_attend_draft(pages, heads, options_of(fields()), shape, device);
}

} // namespace dflash_trt
