// The operations of plugins/README.md that read and write pages, each as the launches of one shape of step: what a
// plugin and the C API have in common. Tensors are found in the order of the operation's contract.
#pragma once

#include "operations/attention.h"
#include "operations/page_geometry.h"
#include "runtime/device.h"
#include "runtime/prepared_launch.h"

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

PreparedLaunches prepare_attend_pages(PageGeometry const& geometry, int64_t heads, AttentionOptions const& options,
    StepShape const& shape, Device const& device);

PreparedLaunches prepare_write_draft_context(
    PageGeometry const& geometry, StepShape const& shape, Device const& device);

PreparedLaunches prepare_attend_draft(PageGeometry const& geometry, int64_t heads, AttentionOptions const& options,
    StepShape const& shape, Device const& device);

} // namespace dflash_trt
