#include "tensorrt/attend_pages_plugin.h"

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
    AttentionMask const mask{fields.integer("window"), true, false, fields.integer("chunk"), 0};
    return {mask, fields.real("score_scale"), fields.real("softcap"), fields.integer("has_sinks") != 0,
        fields.integer("shares_kv") != 0};
}

void check_sinks(nvinfer1::Dims const& sinks, int64_t heads)
{
    if (sinks.d[0] != heads)
    {
        throw Problem("sinks", "[" + std::to_string(heads) + "]", "[" + std::to_string(sinks.d[0]) + "]",
            "Every query head has one, which is not read without has_sinks.");
    }
}

} // namespace

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
    check_sinks(max[input_index("sinks")], check_rows(max, "q", pages, 0));
    check_rows(max, "k", pages, pages.kv_heads);
    check_rows(max, "v", pages, pages.kv_heads);
    int64_t const max_requests = step_shape(max).num_requests;
    AttentionOptions const options = options_of(fields());
    if (!options.shares_kv)
    {
        require_page_write(pages, false, max_requests);
    }
    require_attention(pages, options.kind(false), max_requests);
}

size_t AttendPagesPlugin::workspace_bytes(nvinfer1::Dims const* max, FloatType type) const
{
    return attention_workspace_bytes(geometry(max, type), options_of(fields()).kind(false));
}

PreparedLaunches AttendPagesPlugin::prepare(nvinfer1::Dims const* inputs, FloatType type, Device const& device) const
{
    PageGeometry const pages = geometry(inputs, type);
    int64_t const heads = check_rows(inputs, "q", pages, 0);
    return prepare_attend_pages(pages, heads, options_of(fields()), step_shape(inputs), device);
}

} // namespace dflash_trt
