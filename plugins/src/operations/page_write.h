// K and V of the step's tokens into their pages.
#pragma once

#include "operations/page_geometry.h"
#include "runtime/call_tensors.h"
#include "runtime/device.h"
#include "runtime/prepared_launch.h"

#include <optional>

namespace dflash_trt
{

struct PageWrite
{
    int64_t num_rows;
    int64_t num_requests;
    int64_t pages_per_request;
    TensorSlot k; // F [num_rows, kv_heads, D]
    TensorSlot v;
    TensorSlot state_pools;   // int64 [states]
    TensorSlot positions;     // int32 [num_rows]
    TensorSlot token_offsets; // int32 [num_requests + 1]
    TensorSlot page_table;    // int32 [num_requests, pages_per_request]
    // int32 [num_requests]: rows at positions from it on leave pages alone; none: no limit
    std::optional<TensorSlot> limits;
};

/// Throws Problem when the library has no kernels for steps of up to so many requests, on any GPU.
void require_page_write(PageGeometry const& geometry, bool has_limits, int64_t max_requests);

PreparedLaunch prepare_page_write(PageGeometry const& geometry, PageWrite const& write, Device const& device);

} // namespace dflash_trt
