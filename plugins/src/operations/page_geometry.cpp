#include "operations/page_geometry.h"

#include "launch_rules.h"
#include "runtime/problem.h"

#include <cmath>
#include <string>

namespace dflash_trt
{

void check_page_size(int64_t page_size)
{
    if (page_size < 1 || (page_size & (page_size - 1)) != 0)
    {
        throw Problem("page_size", "a power of two", std::to_string(page_size), "Build the engine with 16, 32 or 64.");
    }
}

void check_page_scale(char const* name, float scale, PageType pages)
{
    bool const is_scaled = pages == PageType::kFloat8;
    if (!(scale > 0.0F) || !std::isfinite(scale) || (!is_scaled && scale != 1.0F))
    {
        throw Problem(
            name, is_scaled ? "a positive number" : "1", std::to_string(scale), "Only FP8 pages are scaled.");
    }
}

int64_t page_shift(int64_t page_size) noexcept
{
    int64_t shift = 0;
    while ((int64_t{1} << shift) < page_size)
    {
        ++shift;
    }
    return shift;
}

void PageGeometry::check() const
{
    if (kv_heads < 1)
    {
        throw Problem(
            "kv_heads", "1 or more", std::to_string(kv_heads), "Pages are [pages, 2, page_size, kv_heads, D].");
    }
    check_page_scale("k_scale", k_scale, types.pages);
    check_page_scale("v_scale", v_scale, types.pages);
    check_page_size(page_size);
    if (head_dim < 1 || head_dim % launch_rules::HEAD_DIM_GRAIN != 0)
    {
        throw Problem("head_dim", "a multiple of " + std::to_string(launch_rules::HEAD_DIM_GRAIN), std::to_string(head_dim),
            "There are no kernels for it: build the engine with plugins='layers'.");
    }
}

} // namespace dflash_trt
