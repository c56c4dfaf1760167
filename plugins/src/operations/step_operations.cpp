#include "operations/step_operations.h"

#include "contract/contract.h"
#include "operations/page_write.h"
#include "operations/tensor_slots.h"

#include <optional>
#include <utility>

namespace dflash_trt
{
namespace
{

PageWrite page_write(PluginContract const& contract, char const* k, char const* v, StepShape const& shape)
{
    PageWrite write{};
    write.num_rows = shape.num_tokens;
    write.num_requests = shape.num_requests;
    write.pages_per_request = shape.pages_per_request;
    write.k = input_slot(contract, k);
    write.v = input_slot(contract, v);
    write.state_pools = input_slot(contract, "state_pools");
    write.positions = input_slot(contract, "positions");
    write.token_offsets = input_slot(contract, "token_offsets");
    write.page_table = input_slot(contract, "page_table");
    return write;
}

/// Of the accepted context rows alone.
PreparedLaunch prepare_context_write(
    PluginContract const& contract, PageGeometry const& geometry, StepShape const& shape, Device const& device)
{
    PageWrite write = page_write(contract, "context_k", "context_v", shape);
    write.limits = input_slot(contract, "next_context_lens");
    return prepare_page_write(geometry, write, device);
}

Attention attention(PluginContract const& contract, char const* context_lens, StepShape const& shape)
{
    Attention attention{};
    attention.num_requests = shape.num_requests;
    attention.pages_per_request = shape.pages_per_request;
    attention.q = input_slot(contract, "q");
    attention.state_pools = input_slot(contract, "state_pools");
    attention.attended = output_slot(contract, "attended");
    attention.token_offsets = input_slot(contract, "token_offsets");
    attention.context_lens = input_slot(contract, context_lens);
    attention.page_table = input_slot(contract, "page_table");
    return attention;
}

PreparedLaunches joined(PreparedLaunch write, PreparedLaunches attention)
{
    attention.insert(attention.begin(), std::move(write));
    return attention;
}

} // namespace

PreparedLaunches prepare_attend_pages(PageGeometry const& geometry, int64_t heads, AttentionOptions const& options,
    StepShape const& shape, Device const& device)
{
    Attention read = attention(kAttendPages, "context_lens", shape);
    read.num_rows = shape.num_tokens;
    if (options.has_sinks)
    {
        read.sinks = input_slot(kAttendPages, "sinks");
    }
    PreparedLaunches launches = prepare_attention(geometry, heads, options, read, device);
    if (options.shares_kv)
    {
        return launches;
    }
    // Rejected rows are written too: the next step overwrites them.
    PageWrite const write = page_write(kAttendPages, "k", "v", shape);
    return joined(prepare_page_write(geometry, write, device), std::move(launches));
}

PreparedLaunches prepare_write_draft_context(PageGeometry const& geometry, StepShape const& shape, Device const& device)
{
    return {prepare_context_write(kWriteDraftContext, geometry, shape, device)};
}

PreparedLaunches prepare_attend_draft(PageGeometry const& geometry, int64_t heads, AttentionOptions const& options,
    StepShape const& shape, Device const& device)
{
    Attention read = attention(kAttendDraft, "next_context_lens", shape);
    read.num_rows = shape.num_requests * shape.block_rows;
    read.block = BlockSlots{input_slot(kAttendDraft, "block_k"), input_slot(kAttendDraft, "block_v")};
    PreparedLaunches launches = prepare_attention(geometry, heads, options, read, device);
    if (options.shares_kv)
    {
        return launches;
    }
    return joined(prepare_context_write(kAttendDraft, geometry, shape, device), std::move(launches));
}

} // namespace dflash_trt
