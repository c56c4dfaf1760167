#include "contract/contract.h"

#include "launch_rules.h"

#include <array>

namespace dflash_trt
{
namespace
{

constexpr TensorType kF = TensorType::kFloat;
constexpr TensorType kInt = TensorType::kInt32;
constexpr TensorType kLong = TensorType::kInt64;
constexpr TensorType kReal = TensorType::kFloat32;

constexpr FieldRule kState{"state", FieldType::kInt32, 0, std::numeric_limits<int32_t>::max()};
constexpr FieldRule kPageType{"page_type", FieldType::kInt32, 0, 1}; // a PageType
constexpr FieldRule kPageSize{"page_size", FieldType::kInt32, 1, 1 << 16};
constexpr FieldRule kWindow{"window", FieldType::kInt32, 0, std::numeric_limits<int32_t>::max()};
constexpr FieldRule kHasSinks{"has_sinks", FieldType::kInt32, 0, 1};
constexpr FieldRule kIsCausal{"is_causal", FieldType::kInt32, 0, 1};
constexpr FieldRule kIsWindowAnchored{"is_window_anchored", FieldType::kInt32, 0, 1};
constexpr double kLeastReal = std::numeric_limits<float>::min();
constexpr double kMostReal = std::numeric_limits<float>::max();
constexpr FieldRule kKScale{"k_scale", FieldType::kFloat32, kLeastReal, kMostReal};
constexpr FieldRule kVScale{"v_scale", FieldType::kFloat32, kLeastReal, kMostReal};
constexpr FieldRule kScoreScale{"score_scale", FieldType::kFloat32, kLeastReal, kMostReal};
constexpr FieldRule kSoftcap{"softcap", FieldType::kFloat32, 0, kMostReal}; // 0: none

constexpr InputRule kAttendPagesInputs[] = {
    {"q", kF, 3},
    {"k", kF, 3},
    {"v", kF, 3},
    {"state_pools", kLong, 1},
    {"positions", kInt, 1},
    {"token_offsets", kInt, 1},
    {"context_lens", kInt, 1},
    {"page_table", kInt, 2},
    {"sinks", kReal, 1},
};
constexpr OutputRule kAttendPagesOutputs[] = {{"attended", kF}};
constexpr FieldRule kAttendPagesFields[] = {
    kState, kPageType, kPageSize, kWindow, kHasSinks, kKScale, kVScale, kSoftcap, kScoreScale};

constexpr InputRule kAttendDraftInputs[] = {
    {"context_k", kF, 3},
    {"context_v", kF, 3},
    {"q", kF, 3},
    {"block_k", kF, 3},
    {"block_v", kF, 3},
    {"state_pools", kLong, 1},
    {"positions", kInt, 1},
    {"token_offsets", kInt, 1},
    {"page_table", kInt, 2},
    {"next_context_lens", kInt, 1},
};
constexpr OutputRule kAttendDraftOutputs[] = {{"attended", kF}};
constexpr FieldRule kAttendDraftFields[] = {
    kState, kPageType, kPageSize, kWindow, kIsCausal, kIsWindowAnchored, kKScale, kVScale, kSoftcap, kScoreScale};

constexpr InputRule kWriteDraftContextInputs[] = {
    {"context_k", kF, 3},
    {"context_v", kF, 3},
    {"state_pools", kLong, 1},
    {"positions", kInt, 1},
    {"token_offsets", kInt, 1},
    {"page_table", kInt, 2},
    {"next_context_lens", kInt, 1},
};
constexpr OutputRule kWriteDraftContextOutputs[] = {{"written", kInt}};
constexpr FieldRule kWriteDraftContextFields[] = {kState, kPageType, kPageSize, kKScale, kVScale};

constexpr InputRule kSampleAndAcceptInputs[] = {
    {"logits", kF, 2},
    {"token_ids", kInt, 1},
    {"positions", kInt, 1},
    {"token_offsets", kInt, 1},
    {"context_lens", kInt, 1},
    {"logit_rows", kInt, 2},
    {"num_candidates", kInt, 1},
    DFLASH_TRT_SAMPLING_INPUTS, // the step inputs of core/sampling.py, in its order
};
constexpr OutputRule kSampleAndAcceptOutputs[] = {
    {"emitted_tokens", kInt},
    {"emitted_logprobs", kReal},
    {"num_accepted", kInt},
    {"bonus_tokens", kInt},
    {"next_context_lens", kInt},
};

constexpr InputRule kDraftTokensInputs[] = {
    {"logits", kF, 2},
    {"temperature", kReal, 1},
    {"seed", kLong, 1},
    {"next_context_lens", kInt, 1},
    {"draft_to_target", kLong, 1},
};
constexpr OutputRule kDraftTokensOutputs[] = {{"token_ids", kInt}};
constexpr FieldRule kDraftTokensFields[] = {{"has_map", FieldType::kInt32, 0, 1}};

constexpr InputRule kCollectiveInputs[] = {{"x", kF, 2}};
constexpr OutputRule kAllReduceOutputs[] = {{"summed", kF}};
constexpr OutputRule kAllGatherOutputs[] = {{"gathered", kF}};
constexpr FieldRule kCollectiveFields[] = {{"num_ranks", FieldType::kInt32, 1, 1024}};

char const* type_name(TensorType type)
{
    switch (type)
    {
    case TensorType::kFloat: return "F";
    case TensorType::kInt32: return "int32";
    case TensorType::kInt64: return "int64";
    case TensorType::kFloat32: return "float32";
    }
    return "";
}

std::string quoted(char const* text)
{
    return std::string("\"") + text + '"';
}

/// A JSON list of the fields of one type, by name.
std::string fields_of(Rules<FieldRule> const& rules, FieldType type)
{
    std::string items;
    for (FieldRule const& rule : rules)
    {
        if (rule.type == type)
        {
            items += (items.empty() ? "" : ", ") + quoted(rule.name);
        }
    }
    return "[" + items + "]";
}

/// A JSON list of what `describe` says of each rule.
template <typename T, typename Describe>
std::string list(Rules<T> const& rules, Describe const& describe)
{
    std::string items;
    for (T const& rule : rules)
    {
        items += (items.empty() ? "" : ", ") + describe(rule);
    }
    return "[" + items + "]";
}

std::string describe_plugin(PluginContract const& plugin)
{
    auto const named = [](auto const& rule) { return quoted(rule.name); };
    auto const typed = [](auto const& rule) { return quoted(type_name(rule.type)); };
    auto const ranked = [](InputRule const& rule) { return std::to_string(rule.rank); };
    return "{\"name\": " + quoted(plugin.name) + ", \"inputs\": " + list(plugin.inputs, named)
        + ", \"input_types\": " + list(plugin.inputs, typed) + ", \"input_ranks\": " + list(plugin.inputs, ranked)
        + ", \"outputs\": " + list(plugin.outputs, named) + ", \"output_types\": " + list(plugin.outputs, typed)
        + ", \"fields\": " + fields_of(plugin.fields, FieldType::kInt32)
        + ", \"real_fields\": " + fields_of(plugin.fields, FieldType::kFloat32) + "}";
}

} // namespace

PluginContract const kAttendPages{"AttendPages", kAttendPagesInputs, kAttendPagesOutputs, kAttendPagesFields};
PluginContract const kAttendDraft{"AttendDraft", kAttendDraftInputs, kAttendDraftOutputs, kAttendDraftFields};
PluginContract const kWriteDraftContext{
    "WriteDraftContext", kWriteDraftContextInputs, kWriteDraftContextOutputs, kWriteDraftContextFields};
PluginContract const kSampleAndAccept{"SampleAndAccept", kSampleAndAcceptInputs, kSampleAndAcceptOutputs, {}};
PluginContract const kDraftTokens{"DraftTokens", kDraftTokensInputs, kDraftTokensOutputs, kDraftTokensFields};
PluginContract const kAllReduce{"AllReduce", kCollectiveInputs, kAllReduceOutputs, kCollectiveFields};
PluginContract const kAllGather{"AllGather", kCollectiveInputs, kAllGatherOutputs, kCollectiveFields};

std::string describe_contract()
{
    std::string plugins;
    for (PluginContract const* plugin : std::array{&kAttendPages, &kAttendDraft, &kWriteDraftContext, &kSampleAndAccept,
             &kDraftTokens, &kAllReduce, &kAllGather})
    {
        plugins += (plugins.empty() ? "" : ", ") + describe_plugin(*plugin);
    }
    return "{\"namespace\": " + quoted(kNamespace) + ", \"version\": " + quoted(kVersion) + ", \"plugins\": [" + plugins
        + "]}";
}

} // namespace dflash_trt
