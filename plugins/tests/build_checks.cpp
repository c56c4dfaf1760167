// What TensorRT asks of a plugin while it builds an engine.
#include "checks.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace host
{
namespace
{

using nvinfer1::DataType;
using nvinfer1::TensorFormat;
using nvinfer1::TensorRTPhase;

constexpr int32_t kNumDataTypes = nvinfer1::EnumMax<DataType>();
constexpr int32_t kNumFormats = nvinfer1::EnumMax<TensorFormat>();

constexpr int64_t kManyRequests = 100000;

nvinfer1::PluginFieldType type_of(std::variant<int32_t, float> const& value)
{
    return value.index() == 0 ? nvinfer1::PluginFieldType::kINT32 : nvinfer1::PluginFieldType::kFLOAT32;
}

/// Fields as TensorRT passes them.
class Fields
{
public:
    explicit Fields(std::vector<Field> fields) : mFields(std::move(fields))
    {
        for (auto const& [name, value] : mFields)
        {
            std::visit([&, &name = name, &value = value](auto const& number)
                { mViews.emplace_back(name.c_str(), &number, type_of(value), 1); }, value);
        }
        mCollection = {static_cast<int32_t>(mViews.size()), mViews.data()};
    }

    Fields(Fields const&) = delete;
    Fields& operator=(Fields const&) = delete;
    [[nodiscard]] nvinfer1::PluginFieldCollection const* collection() const { return &mCollection; }

private:
    nvinfer1::PluginFieldCollection mCollection{};
    std::vector<Field> mFields;
    std::vector<nvinfer1::PluginField> mViews;
};

int32_t configure(Plugin const& plugin, Node const& node)
{
    auto const inputs = dynamic(node.inputs);
    auto const outputs = dynamic(node.outputs);
    return build(plugin)->configurePlugin(inputs.data(), count(node.inputs), outputs.data(), count(node.outputs));
}

} // namespace

void check_fields(nvinfer1::IPluginCreatorV3One& creator, Node const& node)
{
    nvinfer1::PluginFieldCollection const* names = creator.getFieldNames();
    expect(names->nbFields == static_cast<int32_t>(node.fields.size()), node.name + ": number of fields");
    for (int32_t i = 0; i < names->nbFields; ++i)
    {
        nvinfer1::PluginField const& field = names->fields[i];
        auto const& [name, value] = node.fields[static_cast<size_t>(i)];
        expect(field.name == name, node.name + ": field " + field.name);
        expect(field.type == type_of(value) && field.length == 1, node.name + ": type of " + field.name);
    }
    for (size_t left_out = 0; left_out < node.fields.size(); ++left_out)
    {
        auto fields = node.fields;
        fields.erase(fields.begin() + static_cast<std::ptrdiff_t>(left_out));
        Plugin const made(creator.createPlugin("n", Fields(fields).collection(), TensorRTPhase::kBUILD));
        expect(made == nullptr, node.name + ": refuses to be without " + node.fields[left_out].first);
        expect_logged("found no " + node.fields[left_out].first, node.name);
    }
    auto more = node.fields;
    more.emplace_back("colour", 1);
    expect(creator.createPlugin("n", Fields(more).collection(), TensorRTPhase::kBUILD) == nullptr,
        node.name + ": refuses an unknown field");
    expect_logged("found colour", node.name);
    bool const needs_fields = !node.fields.empty();
    Plugin const made(creator.createPlugin("n", nullptr, TensorRTPhase::kBUILD));
    expect((made == nullptr) == needs_fields, node.name + ": without fields at all");
    logger.lines.clear();
}

Plugin made(nvinfer1::IPluginCreatorV3One& creator, Node const& node, TensorRTPhase phase)
{
    return Plugin(creator.createPlugin("n", Fields(node.fields).collection(), phase));
}

Plugin travelled(nvinfer1::IPluginCreatorV3One& creator, Node const& node)
{
    Plugin first = made(creator, node, TensorRTPhase::kBUILD);
    expect(first != nullptr, node.name + ": made");
    if (first == nullptr)
    {
        return nullptr;
    }
    Plugin second(first->clone());
    first.reset();
    nvinfer1::PluginFieldCollection const* serialized = runtime(second)->getFieldsToSerialize();
    Plugin third(creator.createPlugin("n", serialized, TensorRTPhase::kRUNTIME));
    second.reset();
    expect(third != nullptr, node.name + ": made from its serialized fields");
    if (third == nullptr)
    {
        return nullptr;
    }
    Plugin attached(runtime(third)->attachToContext(nullptr));
    third.reset();
    serialized = runtime(attached)->getFieldsToSerialize();
    expect(serialized->nbFields == static_cast<int32_t>(node.fields.size()), node.name + ": serialized fields");
    for (int32_t i = 0; i < serialized->nbFields; ++i)
    {
        auto const& [name, value] = node.fields[static_cast<size_t>(i)];
        nvinfer1::PluginField const& field = serialized->fields[i];
        bool const is_kept =
            std::visit([&](auto number) { return *static_cast<decltype(number) const*>(field.data) == number; }, value);
        expect(field.name == name && field.type == type_of(value) && is_kept, node.name + ": keeps " + name);
    }
    return attached;
}

void check_interfaces(Plugin const& plugin, Node const& node)
{
    expect(core(plugin)->getPluginName() == node.name, node.name + ": name");
    expect(std::string(core(plugin)->getPluginNamespace()) == "dflash_trt", node.name + ": plugin's namespace");
    nvinfer1::InterfaceInfo const info = build(plugin)->getInterfaceInfo();
    expect(std::string(info.kind) == "PLUGIN_V3ONE_BUILD" && info.major == 1, node.name + ": build interface 1");
    expect(build(plugin)->getNbOutputs() == count(node.outputs), node.name + ": number of outputs");
}

void check_shapes(Plugin const& plugin, Node const& node)
{
    ExprBuilder builder;
    std::vector<nvinfer1::DimsExprs> inputs;
    for (Tensor const& tensor : node.inputs)
    {
        nvinfer1::DimsExprs exprs{};
        exprs.nbDims = static_cast<int32_t>(tensor.sizes.size());
        std::transform(
            tensor.sizes.begin(), tensor.sizes.end(), exprs.d, [&](int64_t size) { return builder.make(size); });
        inputs.push_back(exprs);
    }
    std::vector<nvinfer1::DimsExprs> outputs(node.outputs.size());
    int32_t const result = build(plugin)->getOutputShapes(
        inputs.data(), count(node.inputs), nullptr, 0, outputs.data(), count(node.outputs), builder);
    expect(result == 0, node.name + ": gives output shapes");
    for (size_t i = 0; i < outputs.size(); ++i)
    {
        std::vector<int64_t> sizes;
        std::transform(outputs[i].d, outputs[i].d + outputs[i].nbDims, std::back_inserter(sizes),
            [](nvinfer1::IDimensionExpr const* expr) { return static_cast<Expr const*>(expr)->value(); });
        expect(sizes == node.outputs[i].sizes, node.name + ": shape of " + node.outputs[i].name);
    }
    inputs[0].nbDims += 1;
    expect(build(plugin)->getOutputShapes(
               inputs.data(), count(node.inputs), nullptr, 0, outputs.data(), count(node.outputs), builder)
            != 0,
        node.name + ": refuses another rank");
    expect_logged("dimensions", node.name);
}

void check_types(Plugin const& plugin, Node const& node)
{
    std::vector<DataType> inputs;
    std::transform(
        node.inputs.begin(), node.inputs.end(), std::back_inserter(inputs), [](auto const& x) { return x.type; });
    std::vector<DataType> outputs(node.outputs.size());
    int32_t const num_inputs = count(node.inputs);
    auto const ask = [&]
    { return build(plugin)->getOutputDataTypes(outputs.data(), count(node.outputs), inputs.data(), num_inputs); };
    expect(ask() == 0, node.name + ": gives output types");
    for (size_t i = 0; i < outputs.size(); ++i)
    {
        expect(outputs[i] == node.outputs[i].type, node.name + ": type of " + node.outputs[i].name);
    }
    inputs[0] = DataType::kINT8;
    expect(ask() != 0, node.name + ": refuses int8");
    expect_logged("float32, float16 or bfloat16", node.name);
}

void check_formats(Plugin const& plugin, Node const& node)
{
    std::vector<Tensor> all = node.inputs;
    all.insert(all.end(), node.outputs.begin(), node.outputs.end());
    for (int32_t position = 0; position < count(all); ++position)
    {
        auto descs = dynamic(all);
        nvinfer1::PluginTensorDesc& desc = descs[static_cast<size_t>(position)].desc;
        DataType const right = desc.type;
        for (int32_t type = 0; type < kNumDataTypes; ++type)
        {
            desc.type = static_cast<DataType>(type);
            bool const is_free = position == 0; // the first tensor decides what F is
            bool const is_float =
                desc.type == DataType::kFLOAT || desc.type == DataType::kHALF || desc.type == DataType::kBF16;
            bool const is_right = is_free ? is_float : desc.type == right;
            for (int32_t format = 0; format < kNumFormats; ++format)
            {
                desc.format = static_cast<TensorFormat>(format);
                bool const wanted = desc.format == TensorFormat::kLINEAR && is_right;
                bool const found = build(plugin)->supportsFormatCombination(
                    position, descs.data(), count(node.inputs), count(node.outputs));
                expect(found == wanted,
                    node.name + ": " + all[static_cast<size_t>(position)].name + ", type " + std::to_string(type)
                        + ", format " + std::to_string(format));
            }
        }
    }
    auto descs = dynamic(all);
    expect(!build(plugin)->supportsFormatCombination(0, descs.data(), count(node.inputs) - 1, count(node.outputs)),
        node.name + ": refuses a missing input");
}

void check_configuration(Plugin const& plugin, Node node)
{
    expect(configure(plugin, node) == 0, node.name + ": accepts its configuration");
    auto const inputs = dynamic(node.inputs);
    auto const outputs = dynamic(node.outputs);
    size_t const workspace =
        build(plugin)->getWorkspaceSize(inputs.data(), count(node.inputs), outputs.data(), count(node.outputs));
    bool const is_write = node.name == "WriteDraftContext" || node.name == "PreviousRows";
    bool const needs_workspace = !is_write && !node.is_collective() && !node.is_tiled() && node.name != "RmsNorm";
    expect((workspace > 0) == needs_workspace, node.name + ": workspace");
    if (node.is_collective())
    {
        return;
    }
    auto const refuses_node = [&](Node const& changed, char const* reason)
    {
        expect(configure(plugin, changed) != 0, node.name + ": refuses " + reason);
        expect_logged(reason, node.name);
    };
    auto const refuses = [&](char const* input, size_t axis, int64_t size, char const* reason)
    {
        Node changed = node;
        changed.input(input).sizes[axis] = size;
        refuses_node(changed, reason);
    };
    auto const refuses_many_requests = [&]
    {
        Node changed = node;
        for (Tensor& tensor : changed.inputs)
        {
            bool const has_one_more = tensor.name == "token_offsets";
            if (has_one_more || tensor.name == "page_table" || tensor.name.find("context_lens") != std::string::npos)
            {
                tensor.sizes[0] = kManyRequests + (has_one_more ? 1 : 0);
            }
        }
        refuses_node(changed, "REQUESTS");
    };
    if (node.name == "SampleAndAccept")
    {
        Node changed = node;
        changed.input("logits").sizes[1] = int64_t{1} << 30;
        changed.input("mask_bits").sizes[1] = int64_t{1} << 25;
        refuses_node(changed, "TILES");
        Node wide = node;
        wide.input("logits").sizes[0] = kRequests * 1000;
        wide.input("logit_rows").sizes[1] = 1000;
        refuses_node(wide, "WIDTH");
        refuses("logits", 0, 5, "logits: expected 6 rows or more, found 5");
        refuses("mask_bits", 1, 1, "mask_bits: expected [1, 157]");
        refuses("row_masks", 0, 4, "row_masks: expected 1 entry, or 1 more than rows of logits, 6, found 4");
        return;
    }
    if (node.name == "ScoreRows")
    {
        refuses("logits", 1, int64_t{1} << 30, "TILES");
        refuses("logits", 1, 19, "num_top: expected at most the vocabulary, 19, found 20");
        refuses("scored_tokens", 0, 3, "scored_tokens: expected [4]");
        return;
    }
    if (node.name == "DraftTokens")
    {
        refuses("logits", 1, int64_t{1} << 30, "TILES");
        refuses("logits", 1, kDraftTopk - 1, "draft_topk: expected at most the vocabulary, 31");
        return;
    }
    if (node.name == "Experts")
    {
        refuses("logits", 1, kExperts + 1, "num_experts = 9");
        refuses("gate_up_codes", 2, kHidden, "gate_up_codes: expected [8, 192, 32]");
        refuses("down_block_scale", 1, 1, "down_block_scale: expected 64 rows of an expert");
        refuses("down_bias", 0, 1, "down_bias: expected [8, 64]");
        return;
    }
    if (node.name == "Linear")
    {
        refuses("bias", 0, kLinear + 1, "bias: expected [48]");
        return;
    }
    if (node.name == "Int8Linear")
    {
        refuses("codes", 1, kHidden + 1, "codes: expected [48, 64]");
        refuses("weight_scale", 0, 1, "weight_scale: expected [48]");
        return;
    }
    if (node.name == "RmsNorm")
    {
        refuses("weight", 0, kHidden + 1, "weight: expected [64]");
        return;
    }
    if (node.name == "HeadProduct")
    {
        refuses("factor", 0, kHeads + 1, "factor: expected [4, 16, 24]");
        return;
    }
    if (node.name == "GatedDelta" || node.name == "GatedDeltaInOrder")
    {
        refuses("qkvz", 1, kChannels, "qkvz: expected [6, 256]");
        refuses("ba", 0, kTokens + 1, "ba: expected [6, 8]");
        refuses("dt_bias", 0, 1, "dt_bias: expected [4]");
        refuses("conv", 1, kConvSize + 1, "TAPS = 5");
        refuses("conv", 0, kChannels + 2, "qkvz: expected [6, 258]");
        refuses("state_pools", 0, kDeltaStates - 1, "state_pools: expected 8 addresses or more");
        return;
    }
    if (node.name == "PreviousRows")
    {
        refuses("page_table", 0, kManyRequests, "page_table: expected [2, 7]");
        refuses_many_requests();
        return;
    }
    if (node.name == "AttendLatents" || node.name == "AttendLatentsInSplits")
    {
        refuses("q", 2, kLatentRow + 1, "own: expected [6, 33]");
        refuses("own", 0, kTokens + 1, "own: expected [6, 32]");
        refuses("own", 1, kLatentRow + 1, "own: expected [6, 32]");
        refuses("q_nope", 1, kTokens + 1, "q_nope: expected [4, 6, 16]");
        refuses("k_factor", 1, kLatentNope + 1, "k_factor: expected [4, 16, 24]");
        refuses("v_factor", 0, kHeads + 1, "v_factor: expected [4, 12, 24]");
        if (!node.is_deterministic()) // then no row is attended directly
        {
            refuses("v_factor", 1, kLatentValue + 1, "VALUE = 13");
        }
        refuses("page_table", 0, kRequests + 1, "page_table: expected [2, 7]");
        return;
    }
    bool const is_target = node.name == "AttendPages" || node.name == "AttendInSplits";
    refuses(is_target ? "k" : "context_k", 2, 24, is_target ? "k: expected [6, 2, 16]" : "context_");
    refuses_many_requests();
    if (is_target)
    {
        refuses("sinks", 0, kHeads + 1, "sinks: expected [4]");
    }
    refuses(is_target ? "v" : "context_v", 1, 3, is_target ? "v" : "context_v");
}

void check_scales(nvinfer1::IPluginCreatorV3One& creator, Node node)
{
    bool has_scales = false;
    for (auto& [name, value] : node.fields)
    {
        has_scales = has_scales || (name == "k_scale" && std::get<float>(value) != 1.0F);
        if (name == "page_type")
        {
            value = 0;
        }
    }
    if (has_scales)
    {
        expect(configure(made(creator, node, TensorRTPhase::kBUILD), node) != 0,
            node.name + ": refuses scales of pages that are not FP8");
        expect_logged("k_scale: expected 1", node.name);
    }
}

} // namespace host
