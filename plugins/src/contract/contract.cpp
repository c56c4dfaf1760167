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
constexpr TensorType kBytes = TensorType::kInt8;

constexpr FieldRule kState{"state", FieldType::kInt32, 0, std::numeric_limits<int32_t>::max()};
constexpr FieldRule kPageType{"page_type", FieldType::kInt32, 0, 1}; // a PageType
constexpr FieldRule kPageSize{"page_size", FieldType::kInt32, 1, 1 << 16};
constexpr FieldRule kWindow{"window", FieldType::kInt32, 0, std::numeric_limits<int32_t>::max()};
constexpr FieldRule kChunk{"chunk", FieldType::kInt32, 0, std::numeric_limits<int32_t>::max()}; // 0: none
constexpr FieldRule kHasSinks{"has_sinks", FieldType::kInt32, 0, 1};
constexpr FieldRule kSharesKv{"shares_kv", FieldType::kInt32, 0, 1};
constexpr FieldRule kIsCausal{"is_causal", FieldType::kInt32, 0, 1};
constexpr FieldRule kIsWindowAnchored{"is_window_anchored", FieldType::kInt32, 0, 1};
constexpr FieldRule kFirstKey{"first_key", FieldType::kInt32, 0, 1};
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
    kState, kPageType, kPageSize, kWindow, kChunk, kHasSinks, kSharesKv, kKScale, kVScale, kSoftcap, kScoreScale};

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
constexpr FieldRule kAttendDraftFields[] = {kState, kPageType, kPageSize, kWindow, kIsCausal, kIsWindowAnchored,
    kFirstKey, kSharesKv, kKScale, kVScale, kSoftcap, kScoreScale};

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

constexpr InputRule kPreviousRowsInputs[] = {
    {"x", kF, 2},
    {"state_pools", kLong, 1},
    {"positions", kInt, 1},
    {"token_offsets", kInt, 1},
    {"context_lens", kInt, 1},
    {"page_table", kInt, 2},
};
constexpr OutputRule kPreviousRowsOutputs[] = {{"before", kF}};
constexpr FieldRule kPreviousRowsFields[] = {kState, kPageSize};

constexpr InputRule kSampleAndAcceptInputs[] = {
    {"logits", kF, 2},
    {"token_ids", kInt, 1},
    {"positions", kInt, 1},
    {"token_offsets", kInt, 1},
    {"context_lens", kInt, 1},
    {"logit_rows", kInt, 2},
    {"num_candidates", kInt, 1},
    {"choices", kInt, 2},
    {"chances", kReal, 2},
    DFLASH_TRT_SAMPLING_INPUTS, // the step inputs of core/sampling.py, in its order
};
constexpr OutputRule kSampleAndAcceptOutputs[] = {
    {"emitted_tokens", kInt},
    {"emitted_logprobs", kReal},
    {"num_accepted", kInt},
    {"bonus_tokens", kInt},
    {"next_context_lens", kInt},
};

constexpr FieldRule kSampleAndAcceptFields[] = {{"num_choices", FieldType::kInt32, 0, 1 << 16}};

constexpr InputRule kDraftTokensInputs[] = {
    {"logits", kF, 2},
    {"temperature", kReal, 1},
    {"seed", kLong, 1},
    {"draft_stream", kInt, 1},
    {"next_context_lens", kInt, 1},
    {"draft_to_target", kLong, 1},
};
constexpr OutputRule kDraftTokensOutputs[] = {{"token_ids", kInt}, {"draft_choices", kInt}, {"draft_chances", kReal}};
constexpr FieldRule kDraftTokensFields[] = {
    {"has_map", FieldType::kInt32, 0, 1}, {"num_choices", FieldType::kInt32, 1, 1 << 16}};

