// Nodes as plugins/README.md describes them, written down a second time: the library, whose tables are generated, is
// held against this.
#pragma once

#include "fakes.h"

#include <algorithm>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace host
{

using Field = std::pair<std::string, std::variant<int32_t, float>>;

struct Node
{
    std::string name;
    std::vector<Field> fields;
    std::vector<Tensor> inputs;
    std::vector<Tensor> outputs;
    size_t num_launches;

    /// Of an engine that is built with `deterministic` or has integers; a library of another has no kernels for it.
    [[nodiscard]] bool is_deterministic() const
    {
        return is_tiled() || name == "Int8Linear" || name == "RmsNorm" || name == "AttendInSplits" || name == "GatedDeltaInOrder"
            || name == "AttendLatentsInSplits";
    }
    /// A program of the first launch has a tile of rows.
    [[nodiscard]] bool is_tiled() const { return name == "Linear" || name == "HeadProduct"; }
    [[nodiscard]] bool is_collective() const { return !fields.empty() && fields[0].first == "num_ranks"; }

    [[nodiscard]] Tensor& input(std::string const& wanted)
    {
        for (Tensor& tensor : inputs)
        {
            if (tensor.name == wanted)
            {
                return tensor;
            }
        }
        throw wanted;
    }
};

// Sizes of a step; all different where they could be confused.
constexpr int64_t kTokens = 6, kRequests = 2, kWidth = 3, kPagesPerRequest = 7, kStates = 5;
constexpr int64_t kHeads = 4, kKvHeads = 2, kHeadDim = 16, kVocabulary = 5000, kDraftTopk = 32;
constexpr int64_t kSlots = 9, kScored = 4;
// Of tests/plugins/delta_cases.py.
constexpr int64_t kKeyHeads = 2, kValueHeads = 4, kKeyDim = 16, kValueDim = 24, kConvSize = 4;
constexpr int64_t kDeltaStates = 8; // the six of the node, from the third on
constexpr int64_t kChannels = 2 * kKeyHeads * kKeyDim + kValueHeads * kValueDim;
constexpr int64_t kLatentDim = 24, kLatentRow = 32; // of tests/plugins/latent_cases.py
constexpr int64_t kLatentNope = 16, kLatentValue = 12;
constexpr int64_t kLinear = 48; // output features
constexpr int64_t kExperts = 8, kHidden = 64, kFfn = 96; // of MXFP4, as one of tests/plugins/expert_cases.py

/// `has_fp8_pages`: of scaled FP8; else of `f`.
inline std::vector<Node> make_nodes(
    nvinfer1::DataType f, bool has_fp8_pages, int64_t head_dim = kHeadDim, int64_t num_tokens = kTokens)
{
    auto const i32 = nvinfer1::DataType::kINT32;
    auto const i64 = nvinfer1::DataType::kINT64;
    auto const f32 = nvinfer1::DataType::kFLOAT;
    auto const i8 = nvinfer1::DataType::kINT8;
    Tensor const pools{"state_pools", {kStates}, i64};
    Field const state{"state", 3};
    Field const page_type{"page_type", has_fp8_pages ? 1 : 0};
    Field const k_scale{"k_scale", has_fp8_pages ? 0.02F : 1.0F};
    Field const v_scale{"v_scale", has_fp8_pages ? 0.3F : 1.0F};
    Field const softcap{"softcap", 0.0F};
    Field const score_scale{"score_scale", 0.25F};
    Tensor const positions{"positions", {num_tokens}, i32};
    Tensor const token_offsets{"token_offsets", {kRequests + 1}, i32};
    Tensor const page_table{"page_table", {kRequests, kPagesPerRequest}, i32};
    Tensor const next_context_lens{"next_context_lens", {kRequests}, i32};
    auto const rows = [&](char const* name, int64_t num_rows, int64_t heads)
    { return Tensor{name, {num_rows, heads, head_dim}, f}; };
    auto const attended = [&](int64_t num_rows) { return Tensor{"attended", {num_rows, kHeads * head_dim}, f}; };
    auto const per_request = [&](char const* name, nvinfer1::DataType type) { return Tensor{name, {kRequests}, type}; };
    int64_t const block = kRequests * kWidth;
    int64_t const expert_rows = std::min<int64_t>(num_tokens, 40); // as many as the smallest tiles are for
    return {
        {"AttendPages",
            {state, page_type, {"page_size", 4}, {"window", 0}, {"chunk", 0}, {"max_verify_rows", int32_t{kWidth}}, {"has_sinks", 1}, {"shares_kv", 0}, k_scale,
                v_scale, softcap, score_scale},
            {rows("q", num_tokens, kHeads), rows("k", num_tokens, kKvHeads), rows("v", num_tokens, kKvHeads), pools,
                positions, token_offsets, per_request("context_lens", i32), page_table, {"sinks", {kHeads}, f32}},
            {attended(num_tokens)}, 3},
        {"AttendDraft",
            {state, page_type, {"page_size", 4}, {"window", 8}, {"is_causal", 0}, {"is_window_anchored", 0},
                {"first_key", 1}, {"shares_kv", 0}, k_scale, v_scale, softcap, score_scale},
            {rows("context_k", num_tokens, kKvHeads), rows("context_v", num_tokens, kKvHeads), rows("q", block, kHeads),
                rows("block_k", block, kKvHeads), rows("block_v", block, kKvHeads), pools, positions, token_offsets,
                page_table, next_context_lens},
            {attended(block)}, 3},
        {"WriteDraftContext", {state, page_type, {"page_size", 4}, k_scale, v_scale},
            {rows("context_k", num_tokens, kKvHeads), rows("context_v", num_tokens, kKvHeads), pools, positions,
                token_offsets, page_table, next_context_lens},
            {{"written", {1}, i32}}, 1},
        {"PreviousRows", {state, {"page_size", 4}},
            {{"x", {num_tokens, kHidden}, f}, pools, positions, token_offsets, per_request("context_lens", i32), page_table},
            {{"before", {num_tokens, kHidden}, f}}, 1},
        {"SampleAndAccept", {{"draft_topk", int32_t{kDraftTopk}}},
            {{"logits", {block, kVocabulary}, f}, {"token_ids", {num_tokens}, i32}, positions, token_offsets,
                per_request("context_lens", i32), {"logit_rows", {kRequests, kWidth}, i32},
                per_request("num_candidates", i32), {"draft_topk_ids", {kRequests, (kWidth - 1) * kDraftTopk}, i32},
                {"draft_topk_probs", {kRequests, (kWidth - 1) * kDraftTopk}, f32}, per_request("temperature", f32),
                per_request("top_k", i32), per_request("top_p", f32), per_request("min_p", f32), per_request("seed", i64),
                per_request("draft_stream", i32), per_request("slot_ids", i64), {"row_masks", {1}, i32},
                {"mask_bits", {1, (kVocabulary + 31) / 32}, i32}, {"has_rules", {kSlots}, i32},
                {"num_prompt_tokens", {kSlots}, i32}, {"penalties", {kSlots, 3}, f32}, {"num_biases", {kSlots}, i32},
                {"bias_tokens", {kSlots, 1024}, i32}, {"bias_values", {kSlots, 1024}, f32},
                {"bias_ends", {kSlots, 1024}, i32}, {"prefixes", {kSlots, 1024, 32}, i32}, {"tokens", {kSlots, 64}, i32}},
            {{"emitted_tokens", {kRequests, kWidth}, i32}, {"emitted_logprobs", {kRequests, kWidth}, f32},
                per_request("num_accepted", i32), per_request("bonus_tokens", i32), next_context_lens},
            9},
        {"ScoreRows", {{"num_top", 20}},
            {{"logits", {block, kVocabulary}, f}, {"scored_rows", {kScored}, i64}, {"scored_tokens", {kScored}, i64}},
            {{"top_tokens", {kScored, 20}, i32}, {"top_logprobs", {kScored, 20}, f32}, {"token_logprobs", {kScored}, f32}},
            2},
        {"DraftTokens", {{"has_map", 0}, {"draft_topk", int32_t{kDraftTopk}}},
            {{"logits", {block, kVocabulary}, f}, per_request("temperature", f32), per_request("seed", i64),
                per_request("draft_stream", i32), next_context_lens, {"draft_to_target", {1}, i64}},
            {{"token_ids", {kRequests, kWidth}, i32}, {"next_draft_topk_ids", {kRequests, kWidth * kDraftTopk}, i32},
                {"next_draft_topk_probs", {kRequests, kWidth * kDraftTopk}, f32}},
            2},
        {"Experts",
            {{"first_expert", 0}, {"num_chosen", 3}, {"routing", 1}, {"normalizes", 0}, {"has_choice_bias", 0},
                {"num_groups", 1}, {"num_chosen_groups", 1}, {"activation", 1}, {"scales_inputs", 0}, {"has_fixed_tiles", 0},
                {"gate_up_form", 3},
                {"gate_up_has_row_scale", 0}, {"gate_up_has_input_scale", 0},
                {"gate_up_has_bias", 1}, {"down_form", 3}, {"down_has_row_scale", 0}, {"down_has_input_scale", 0},
                {"down_has_bias", 1}, {"routing_scale", 1.0F}, {"limit", 7.0F}, {"alpha", 1.702F}},
            {{"x", {expert_rows, kHidden}, f}, {"logits", {expert_rows, kExperts}, f}, {"choice_bias", {1}, f32},
                {"gate_up_codes", {kExperts, 2 * kFfn, kHidden / 2}, i8},
                {"gate_up_block_scale", {kExperts, 2 * kFfn, kHidden / 32}, i8}, {"gate_up_block_rows", {1}, i32},
                {"gate_up_row_scale", {1, 1}, f32}, {"gate_up_input_scale", {1, 1}, f32},
                {"gate_up_bias", {kExperts, 2 * kFfn}, f}, {"down_codes", {kExperts, kHidden, kFfn / 2}, i8},
                {"down_block_scale", {kExperts, kHidden, kFfn / 32}, i8}, {"down_block_rows", {1}, i32},
                {"down_row_scale", {1, 1}, f32}, {"down_input_scale", {1, 1}, f32},
                {"down_bias", {kExperts, kHidden}, f}},
            {{"out", {expert_rows, kHidden}, f}}, 5},
        {"GatedDelta", {{"state", 2}, {"num_records", 4}, {"num_key_heads", int32_t{kKeyHeads}}, {"eps", 1e-6F}},
            {{"qkvz", {num_tokens, kChannels + kValueHeads * kValueDim}, f}, {"ba", {num_tokens, 2 * kValueHeads}, f},
                {"conv", {kChannels, kConvSize}, f}, {"log_rate", {kValueHeads}, f32}, {"dt_bias", {kValueHeads}, f32},
                {"norm", {kValueDim}, f}, {"state_pools", {kDeltaStates}, i64}, per_request("slot_ids", i64),
                token_offsets, per_request("context_lens", i32)},
            {{"out", {num_tokens, kValueHeads * kValueDim}, f}}, 4},
        {"AttendLatents",
            {state, page_type, {"page_size", 4}, {"latent_dim", int32_t{kLatentDim}}, {"max_verify_rows", int32_t{kWidth}},
                k_scale, score_scale},
            {{"q", {num_tokens, kHeads, kLatentRow}, f}, {"own", {num_tokens, kLatentRow}, f},
                {"q_nope", {kHeads, num_tokens, kLatentNope}, f}, {"k_factor", {kHeads, kLatentNope, kLatentDim}, f},
                {"v_factor", {kHeads, kLatentValue, kLatentDim}, f}, pools, positions, token_offsets,
                per_request("context_lens", i32), page_table},
            {{"attended", {num_tokens, kHeads, kLatentDim}, f}, {"direct", {num_tokens, kHeads, kLatentValue}, f}}, 4},
        // Sizes of tests/plugins/fixed_cases.py.
        {"Int8Linear", {{"has_bias", 1}},
            {{"x", {num_tokens, kHidden}, f}, {"codes", {kLinear, kHidden}, i8}, {"weight_scale", {kLinear}, f32},
                {"bias", {kLinear}, f}},
            {{"out", {num_tokens, kLinear}, f}}, 2},
        // Of deterministic engines, over pages of F; sizes of tests/plugins/fixed_cases.py.
        {"Linear", {{"form", 0}, {"has_row_scale", 0}, {"has_input_scale", 0}, {"has_bias", 1}},
            {{"x", {num_tokens, kHidden}, f}, {"codes", {kLinear, kHidden * (f == f32 ? 4 : 2)}, i8},
                {"block_scale", {1, 1}, i8}, {"block_rows", {1}, i32}, {"row_scale", {1}, f32},
                {"input_scale", {1}, f32}, {"bias", {kLinear}, f}},
            {{"out", {num_tokens, kLinear}, f}}, 1},
        {"RmsNorm", {{"eps", 1e-6F}}, {{"x", {num_tokens, kHidden}, f}, {"weight", {kHidden}, f32}},
            {{"normed", {num_tokens, kHidden}, f}}, 1},
        {"HeadProduct", {},
            {{"x", {num_tokens, kHeads, kLatentNope}, f}, {"factor", {kHeads, kLatentNope, kLatentDim}, f}},
            {{"out", {num_tokens, kHeads, kLatentDim}, f}}, 1},
        {"AttendInSplits",
            {{"split_length", 128}, state, {"page_type", 0}, {"page_size", 4}, {"window", 0}, {"chunk", 0},
                {"max_verify_rows", int32_t{kWidth}}, {"has_sinks", 1}, {"shares_kv", 0}, {"k_scale", 1.0F},
                {"v_scale", 1.0F}, softcap, score_scale},
            {rows("q", num_tokens, kHeads), rows("k", num_tokens, kKvHeads), rows("v", num_tokens, kKvHeads), pools,
                positions, token_offsets, per_request("context_lens", i32), page_table, {"sinks", {kHeads}, f32}},
            {attended(num_tokens)}, 4},
        {"GatedDeltaInOrder", {{"state", 2}, {"num_records", 4}, {"num_key_heads", int32_t{kKeyHeads}}, {"eps", 1e-6F}},
            {{"qkvz", {num_tokens, kChannels + kValueHeads * kValueDim}, f}, {"ba", {num_tokens, 2 * kValueHeads}, f},
                {"conv", {kChannels, kConvSize}, f}, {"log_rate", {kValueHeads}, f32}, {"dt_bias", {kValueHeads}, f32},
                {"norm", {kValueDim}, f}, {"state_pools", {kDeltaStates}, i64}, per_request("slot_ids", i64),
                token_offsets, per_request("context_lens", i32)},
            {{"out", {num_tokens, kValueHeads * kValueDim}, f}}, 3},
        {"AttendLatentsInSplits",
            {{"split_length", 16}, state, {"page_type", 0}, {"page_size", 4}, {"latent_dim", int32_t{kLatentDim}},
                {"max_verify_rows", int32_t{kWidth}}, {"k_scale", 1.0F}, score_scale},
            {{"q", {num_tokens, kHeads, kLatentRow}, f}, {"own", {num_tokens, kLatentRow}, f},
                {"q_nope", {kHeads, num_tokens, kLatentNope}, f}, {"k_factor", {kHeads, kLatentNope, kLatentDim}, f},
                {"v_factor", {kHeads, kLatentValue, kLatentDim}, f}, pools, positions, token_offsets,
                per_request("context_lens", i32), page_table},
            {{"attended", {num_tokens, kHeads, kLatentDim}, f}, {"direct", {num_tokens, kHeads, kLatentValue}, f}}, 4},
        {"AllReduce", {{"num_ranks", 3}}, {{"x", {kTokens, kHeadDim}, f}}, {{"summed", {kTokens, kHeadDim}, f}}, 0},
        {"AllGather", {{"num_ranks", 3}}, {{"x", {kTokens, kHeadDim}, f}}, {{"gathered", {3 * kTokens, kHeadDim}, f}},
            0},
        {"ReduceScatter", {{"num_ranks", 3}}, {{"x", {3, kTokens, kHeadDim}, f}}, {{"summed", {kTokens, kHeadDim}, f}},
            0},
        {"AllToAll", {{"num_ranks", 3}}, {{"x", {3, kTokens, kHeadDim}, f}},
            {{"received", {3, kTokens, kHeadDim}, f}}, 0},
    };
}

} // namespace host
