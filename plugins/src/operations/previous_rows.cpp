#include "operations/previous_rows.h"

#include "contract/contract.h"
#include "operations/page_geometry.h"
#include "operations/tensor_slots.h"
#include "runtime/kernel_choice.h"
#include "runtime/values.h"

#include <optional>

namespace dflash_trt
{
namespace
{

KernelChoice choice(PreviousRows const& rows)
{
    return KernelChoice("previous_rows_kernel")
        .type("x", pointer_type(rows.type))
        .equal("POOLED", 1)
        .at_least("REQUESTS", rows.num_requests);
}

} // namespace

void require_previous_rows(PreviousRows const& rows)
{
    check_page_size(rows.page_size);
    choice(rows).require();
}

PreparedLaunches prepare_previous_rows(PreviousRows const& rows, Device const& device)
{
    Values values;
    for (char const* name : {"x", "state_pools", "positions", "token_offsets", "context_lens", "page_table"})
    {
        values.pointer(name, input_slot(kPreviousRows, name));
    }
    values.pointer("before", output_slot(kPreviousRows, "before")).pointer("pages", std::nullopt); // of it only the type
    values.integer("num_rows", rows.num_rows)
        .integer("num_requests", rows.num_requests)
        .integer("width", rows.width)
        .integer("pages_per_request", rows.pages_per_request)
        .integer("page_shift", page_shift(rows.page_size))
        .integer("state_index", rows.state);
    PreparedLaunches launches;
    launches.emplace_back(choice(rows).best(values, device), values, device);
    return launches;
}

} // namespace dflash_trt
