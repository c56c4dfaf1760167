#include "operations/step_operations.h"

#include "operations/page_write.h"

namespace dflash_trt
{

void attend_pages(PageGeometry const& geometry, int64_t heads, int64_t window, StepShape const& shape,
    AttendPagesBuffers const& buffers, Device const& device, CUstream stream)
{
    PageWrite write{};
    write.num_rows = shape.num_tokens;
    write.num_requests = shape.num_requests;
    write.pages_per_request = shape.pages_per_request;
    write.k = buffers.k;
    write.v = buffers.v;
    write.pages = buffers.pages;
    write.positions = buffers.positions;
    write.token_offsets = buffers.token_offsets;
    write.page_table = buffers.page_table;
    write.limits = nullptr; // rejected rows too: the next step overwrites them
    write_pages(geometry, write, device, stream);

    Attention attention{};
    attention.num_rows = shape.num_tokens;
    attention.num_requests = shape.num_requests;
    attention.pages_per_request = shape.pages_per_request;
    attention.q = buffers.q;
    attention.pages = buffers.pages;
    attention.attended = buffers.attended;
    attention.token_offsets = buffers.token_offsets;
    attention.context_lens = buffers.context_lens;
    attention.page_table = buffers.page_table;
    attention.workspace = buffers.workspace;
    attend(geometry, heads, {window, true, false}, attention, device, stream);
}

void write_draft_context(PageGeometry const& geometry, StepShape const& shape, DraftContextBuffers const& buffers,
    Device const& device, CUstream stream)
{
    PageWrite write{};
    write.num_rows = shape.num_tokens;
    write.num_requests = shape.num_requests;
    write.pages_per_request = shape.pages_per_request;
    write.k = buffers.context_k;
    write.v = buffers.context_v;
    write.pages = buffers.pages;
    write.positions = buffers.positions;
    write.token_offsets = buffers.token_offsets;
    write.page_table = buffers.page_table;
    write.limits = buffers.next_context_lens;
    write_pages(geometry, write, device, stream);
}

void attend_draft(PageGeometry const& geometry, int64_t heads, AttentionMask const& mask, StepShape const& shape,
    DraftContextBuffers const& context, DraftBlockBuffers const& block, Device const& device, CUstream stream)
{
    write_draft_context(geometry, shape, context, device, stream);

    Attention attention{};
    attention.num_rows = shape.num_requests * shape.block_rows;
    attention.num_requests = shape.num_requests;
    attention.pages_per_request = shape.pages_per_request;
    attention.q = block.q;
    attention.block_k = block.block_k;
    attention.block_v = block.block_v;
    attention.pages = context.pages;
    attention.attended = block.attended;
    attention.token_offsets = context.token_offsets;
    attention.context_lens = context.next_context_lens;
    attention.page_table = context.page_table;
    attention.workspace = block.workspace;
    attend(geometry, heads, mask, attention, device, stream);
}

} // namespace dflash_trt
