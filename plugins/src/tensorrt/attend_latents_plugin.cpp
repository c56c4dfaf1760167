#include "tensorrt/attend_latents_plugin.h"

#include "tensorrt/expect_size.h"

#include <utility>

namespace dflash_trt
{
AttendLatentsPlugin::AttendLatentsPlugin(PluginFields fields, nvinfer1::TensorRTPhase phase)
    : StepPlugin(kAttendLatents, std::move(fields), phase)
{
}

std::unique_ptr<StepPlugin> AttendLatentsPlugin::copy() const
{
    return std::make_unique<AttendLatentsPlugin>(*this);
}

void AttendLatentsPlugin::set_output_shapes(
    nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs, nvinfer1::IExprBuilder& builder) const
{
    nvinfer1::DimsExprs const& q = inputs[input_index("q")];
    for (int32_t i = 0; i < 2; ++i)
    {
        outputs[i].nbDims = 3;
        outputs[i].d[0] = q.d[0];
        outputs[i].d[1] = q.d[1];
    }
    outputs[0].d[2] = builder.constant(fields().integer("latent_dim"));
    outputs[1].d[2] = inputs[input_index("v_factor")].d[1];
}

void AttendLatentsPlugin::check_build(nvinfer1::Dims const* max, FloatType type) const
{
    static_cast<void>(workspace_bytes(max, type)); // throws where there are no kernels
}

size_t AttendLatentsPlugin::workspace_bytes(nvinfer1::Dims const* max, FloatType type) const
{
    return latents_workspace_bytes(shape(max, type), options());
}

PreparedLaunches AttendLatentsPlugin::prepare(nvinfer1::Dims const* inputs, FloatType type, Device const& device) const
{
    return prepare_latents(shape(inputs, type), options(), device);
}

LatentShape AttendLatentsPlugin::shape(nvinfer1::Dims const* inputs, FloatType type) const
{
    auto const size = [&](char const* name, int32_t axis) { return inputs[input_index(name)].d[axis]; };
    ElementTypes const types{type, static_cast<PageType>(fields().integer("page_type"))};
    LatentShape const found{types, size("q", 0), size("page_table", 0), size("page_table", 1), size("q", 1),
        size("own", 1), size("q_nope", 2), size("v_factor", 1)};
    expect_size("q", size("q", 2), found.row_size);
    expect_size("own", size("own", 0), found.num_rows);
    expect_size("q_nope", size("q_nope", 0), found.num_heads);
    expect_size("q_nope", size("q_nope", 1), found.num_rows);
    expect_size("k_factor", size("k_factor", 1), found.nope_dim);
    for (char const* factor : {"k_factor", "v_factor"})
    {
        expect_size(factor, size(factor, 0), found.num_heads);
        expect_size(factor, size(factor, 2), fields().integer("latent_dim"));
    }
    expect_size("positions", size("positions", 0), found.num_rows);
    expect_size("token_offsets", size("token_offsets", 0), found.num_requests + 1);
    expect_size("context_lens", size("context_lens", 0), found.num_requests);
    return found;
}

LatentOptions AttendLatentsPlugin::options() const
{
    return {fields().integer("state"), fields().integer("latent_dim"), fields().integer("page_size"),
        fields().integer("max_verify_rows"), fields().real("k_scale"), fields().real("score_scale")};
}

} // namespace dflash_trt
