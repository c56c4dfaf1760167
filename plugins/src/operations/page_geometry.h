// What a layer's K/V pages look like; fixed for the life of an engine.
#pragma once

#include "operations/float_type.h"

#include <cstdint>

namespace dflash_trt
{

/// Throws Problem unless it is a power of two.
void check_page_size(int64_t page_size);
/// Throws Problem for a scale that such pages cannot have; `name` is what it is called.
void check_page_scale(char const* name, float scale, PageType pages);
/// page_size == 1 << page_shift
int64_t page_shift(int64_t page_size) noexcept;

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
};

} // namespace dflash_trt
