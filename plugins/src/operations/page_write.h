// K and V of the step's tokens into their pages.
#pragma once

#include "operations/page_geometry.h"
#include "runtime/device.h"

namespace dflash_trt
{

struct PageWrite
{
    int64_t num_rows;
    int64_t num_requests;
    int64_t pages_per_request;
    void const* k; // F [num_rows, kv_heads, D]
    void const* v;
    PagePool pages;
    void const* positions;     // int32 [num_rows]
    void const* token_offsets; // int32 [num_requests + 1]
    void const* page_table;    // int32 [num_requests, pages_per_request]
    void const* limits;        // int32 [num_requests]: rows at positions from it on leave pages alone; null: no limit
};

/// Throws Problem when the library has no kernels for steps of up to so many requests, on any GPU.
void require_page_write(PageGeometry const& geometry, bool has_limits, int64_t max_requests);

/// Makes the kernels ready that such writes of up to max_requests requests need.
void prepare_page_write(PageGeometry const& geometry, bool has_limits, int64_t max_requests, Device const& device);

void write_pages(PageGeometry const& geometry, PageWrite const& write, Device const& device, CUstream stream);

} // namespace dflash_trt
