// The rows of the positions before a step's tokens, and the tokens' own into pages: the launch of previous_rows in
// dflash_trt/kernels/paged_rows_launch.py.
#pragma once

#include "operations/float_type.h"
#include "runtime/device.h"
#include "runtime/prepared_launch.h"

#include <cstdint>

namespace dflash_trt
{

/// Pages are [pages, page_size, width], of F.
struct PreviousRows
{
    FloatType type;
    int64_t num_rows;
    int64_t num_requests;
    int64_t width;
    int64_t page_size;
    int64_t pages_per_request;
    int64_t state; // index of the pages' address in state_pools
};

/// Throws Problem when the library has no kernel for steps of up to so many requests, on any GPU.
void require_previous_rows(PreviousRows const& rows);

/// Tensors are those of the contract's PreviousRows.
PreparedLaunches prepare_previous_rows(PreviousRows const& rows, Device const& device);

} // namespace dflash_trt
