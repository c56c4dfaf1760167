#include "operations/attention.h"

#include "launch_rules.h"
#include "runtime/kernel_choice.h"
#include "runtime/problem.h"
#include "runtime/values.h"

#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <vector>

namespace dflash_trt
{
namespace
{

using launch_rules::ANY_ROWS;
using launch_rules::VERIFY_ROWS;

constexpr std::array<char const*, 2> kKernels{"attention_kernel", "attention_reduction_kernel"};

/// One pass over the requests that have min_rows to max_rows query rows.
struct Pass
{
    int64_t query_rows;
    int64_t min_rows;
    int64_t max_rows;
};

KernelChoice choice(char const* kernel, PageGeometry const& geometry, AttentionKind kind, int64_t num_requests)
{
    KernelChoice chosen(kernel);
    chosen.type("attended", pointer_type(geometry.types.network))
        .equal("HEAD_DIM", geometry.head_dim)
        .equal("HAS_BLOCK", kind.has_block ? 1 : 0)
        .equal("PLANNED", 0)
        .equal("CHUNK", kind.chunk)
        .at_least("REQUESTS", num_requests);
    if (kernel == kKernels.front())
    {
        chosen.type("pages", page_pointer_type(geometry.types))
            .equal("HAS_SOFTCAP", kind.has_softcap ? 1 : 0)
            .equal("FIRST_KEY", kind.first_key)
            .equal("POOLED", 1);
    }
    return chosen;
}

int64_t num_partials(PageGeometry const& geometry, int64_t tile, int64_t num_slots)
{
    return launch_rules::num_partials(tile, geometry.kv_heads, geometry.head_dim, num_slots);
}

/// The smallest tile that holds the query rows of a request, or the largest there is.
int64_t choose_tile(KernelVariants const& candidates, int64_t query_rows, int64_t heads_per_kv)
{
    std::set<int64_t> tiles;
    for (EmbeddedKernel const* kernel : candidates)
    {
        tiles.insert(kernel->constant("TILE"));
    }
    int64_t const largest = *tiles.rbegin();
    if (heads_per_kv > largest)
    {
        throw Problem("query heads of a K/V head", "at most " + std::to_string(largest), std::to_string(heads_per_kv),
            "There are no kernels for it: build the engine with plugins='layers'.");
    }
    auto const fitting = tiles.lower_bound(query_rows * heads_per_kv);
    return fitting != tiles.end() ? *fitting : largest;
}

/// Programs that share a tile, each with a part of V.
int64_t parts_of(KernelVariants const& candidates, int64_t tile)
{
    auto const found = std::find_if(candidates.begin(), candidates.end(),
        [&](EmbeddedKernel const* kernel) { return kernel->constant("TILE") == tile; });
    return (*found)->constant("PARTS");
}

/// One wave of the GPU: the parts of a tile run beside each other.
int64_t slots_of(PageGeometry const& geometry, int64_t parts, int64_t num_multiprocessors)
{
    return launch_rules::work_slots(geometry.kv_heads * parts, num_multiprocessors);
}

Values common_values(
    PageGeometry const& geometry, int64_t heads, AttentionOptions const& options, Attention const& attention)
{
    AttentionMask const& mask = options.mask;
    BlockSlots const block = attention.block.value_or(BlockSlots{attention.q, attention.q});
    Values values;
    values.pointer("q", attention.q)
        .pointer("pages", std::nullopt) // of it only the type
        .pointer("state_pools", attention.state_pools)
        .pointer("block_k", block.k)
        .pointer("block_v", block.v)
        .pointer("attended", attention.attended)
        .pointer("plan", std::nullopt) // every program plans for itself
        .pointer("token_offsets", attention.token_offsets)
        .pointer("context_lens", attention.context_lens)
        .pointer("page_table", attention.page_table)
        .pointer("sinks", attention.sinks);
    values.integer("num_rows", attention.num_rows)
        .integer("num_requests", attention.num_requests)
        .integer("pages_per_request", attention.pages_per_request)
        .integer("block_rows", attention.num_rows / attention.num_requests)
        .integer("block_k_stride", geometry.row_size())
        .integer("block_v_stride", geometry.row_size())
        .integer("kv_heads", geometry.kv_heads)
        .integer("heads_per_kv", heads / geometry.kv_heads)
        .integer("heads_reciprocal", launch_rules::heads_reciprocal(heads / geometry.kv_heads))
        .integer("page_shift", page_shift(geometry.page_size))
        .integer("state_index", geometry.state)
        .integer("max_lag", mask.max_lag())
        .integer("max_lead", mask.max_lead())
        .integer("window_step", mask.is_window_anchored ? 0 : 1)
        .integer("has_sinks", attention.sinks.has_value() ? 1 : 0);
    values.real("score_scale", options.score_scale)
        .real("k_scale", geometry.k_scale)
        .real("v_scale", geometry.v_scale)
        .real("softcap", options.softcap); // not read without one
    return values;
}

void check_factors(AttentionOptions const& options)
{
    if (!(options.score_scale > 0.0F)) // NaN is refused, too
    {
        throw Problem("score_scale", "more than 0", std::to_string(options.score_scale), "D^-0.5 is usual.");
    }
    if (!(options.softcap >= 0.0F))
    {
        throw Problem("softcap", "0 or more", std::to_string(options.softcap), "0 is none.");
    }
}

void check(
    PageGeometry const& geometry, int64_t heads, AttentionOptions const& options, Attention const& attention)
{
    geometry.check();
    check_factors(options);
    if (heads < 1 || heads % geometry.kv_heads != 0)
    {
        throw Problem("q", "a multiple of " + std::to_string(geometry.kv_heads) + " heads", std::to_string(heads),
            "Query heads share K/V heads evenly.");
    }
    if (attention.num_requests < 1 || attention.num_rows < 1
        || (attention.block.has_value() && attention.num_rows % attention.num_requests != 0))
    {
        throw Problem("q",
            attention.block.has_value() ? "the same number of rows for each request" : "a row and a request at least",
            std::to_string(attention.num_rows) + " rows of " + std::to_string(attention.num_requests) + " requests",
            "Every request has S block slots.");
    }
}

/// Of every tile: another shape of step takes another one.
void load(PageGeometry const& geometry, AttentionKind kind, Device const& device)
{
    for (char const* kernel : kKernels)
    {
        static_cast<void>(choice(kernel, geometry, kind, 1).candidates(device));
    }
}

TensorSlot workspace_at(int64_t num_floats)
{
    return {TensorSource::kWorkspace, 0, static_cast<size_t>(num_floats) * sizeof(float)};
}

/// `values` are those of all passes; the pass's own are added.
void add_launches(PreparedLaunches& launches, Pass const& pass, PageGeometry const& geometry, AttentionKind kind,
    int64_t num_requests, Values& values, Device const& device)
{
    auto const chosen = [&](char const* kernel) { return choice(kernel, geometry, kind, num_requests); };
    KernelVariants const candidates = chosen(kKernels.front()).candidates(device);
    int64_t const tile = choose_tile(candidates, pass.query_rows, values.integer_of("heads_per_kv"));
    int64_t const num_multiprocessors =
        std::min<int64_t>(device.num_multiprocessors, launch_rules::MAX_MULTIPROCESSORS);
    int64_t const num_slots = slots_of(geometry, parts_of(candidates, tile), num_multiprocessors);
    values.pointer("partials", workspace_at(0))
        .pointer("partial_stats", workspace_at(num_partials(geometry, tile, num_slots)))
        .integer("min_rows", pass.min_rows)
        .integer("max_rows", pass.max_rows)
        .integer("work_slots", num_slots);
    for (char const* kernel : kKernels)
    {
        launches.emplace_back(chosen(kernel).equal("TILE", tile).best(values, device), values, device);
    }
}

} // namespace

int64_t AttentionMask::max_lag() const noexcept
{
    return launch_rules::max_lag(window, chunk, is_window_anchored);
}

int64_t AttentionMask::max_lead() const noexcept
{
    return launch_rules::max_lead(max_lag(), is_causal, is_window_anchored);
}

size_t attention_workspace_bytes(PageGeometry const& geometry, AttentionKind kind)
{
    geometry.check();
    int64_t num_elements = 0;
    for (EmbeddedKernel const* kernel : choice(kKernels.front(), geometry, kind, 1).candidates())
    {
        int64_t const tile = kernel->constant("TILE");
        int64_t const num_slots = slots_of(geometry, kernel->constant("PARTS"), launch_rules::MAX_MULTIPROCESSORS);
        num_elements = std::max(num_elements,
            num_partials(geometry, tile, num_slots) + launch_rules::num_stats(tile, geometry.kv_heads, num_slots));
    }
    return static_cast<size_t>(num_elements) * sizeof(float);
}

void require_attention(PageGeometry const& geometry, AttentionKind kind, int64_t max_requests)
{
    geometry.check();
    for (char const* kernel : kKernels)
    {
        choice(kernel, geometry, kind, max_requests).require();
    }
}

PreparedLaunches prepare_attention(PageGeometry const& geometry, int64_t heads, AttentionOptions const& options,
    Attention const& attention, Device const& device)
{
    AttentionKind const kind = options.kind(attention.block.has_value());
    check(geometry, heads, options, attention);
    load(geometry, kind, device);
    Values values = common_values(geometry, heads, options, attention);
    int64_t const mean_rows = ceil_div(attention.num_rows, attention.num_requests);
    PreparedLaunches launches;
    auto const add = [&](Pass const& pass)
    { add_launches(launches, pass, geometry, kind, attention.num_requests, values, device); };
    if (kind.has_block || mean_rows <= VERIFY_ROWS)
    {
        add({mean_rows, 1, ANY_ROWS});
        return launches;
    }
    // Verify blocks with small tiles, then prefill chunks with large ones; each skips the other's requests.
    add({VERIFY_ROWS, 1, VERIFY_ROWS});
    add({attention.num_rows, VERIFY_ROWS + 1, ANY_ROWS});
    return launches;
}

} // namespace dflash_trt
