#include "operations/page_write.h"

#include "runtime/kernel_choice.h"
#include "runtime/values.h"

namespace dflash_trt
{
namespace
{

KernelChoice choice(PageGeometry const& geometry, bool has_limits, int64_t num_requests)
{
    return KernelChoice("rotate_and_store_kernel")
        .type("k", pointer_type(geometry.types.network))
        .type("pages", page_pointer_type(geometry.types))
        .equal("HEAD_DIM", geometry.head_dim)
        .equal("HAS_NORM", 0)
        .equal("HAS_ROPE", 0)
        .equal("STORES_PAGES", 1)
        .equal("HAS_LIMITS", has_limits ? 1 : 0)
        .equal("POOLED", 1)
        .at_least("REQUESTS", num_requests);
}

} // namespace

void require_page_write(PageGeometry const& geometry, bool has_limits, int64_t max_requests)
{
    geometry.check();
    choice(geometry, has_limits, max_requests).require();
}

PreparedLaunch prepare_page_write(PageGeometry const& geometry, PageWrite const& write, Device const& device)
{
    geometry.check();
    Values values;
    values.pointer("k", write.k).pointer("v", write.v).pointer("state_pools", write.state_pools);
    values.pointer("positions", write.positions)
        .pointer("token_offsets", write.token_offsets)
        .pointer("page_table", write.page_table)
        .pointer("limits", write.limits);
    values.integer("num_rows", write.num_rows)
        .integer("num_requests", write.num_requests)
        .integer("pages_per_request", write.pages_per_request)
        .integer("kv_heads", geometry.kv_heads)
        .integer("k_stride", geometry.row_size())
        .integer("v_stride", geometry.row_size())
        .integer("page_shift", page_shift(geometry.page_size))
        .integer("state_index", geometry.state);
    values.real("k_scale", geometry.k_scale).real("v_scale", geometry.v_scale);
    // Not part of a plain write: no query heads, no norm, no rotation; of `pages` only the type.
    for (char const* unused : {"pages", "q", "q_out", "k_out", "q_norm", "k_norm", "inv_freq"})
    {
        values.pointer(unused, std::nullopt);
    }
    values.integer("q_heads", 0).integer("q_stride", 0).real("amplitude", 1.0F).real("eps", 0.0F);
    EmbeddedKernel const& kernel = choice(geometry, write.limits.has_value(), write.num_requests).best(values, device);
    return {kernel, values, device};
}

} // namespace dflash_trt
