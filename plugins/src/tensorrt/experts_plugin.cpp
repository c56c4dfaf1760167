#include "tensorrt/experts_plugin.h"

#include "runtime/problem.h"

#include <string>
#include <utility>
#include <vector>

namespace dflash_trt
{
namespace
{

std::string listed(std::vector<int64_t> const& sizes)
{
    std::string items;
    for (int64_t const size : sizes)
    {
        items += (items.empty() ? "" : ", ") + std::to_string(size);
    }
    return "[" + items + "]";
}

void expect_sizes(std::string const& tensor, nvinfer1::Dims const& found, std::vector<int64_t> const& expected)
{
    std::vector<int64_t> const sizes(found.d, found.d + found.nbDims);
    if (sizes != expected)
    {
        throw Problem(tensor, listed(expected), listed(sizes), "Shapes stand in plugins/README.md.");
    }
}

} // namespace

ExpertsPlugin::ExpertsPlugin(PluginFields fields, nvinfer1::TensorRTPhase phase)
    : StepPlugin(kExperts, std::move(fields), phase)
{
}

std::unique_ptr<StepPlugin> ExpertsPlugin::copy() const
{
    return std::make_unique<ExpertsPlugin>(*this);
}

void ExpertsPlugin::set_output_shapes(
    nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs, nvinfer1::IExprBuilder&) const
{
    outputs[0] = inputs[input_index("x")];
}

void ExpertsPlugin::check_build(nvinfer1::Dims const* max, FloatType type) const
{
    check_sizes(max, type);
    static_cast<void>(workspace_bytes(max, type)); // throws where there are no kernels
}

size_t ExpertsPlugin::workspace_bytes(nvinfer1::Dims const* max, FloatType type) const
{
    return experts_workspace_bytes(shape(max, type), options(max));
}

PreparedLaunches ExpertsPlugin::prepare(nvinfer1::Dims const* inputs, FloatType type, Device const& device) const
{
    check_sizes(inputs, type);
    return prepare_experts(shape(inputs, type), options(inputs), device);
}

ExpertsShape ExpertsPlugin::shape(nvinfer1::Dims const* inputs, FloatType type) const
{
    nvinfer1::Dims const& x = inputs[input_index("x")];
    nvinfer1::Dims const& gate_up = inputs[input_index("gate_up_codes")];
    return {type, x.d[0], x.d[1], gate_up.d[1] / 2, inputs[input_index("logits")].d[1], gate_up.d[0]};
}

ExpertsOptions ExpertsPlugin::options(nvinfer1::Dims const* inputs) const
{
    PluginFields const& given = fields();
    return {given.integer("first_expert"), given.integer("num_chosen"), given.integer("routing"),
        given.integer("normalizes") != 0, given.integer("has_choice_bias") != 0, given.integer("num_groups"),
        given.integer("num_chosen_groups"), given.integer("activation"),
        given.integer("scales_inputs") != 0, given.real("routing_scale"), given.real("limit"), given.real("alpha"),
        matrix(inputs, "gate_up_"), matrix(inputs, "down_")};
}

ExpertMatrix ExpertsPlugin::matrix(nvinfer1::Dims const* inputs, std::string const& prefix) const
{
    auto const field = [&](char const* name) { return fields().integer(prefix + name); };
    auto const dims = [&](char const* name) { return inputs[input_index((prefix + name).c_str())]; };
    int64_t const num_input_scales = field("has_input_scale") != 0 ? dims("input_scale").d[1] : 0;
    return {field("form"), field("has_row_scale") != 0, num_input_scales, field("has_bias") != 0,
        dims("block_scale").d[1]};
}

void ExpertsPlugin::check_sizes(nvinfer1::Dims const* inputs, FloatType type) const
{
    ExpertsShape const sizes = shape(inputs, type);
    expect_sizes("logits", inputs[input_index("logits")], {sizes.num_rows, sizes.num_experts});
    if (fields().integer("has_choice_bias") != 0)
    {
        expect_sizes("choice_bias", inputs[input_index("choice_bias")], {sizes.num_experts});
    }
    for (std::string const prefix : {"gate_up_", "down_"})
    {
        bool const is_down = prefix == "down_";
        ExpertMatrix const weight = matrix(inputs, prefix);
        int64_t const out = is_down ? sizes.hidden_size : 2 * sizes.ffn_size;
        int64_t const in = is_down ? sizes.ffn_size : sizes.hidden_size;
        auto const dims = [&](char const* name) { return inputs[input_index((prefix + name).c_str())]; };
        expect_sizes(prefix + "codes", dims("codes"), {sizes.num_here, out, row_bytes(weight.form, in, type)});
        if (int64_t const bytes = block_row_bytes(weight.form, in))
        {
            int64_t const rows = weight.form == kFp8Blocks ? weight.num_block_rows : out;
            expect_sizes(prefix + "block_scale", dims("block_scale"), {sizes.num_here, rows, bytes});
        }
        if (weight.form == kFp8Blocks)
        {
            expect_sizes(prefix + "block_rows", dims("block_rows"), {out});
        }
        if (weight.has_row_scale)
        {
            expect_sizes(prefix + "row_scale", dims("row_scale"), {sizes.num_here, out});
        }
        if (weight.num_input_scales > 0)
        {
            int64_t const most = is_down ? 1 : 2;
            expect_sizes(prefix + "input_scale", dims("input_scale"),
                {sizes.num_here, weight.num_input_scales > most ? most : weight.num_input_scales});
        }
        if (weight.has_bias)
        {
            expect_sizes(prefix + "bias", dims("bias"), {sizes.num_here, out});
        }
    }
}

} // namespace dflash_trt
