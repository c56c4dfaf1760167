// What a layer's K/V pages look like; fixed for the life of an engine.
#pragma once

#include "operations/float_type.h"

#include <cstdint>

namespace dflash_trt
{

/// Pages are F [pages, 2, page_size, kv_heads, head_dim].
struct PageGeometry
{
    FloatType type;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t page_size;

    /// Throws Problem for a size that no kernel serves.
    void check() const;
    [[nodiscard]] int64_t row_size() const noexcept { return kv_heads * head_dim; }
    [[nodiscard]] int64_t page_shift() const noexcept; // page_size == 1 << page_shift
};

} // namespace dflash_trt
