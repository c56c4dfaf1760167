// The four operations of plugins/README.md, each in one call: what a plugin's enqueue and the C API have in common.
#pragma once

#include "operations/attention.h"
#include "operations/page_geometry.h"
#include "operations/sampling.h"
#include "runtime/device.h"

#include <cstddef>
#include <cstdint>

namespace dflash_trt
{

struct StepShape
{
    int64_t num_tokens;        // T
    int64_t num_requests;      // R
    int64_t block_rows;        // S; of attend_draft only
    int64_t pages_per_request; // P
};

struct AttendPagesBuffers
{
    void const* q;
    void const* k;
    void const* v;
    PagePool pages;
    void const* positions;
    void const* token_offsets;
    void const* context_lens;
    void const* page_table;
    void* attended;
    void* workspace;
};

struct DraftContextBuffers
{
    void const* context_k;
    void const* context_v;
    PagePool pages;
    void const* positions;
    void const* token_offsets;
    void const* page_table;
    void const* next_context_lens;
};

struct DraftBlockBuffers
{
    void const* q;
    void const* block_k;
    void const* block_v;
    void* attended;
    void* workspace;
};

void attend_pages(PageGeometry const& geometry, int64_t heads, int64_t window, StepShape const& shape,
    AttendPagesBuffers const& buffers, Device const& device, CUstream stream);

void write_draft_context(PageGeometry const& geometry, StepShape const& shape, DraftContextBuffers const& buffers,
    Device const& device, CUstream stream);

void attend_draft(PageGeometry const& geometry, int64_t heads, AttentionMask const& mask, StepShape const& shape,
    DraftContextBuffers const& context, DraftBlockBuffers const& block, Device const& device, CUstream stream);

} // namespace dflash_trt
