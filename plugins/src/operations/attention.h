// Queries over K/V pages, and over a block that is in no page. The arithmetic is dflash_trt/kernels/attention.py's;
// tiles, grids and workspace are those of attention_launch.py.
#pragma once

#include "operations/page_geometry.h"
#include "runtime/call_tensors.h"
#include "runtime/device.h"
#include "runtime/prepared_launch.h"

#include <cstddef>
#include <optional>

namespace dflash_trt
{

struct AttentionMask
{
    int64_t window; // keys closer than this are seen; launch_rules::NO_WINDOW: all
    bool is_causal;
    bool is_window_anchored; // of a block: the window is the context before its first slot, and all of the block
    int64_t chunk;           // of positions: keys before a query's own are hidden; launch_rules::NO_CHUNK: none are
    int64_t first_key;       // of a block: stored positions before it are hidden

    [[nodiscard]] int64_t max_lag() const noexcept;
    [[nodiscard]] int64_t max_lead() const noexcept;
};

/// The kernels that a layer needs, whatever its step.
struct AttentionKind
{
    bool has_block;   // keys that are in no page, as of a drafter
    bool has_softcap;
    int64_t chunk;     // as of the mask
    int64_t first_key; // of a block
};

struct AttentionOptions
{
    AttentionMask mask;
    float score_scale; // D^-0.5, if the model has none of its own
    float softcap;     // c: scores become c * tanh(s / c); 0: none
    bool has_sinks;    // of attend_pages alone
    bool shares_kv;    // another node has written K and V, or the context

    [[nodiscard]] bool has_softcap() const noexcept { return softcap > 0.0F; }
    [[nodiscard]] AttentionKind kind(bool has_block) const noexcept
    {
        return {has_block, has_softcap(), mask.chunk, mask.first_key};
    }
};

/// The block of each request, of its num_rows / num_requests slots.
struct BlockSlots
{
    TensorSlot k; // F [num_rows, kv_heads, D]
    TensorSlot v;
};

struct Attention
{
    int64_t num_rows;
    int64_t num_requests;
    int64_t pages_per_request;
    TensorSlot q; // F [num_rows, heads, D]
    std::optional<BlockSlots> block;
    TensorSlot state_pools;   // int64 [states]
    TensorSlot attended;      // F [num_rows, heads, D]
    TensorSlot token_offsets; // int32 [num_requests + 1]; not read with a block
    TensorSlot context_lens;  // int32 [num_requests]: positions stored before the first query row
    TensorSlot page_table;    // int32 [num_requests, pages_per_request]
    std::optional<TensorSlot> sinks; // float32 [heads]; where the options have sinks
};

/// All launches of a geometry together need this, whatever the step's shape and the GPU. Throws Problem when the
/// library has no kernel of the geometry.
size_t attention_workspace_bytes(PageGeometry const& geometry, AttentionKind kind);

/// Throws Problem when the library has no kernels for steps of up to so many requests, on any GPU.
void require_attention(PageGeometry const& geometry, AttentionKind kind, int64_t max_requests);

/// In the order in which they must run, with a workspace of attention_workspace_bytes().
PreparedLaunches prepare_attention(PageGeometry const& geometry, int64_t heads, AttentionOptions const& options,
    Attention const& attention, Device const& device);

} // namespace dflash_trt
