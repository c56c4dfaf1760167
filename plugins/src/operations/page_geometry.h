// What a layer's K/V pages look like; fixed for the life of an engine.
#pragma once

#include "operations/float_type.h"

#include <cstdint>

namespace dflash_trt
{

/// page_size == 1 << the result. Throws Problem for a size that is no power of two.
int64_t page_shift_of(int64_t page_size);

/// Pages are [pages, 2, page_size, kv_heads, head_dim], of F or of FP8 codes: K / k_scale and V / v_scale.
struct PageGeometry
{
    ElementTypes types;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t page_size;
    float k_scale; // 1 for pages of F
    float v_scale;
    int64_t state; // index of their address in state_pools, which the kernels read on the device

    /// Throws Problem for a size that no kernel serves, and for scales that pages of F cannot have.
    void check() const;
    [[nodiscard]] int64_t row_size() const noexcept { return kv_heads * head_dim; }
    [[nodiscard]] int64_t page_shift() const { return page_shift_of(page_size); }
};

} // namespace dflash_trt
