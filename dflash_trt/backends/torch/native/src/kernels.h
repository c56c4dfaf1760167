/// The C interface of the library. Sizes and strides are in elements; tensors are float32, rows are contiguous unless a
/// stride says otherwise. A call uses at most `num_threads` threads of PyTorch's own OpenMP runtime, and the bits of a
/// row of its result depend neither on their number nor on the other rows. Every kernel takes the address of its
/// arguments, so that calls can be kept and repeated: see DflashTrtCall.
#pragma once

#include <cstdint>

extern "C"
{

/// Changes with every change of this interface.
int32_t dflash_trt_cpu_version();

/// 1 if `linear` takes rows of bfloat16.
int32_t dflash_trt_cpu_has_bfloat16();

/// weight [out, in] to bfloat16 in panels of 32 outputs and pairs of inputs, [panels, in / 2, 32, 2], padded with zeros.
/// Returns 1, or 0 when bfloat16 does not hold a weight exactly.
int32_t dflash_trt_cpu_pack(float const* weight, int64_t num_out, int64_t num_in, uint16_t* packed);

/// codes [out, in], from -127 to 127, in panels of 32 outputs as codes.h reads them; `packed` has `in` rounded up to a
/// multiple of 4 bytes for each output.
void dflash_trt_cpu_pack_codes(int8_t const* codes, int64_t num_out, int64_t num_in, uint8_t* packed);

/// codes [out, in / 2], the first of two in the low bits, and their scales, bfloat16 [out, in / block], in panels as four_bits.h
/// reads them; outputs that fill the last panel are zeros.
void dflash_trt_cpu_pack_four_bits(
    uint8_t const* codes, uint16_t const* scales, int64_t num_out, int64_t num_in, int64_t block, uint8_t* packed);

/// One call of a kernel.
struct DflashTrtCall
{
    void (*kernel)(void const*);
    void const* arguments;
};

/// Calls in their order.
void dflash_trt_cpu_run(DflashTrtCall const* calls, int64_t num_calls);

/// x [rows, in] @ weight.T + bias.
struct DflashTrtLinear
{
    void const* x; // see `form`
    int64_t num_rows;
    void const* packed; // bfloat16, or codes
    int64_t num_out, num_in;
    float const* scales; // [out], of codes
    float const* bias;   // null: none
    float* out;
    int32_t num_threads;
    /// Of x: 0 float32, 1 bfloat16, 2 float32 that is rounded to bfloat16 (1 and 2 have an even num_in), 3 float32 that
    /// becomes codes, for weights that are.
    int32_t form;
};

void dflash_trt_cpu_linear(DflashTrtLinear const*);

/// x [rows, in] @ weight.T * scales + bias, of weights of four bits: in panels, see four_bits.h, or as a checkpoint stores
/// them, codes [out, in / 2] and scales [out, in / block], see stored_codes.cpp.
struct DflashTrtFourBitLinear
{
    float const* x;
    int64_t num_rows;
    uint8_t const* codes;
    void const* block_scales; // null: in the panels
    int64_t num_out, num_in;  // inputs of stored codes: a multiple of 32
    int64_t block;            // inputs that share a scale: 16 or 32
    float const* values;      // [16], of the codes
    float const* scales;      // [out]; null: none
    float const* bias;        // null: none
    float* out;
    int32_t num_threads;
    int32_t rounds_inputs; // to integers by block: of eight bits, or with stored codes of 16
    int32_t has_powers;    // block_scales are bytes of which 127 stands for 1, else bfloat16
};

void dflash_trt_cpu_four_bit_linear(DflashTrtFourBitLinear const*);

/// Row i of x [rows, width] with row i % num_weights of weight [num_weights, width].
struct DflashTrtRmsNorm
{
    float const* x;
    int64_t num_rows, width;
    float const* weight;
    int64_t num_weights;
    float eps;
    float* out;
};

void dflash_trt_cpu_rms_norm(DflashTrtRmsNorm const*);

/// [rows, 2 * width] -> silu(first half) * second half.
struct DflashTrtSiluMul
{
    float const* gate_up;
    int64_t num_rows, width;
    float* out;
};

void dflash_trt_cpu_silu_mul(DflashTrtSiluMul const*);

/// a + b.
struct DflashTrtAdd
{
    float const *a, *b;
    int64_t size;
    float* out;
};

void dflash_trt_cpu_add(DflashTrtAdd const*);

/// out[i] = x[rows[i]] * factor.
struct DflashTrtCopyRows
{
    void const* x;
    int64_t x_stride;
    int32_t const* rows; // null: row i
    int64_t num_rows, width;
    float factor;
    float* out;
    int64_t out_stride;
    int32_t is_bfloat16; // x; else float32
};

void dflash_trt_cpu_copy_rows(DflashTrtCopyRows const*);

/// Rotary embedding of heads, normed before.
struct DflashTrtRotation
{
    float const* norm;        // [heads or 1, head_dim]; null: none
    int64_t norm_stride;      // 0: one weight for all heads
    float const* cos;         // [positions of the table, head_dim]
    float const* sin;
    int32_t const* positions; // [rows]
    float eps;
};

/// x [rows, heads, head_dim], in place.
struct DflashTrtRotate
{
    float* x;
    int64_t row_stride, num_rows, num_heads, head_dim;
    DflashTrtRotation rotation;
};

void dflash_trt_cpu_rotate(DflashTrtRotate const*);

/// See `DeviceSlots.assemble`, of rows without padding.
struct DflashTrtAssemble
{
    int64_t num_requests, num_pages, num_groups, draft_topk;
    int64_t const* slot_ids;        // [requests]
    int32_t const* token_offsets;   // [requests + 1]
    int32_t const* given_lens;      // [requests], negative where the slot has it
    int32_t const* given_token_ids; // [rows]
    int32_t const* slot_lens;       // [slots]
    int32_t const* slot_token_ids;  // [slots, slot_width]
    int64_t slot_width;
    int32_t const* slot_tables; // [slots, groups, max_pages]
    int64_t max_pages;
    int32_t const* slot_topk_ids; // [slots, slot_topk]
    float const* slot_topk_probs;
    int64_t slot_topk;
    int32_t* context_lens; // [requests]
    int32_t* positions;    // [rows]
    int32_t* token_ids;    // [rows]
    int32_t* page_tables;  // [groups, requests, num_pages]
    int32_t* topk_ids;     // [requests, draft_topk]
    float* topk_probs;
};

void dflash_trt_cpu_assemble(DflashTrtAssemble const*);

/// See `DeviceSlots.store`, of greedy drafts.
struct DflashTrtStore
{
    int64_t num_requests, num_drafts;
    int64_t const* slot_ids;          // [requests]
    int32_t const* bonus_tokens;      // [requests]
    int32_t const* drafts;            // [requests, num_drafts]
    int32_t const* next_context_lens; // [requests]
    int32_t* slot_lens;               // [slots]
    int32_t* slot_token_ids;          // [slots, slot_width]
    int64_t slot_width;
};

void dflash_trt_cpu_store(DflashTrtStore const*);

/// Rows of tokens and the pages of their requests.
struct DflashTrtTokenRows
{
    int64_t num_rows;
    int64_t num_requests;
    int32_t const* positions;     // [rows]
    int32_t const* token_offsets; // [requests + 1]; null: as many rows for every request
    int32_t const* context_lens;  // [requests], positions in the pages before a request's first row
    int32_t const* page_table;    // [requests, ...]
    int64_t page_table_stride;
    int64_t page_size;
    int32_t keeps_kv; // 1: the rows' K and V go into the pages first; 0: they follow the pages' for this call
};

/// One layer: see `Ops.attend`.
struct DflashTrtAttention
{
    DflashTrtTokenRows const* rows;
    float const* q; // [rows, heads, head_dim]
    float const* k; // [rows, kv_heads, head_dim]
    float const* v;
    int64_t q_stride, k_stride, v_stride; // of a row
    void* pages;                          // [pages, 2, page_size, kv_heads, head_dim], see `rounds_kv`
    int64_t num_heads, num_kv_heads, head_dim; // head_dim: a multiple of 32
    float const* sinks;                   // [heads]; null: none
    float* out;                           // [rows, heads, head_dim]
    int64_t window;                       // 0: none
    int64_t chunk;                        // 0: none; of positions whose queries see its keys alone
    float scale;
    float softcap; // 0: none
    int32_t is_causal;
    int32_t is_window_anchored;
    int32_t first_key; // of the stored ones, for rows whose own are not stored
    int32_t num_threads;
    int32_t rounds_kv; // 1: pages are bfloat16; 0: float32
};

void dflash_trt_cpu_attend(DflashTrtAttention const*);

/// K [rows, kv_heads, head_dim] at kv, normed and rotated, and V behind it, into the pages; rows at positions >= limits
/// [requests] of their request leave them alone.
struct DflashTrtStoreKv
{
    DflashTrtTokenRows const* rows;
    DflashTrtRotation rotation;
    float const* kv;
    int64_t kv_stride;
    void* pages;
    int64_t num_kv_heads, head_dim;
    int32_t const* limits;
    int32_t rounds_kv;
};

void dflash_trt_cpu_store_kv(DflashTrtStoreKv const*);

/// See `Ops.sample_and_accept`.
struct DflashTrtAcceptance
{
    float const* logits; // [requests * width, vocab_size]
    int64_t vocab_size, num_requests, width;
    int32_t const* sampled;        // [requests, width]; null: the likeliest tokens
    int32_t const* token_ids;      // [rows]
    int32_t const* logit_rows;     // [requests, width]
    int32_t const* num_candidates; // [requests]
    int32_t const* token_offsets;  // [requests + 1]
    int32_t const* context_lens;   // [requests]
    int32_t* emitted_tokens;       // [requests, width]
    float* emitted_logprobs;       // [requests, width]
    int32_t* num_accepted;         // [requests]
    int32_t* bonus_tokens;         // [requests]
    int32_t* next_context_lens;    // [requests]
};

void dflash_trt_cpu_accept(DflashTrtAcceptance const*);

/// The probability of each row's largest score, of scores [rows, width]: see `Proposal.confidence`.
struct DflashTrtConfidence
{
    float const* scores;
    int64_t num_rows, width;
    float* out; // [rows]
};

void dflash_trt_cpu_confidence(DflashTrtConfidence const*);

/// Blocks [bonus token, fill, ...] from the position after the accepted tokens on: see `Ops.token_blocks`.
struct DflashTrtBlocks
{
    int32_t const* bonus_tokens; // [requests]
    int32_t const* starts;       // [requests]
    int64_t num_requests, width;
    int32_t fill;
    int32_t* token_ids; // [requests, width]
    int32_t* positions; // [requests, width]
};

void dflash_trt_cpu_blocks(DflashTrtBlocks const*);

/// The convolution of DFlash2 over the slots of blocks: see `Ops.block_conv`.
struct DflashTrtBlockConv
{
    float const* x; // [rows, width], width: groups * group_size
    int64_t num_rows, num_slots;
    float const* filters; // [rows, taps, groups]
    int64_t filter_stride; // of a row
    float const* base;     // [taps, width]
    int64_t num_taps, num_groups, group_size;
    float* out; // [rows, width]
};

void dflash_trt_cpu_block_conv(DflashTrtBlockConv const*);

/// The `top_k` largest logits of each row of [rows, vocab_size], best first, as scores and tokens [rows, top_k]. Of
/// equal ones the smaller token is first; NaN is below all.
struct DflashTrtCandidates
{
    float const* logits;
    int64_t num_rows, vocab_size, top_k;
    float* scores;
    int32_t* tokens;
};

void dflash_trt_cpu_candidates(DflashTrtCandidates const*);

/// The walk of DFlash2 through candidates: see `Ops.select_tokens`.
struct DflashTrtSelection
{
    float* scores;         // [requests, slots, top_k]; gets what the walk adds, without the noise
    int32_t const* tokens; // [requests, slots, top_k]
    float const* noise;    // [requests, slots, top_k], added to scores; null: none
    float const* hidden;   // [requests, slots, rank]
    float const* predecessor; // [vocab, rank]
    float const* successor;
    int32_t const* first_tokens; // [requests]: before the first slot
    int64_t num_requests, num_slots, top_k, rank;
    int32_t* out; // [requests, slots]
};

void dflash_trt_cpu_select(DflashTrtSelection const*);
}
