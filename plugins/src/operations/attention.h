// Queries over K/V pages, and over a block that is in no page. The arithmetic is dflash_trt/kernels/attention.py's;
// tiles, grids and workspace are those of attention_launch.py.
#pragma once

#include "operations/page_geometry.h"
#include "runtime/device.h"

#include <cstddef>

namespace dflash_trt
{

struct AttentionMask
{
    int64_t window; // keys closer than this are seen; launch_rules::NO_WINDOW: all
    bool is_causal;
    bool is_window_anchored; // of a block: the window is the context before its first slot, and all of the block

    [[nodiscard]] int64_t max_lag() const noexcept;
    [[nodiscard]] int64_t max_lead() const noexcept;
};

struct Attention
{
    int64_t num_rows;
    int64_t num_requests;
    int64_t pages_per_request;
    void const* q;       // F [num_rows, heads, D]
    void const* block_k; // F [num_rows, kv_heads, D], num_rows / num_requests slots of each request; null: no block
    void const* block_v;
    PagePool pages;
    void* attended;            // F [num_rows, heads, D]
    void const* token_offsets; // int32 [num_requests + 1]; not read with a block
    void const* context_lens;  // int32 [num_requests]: positions stored before the first query row
    void const* page_table;    // int32 [num_requests, pages_per_request]
    void* workspace;           // attention_workspace_bytes()
};

/// All launches of a geometry together need this, whatever the step's shape and the GPU. Throws Problem when the
/// library has no kernel of the geometry.
size_t attention_workspace_bytes(PageGeometry const& geometry, bool has_block);

/// Throws Problem when the library has no kernels for steps of up to so many requests, on any GPU.
void require_attention(PageGeometry const& geometry, bool has_block, int64_t max_requests);

void prepare_attention(PageGeometry const& geometry, bool has_block, int64_t max_requests, Device const& device);

void attend(PageGeometry const& geometry, int64_t heads, AttentionMask const& mask, Attention const& attention,
    Device const& device, CUstream stream);

} // namespace dflash_trt