constexpr InputRule kExpertsInputs[] = {
    {"x", kF, 2},
    {"logits", kF, 2},
    {"choice_bias", kReal, 1},
    {"gate_up_codes", kBytes, 3},
    {"gate_up_block_scale", kBytes, 3},
    {"gate_up_block_rows", kInt, 1},
    {"gate_up_row_scale", kReal, 2},
    {"gate_up_input_scale", kReal, 2},
    {"gate_up_bias", kF, 2},
    {"down_codes", kBytes, 3},
    {"down_block_scale", kBytes, 3},
    {"down_block_rows", kInt, 1},
    {"down_row_scale", kReal, 2},
    {"down_input_scale", kReal, 2},
    {"down_bias", kF, 2},
};
constexpr OutputRule kExpertsOutputs[] = {{"out", kF}};
constexpr FieldRule kExpertsFields[] = {
    {"first_expert", FieldType::kInt32, 0, 4095},
    {"num_chosen", FieldType::kInt32, 1, 4096},
    {"routing", FieldType::kInt32, 0, 2},
    {"normalizes", FieldType::kInt32, 0, 1},
    {"has_choice_bias", FieldType::kInt32, 0, 1},
    {"num_groups", FieldType::kInt32, 1, 4096},
    {"num_chosen_groups", FieldType::kInt32, 1, 4096},
    {"activation", FieldType::kInt32, 0, 2},
    {"scales_inputs", FieldType::kInt32, 0, 1},
    {"gate_up_form", FieldType::kInt32, 0, 5},
    {"gate_up_has_row_scale", FieldType::kInt32, 0, 1},
    {"gate_up_has_input_scale", FieldType::kInt32, 0, 1},
    {"gate_up_has_bias", FieldType::kInt32, 0, 1},
    {"down_form", FieldType::kInt32, 0, 5},
    {"down_has_row_scale", FieldType::kInt32, 0, 1},
    {"down_has_input_scale", FieldType::kInt32, 0, 1},
    {"down_has_bias", FieldType::kInt32, 0, 1},
    {"routing_scale", FieldType::kFloat32, kLeastReal, kMostReal},
    {"limit", FieldType::kFloat32, kLeastReal, kMostReal},
    {"alpha", FieldType::kFloat32, kLeastReal, kMostReal},
};

constexpr InputRule kGatedDeltaInputs[] = {
    {"qkvz", kF, 2},
    {"ba", kF, 2},
    {"conv", kF, 2},
    {"log_rate", kReal, 1},
    {"dt_bias", kReal, 1},
    {"norm", kF, 1},
    {"state_pools", kLong, 1},
    {"slot_ids", kLong, 1},
    {"token_offsets", kInt, 1},
    {"context_lens", kInt, 1},
};
constexpr OutputRule kGatedDeltaOutputs[] = {{"out", kF}};
constexpr FieldRule kGatedDeltaFields[] = {
    kState,
    {"num_records", FieldType::kInt32, 1, 1 << 16},
    {"num_key_heads", FieldType::kInt32, 1, 1 << 16},
    {"eps", FieldType::kFloat32, kLeastReal, kMostReal},
};

constexpr InputRule kAttendLatentsInputs[] = {
    {"q", kF, 3},
    {"own", kF, 2},
    {"q_nope", kF, 3},
    {"k_factor", kF, 3},
    {"v_factor", kF, 3},
    {"state_pools", kLong, 1},
    {"positions", kInt, 1},
    {"token_offsets", kInt, 1},
    {"context_lens", kInt, 1},
    {"page_table", kInt, 2},
};
constexpr OutputRule kAttendLatentsOutputs[] = {{"attended", kF}, {"direct", kF}};
constexpr FieldRule kAttendLatentsFields[] = {
    kState,
    kPageType,
    kPageSize,
    {"latent_dim", FieldType::kInt32, 1, 1 << 16},
    {"max_verify_rows", FieldType::kInt32, 1, 1 << 16},
    kKScale,
    kScoreScale,
};

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
    case TensorType::kInt8: return "int8";
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
PluginContract const kPreviousRows{"PreviousRows", kPreviousRowsInputs, kPreviousRowsOutputs, kPreviousRowsFields};
PluginContract const kSampleAndAccept{
    "SampleAndAccept", kSampleAndAcceptInputs, kSampleAndAcceptOutputs, kSampleAndAcceptFields};
PluginContract const kDraftTokens{"DraftTokens", kDraftTokensInputs, kDraftTokensOutputs, kDraftTokensFields};
PluginContract const kExperts{"Experts", kExpertsInputs, kExpertsOutputs, kExpertsFields};
PluginContract const kGatedDelta{"GatedDelta", kGatedDeltaInputs, kGatedDeltaOutputs, kGatedDeltaFields};
PluginContract const kAttendLatents{
    "AttendLatents", kAttendLatentsInputs, kAttendLatentsOutputs, kAttendLatentsFields};
PluginContract const kAllReduce{"AllReduce", kCollectiveInputs, kAllReduceOutputs, kCollectiveFields};
PluginContract const kAllGather{"AllGather", kCollectiveInputs, kAllGatherOutputs, kCollectiveFields};

std::string describe_contract()
{
    std::string plugins;
    for (PluginContract const* plugin : std::array{&kAttendPages, &kAttendDraft, &kWriteDraftContext, &kPreviousRows,
             &kSampleAndAccept, &kDraftTokens, &kExperts, &kGatedDelta, &kAttendLatents, &kAllReduce, &kAllGather})
    {
        plugins += (plugins.empty() ? "" : ", ") + describe_plugin(*plugin);
    }
    return "{\"namespace\": " + quoted(kNamespace) + ", \"version\": " + quoted(kVersion) + ", \"plugins\": [" + plugins
        + "]}";
}

} // namespace dflash_trt
