#include "operations/latents.h"

#include "contract/contract.h"
#include "launch_rules.h"
#include "operations/page_geometry.h"
#include "operations/tensor_slots.h"
#include "runtime/kernel_choice.h"
#include "runtime/problem.h"
#include "runtime/values.h"

#include <algorithm>
#include <optional>
#include <string>

namespace dflash_trt
{
namespace
{

constexpr size_t kAlignment = 256;
constexpr int64_t kPlanWords = 8; // attention_partition.PLAN_WORDS, int32 each

/// The kernels of a layer, whatever the GPU: of each size of pages there is one tile.
struct Kernels
{
    KernelChoice write;
    KernelChoice plan;
    KernelChoice attention;
    KernelChoice reduction;
    int64_t tile;
};

/// How a step's work is cut, as attention_plan.Partition says it.
struct Partition
{
    int64_t group_heads; // of a tile: all heads, or as many of one row as divide them
    int64_t groups;
    int64_t rows_per_tile;
    int64_t tile_capacity;
    int64_t num_slots;

    Partition(LatentShape const& shape, int64_t tile, int64_t num_multiprocessors)
        : group_heads(std::min(shape.num_heads, tile))
    {
        while (shape.num_heads % group_heads != 0)
        {
            --group_heads;
        }
        groups = shape.num_heads / group_heads;
        rows_per_tile = groups == 1 ? tile / group_heads : 1;
        tile_capacity = shape.num_rows / rows_per_tile + shape.num_requests;
        num_slots = launch_rules::latent_slots(
            groups, std::min<int64_t>(num_multiprocessors, launch_rules::MAX_MULTIPROCESSORS));
    }
};

/// Where the launches leave what the next ones read.
struct Workspace
{
    size_t plan;     // int32 [items, kPlanWords]
    size_t partials; // float32 [slots, groups, tile, latent_dim]
    size_t stats;    // float32 [slots, groups, 2, tile]
    size_t num_bytes;

    Workspace(Partition const& part, int64_t tile, int64_t latent_dim)
    {
        size_t end = 0;
        auto const add = [&](int64_t num_words)
        {
            size_t const start = end;
            end += (4 * static_cast<size_t>(num_words) + kAlignment - 1) / kAlignment * kAlignment;
            return start;
        };
        plan = add((part.tile_capacity + part.num_slots) * kPlanWords);
        partials = add(launch_rules::num_partials(tile, part.groups, latent_dim, part.num_slots));
        stats = add(launch_rules::num_stats(tile, part.groups, part.num_slots));
        num_bytes = end;
    }
};

KernelChoice attention_choice(LatentShape const& shape, LatentOptions const& options)
{
    int64_t const key_block = launch_rules::latent_key_block(
        options.page_size, shape.types.network == FloatType::kFloat32 ? 1 : 0);
    return KernelChoice("latent_attention_kernel")
        .type("q", pointer_type(shape.types.network))
        .type("pages", page_pointer_type(shape.types))
        .equal("LATENT", options.latent_dim)
        .equal("ROPE", shape.row_size - options.latent_dim)
        .equal("KEY_BLOCK", key_block)
        .equal("IS_IN_ONE_PAGE", options.page_size % key_block == 0 ? 1 : 0)
        .equal("POOLED", 1);
}

Kernels kernels_of(LatentShape const& shape, LatentOptions const& options)
{
    KernelChoice const attention = attention_choice(shape, options);
    EmbeddedKernel const& kernel = *attention.candidates().front();
    int64_t const tile = kernel.constant("TILE");
    auto const planned = [&](char const* name)
    {
        return KernelChoice(name)
            .equal("TILE", tile)
            .equal("KEY_BLOCK", kernel.constant("KEY_BLOCK"))
            .equal("HAS_BLOCK", 0)
            .equal("CHUNK", launch_rules::NO_CHUNK)
            .at_least("REQUESTS", shape.num_requests);
    };
    return {KernelChoice("write_latents_kernel")
                .type("rows", pointer_type(shape.types.network))
                .type("pages", page_pointer_type(shape.types))
                .equal("ROW", shape.row_size)
                .at_least("REQUESTS", shape.num_requests),
        planned("attention_plan_kernel"), attention,
        planned("attention_reduction_kernel")
            .type("attended", pointer_type(shape.types.network))
            .equal("HEAD_DIM", options.latent_dim)
            .equal("PLANNED", 1),
        tile};
}

void check(LatentShape const& shape, LatentOptions const& options)
{
    check_page_size(options.page_size);
    check_page_scale("k_scale", options.k_scale, shape.types.pages);
    if (shape.row_size <= options.latent_dim)
    {
        throw Problem("own", "more features than the latent's " + std::to_string(options.latent_dim),
            std::to_string(shape.row_size), "The rotated key stands behind the latent.");
    }
    if (!(options.score_scale > 0.0F)) // NaN is refused, too
    {
        throw Problem("score_scale", "more than 0", std::to_string(options.score_scale), "It multiplies the scores.");
    }
    if (shape.num_rows < 1 || shape.num_requests < 1 || shape.num_heads < 1)
    {
        throw Problem("q", "a row, a request and a head at least",
            std::to_string(shape.num_rows) + " rows of " + std::to_string(shape.num_requests) + " requests, "
                + std::to_string(shape.num_heads) + " heads",
            "Shapes stand in plugins/README.md.");
    }
}

Values values_of(LatentShape const& shape, LatentOptions const& options, Partition const& part, int64_t tile)
{
    Workspace const workspace(part, tile, options.latent_dim);
    auto const scratch = [](size_t offset) { return TensorSlot{TensorSource::kWorkspace, 0, offset}; };
    Values values;
    for (char const* name : {"q", "state_pools", "positions", "token_offsets", "context_lens", "page_table"})
    {
        values.pointer(name, input_slot(kAttendLatents, name));
    }
    values.pointer("rows", input_slot(kAttendLatents, "own"))
        .pointer("attended", output_slot(kAttendLatents, "attended"))
        .pointer("pages", std::nullopt) // of it only the type
        .pointer("sinks", std::nullopt)
        .pointer("plan", scratch(workspace.plan))
        .pointer("partials", scratch(workspace.partials))
        .pointer("partial_stats", scratch(workspace.stats));
    int64_t const reciprocal = launch_rules::heads_reciprocal(part.group_heads);
    values.integer("num_rows", shape.num_rows)
        .integer("num_requests", shape.num_requests)
        .integer("pages_per_request", shape.pages_per_request)
        .integer("block_rows", shape.num_rows / shape.num_requests) // not read without a block
        .integer("rows_per_tile", part.rows_per_tile)
        .integer("tile_capacity", part.tile_capacity)
        .integer("groups", part.groups)
        .integer("kv_heads", part.groups)
        .integer("group_heads", part.group_heads)
        .integer("heads_per_kv", part.group_heads)
        .integer("heads_reciprocal", reciprocal)
        .integer("page_shift", page_shift(options.page_size))
        .integer("state_index", options.state)
        .integer("max_lag", launch_rules::ANY_DISTANCE)
        .integer("window_step", 1)
        .integer("min_rows", 1)
        .integer("max_rows", launch_rules::ANY_ROWS)
        .integer("min_direct_rows", launch_rules::ANY_ROWS) // all are absorbed
        .integer("work_slots", part.num_slots)
        .integer("split_blocks", 0)
        .integer("has_sinks", 0);
    values.real("score_scale", options.score_scale).real("k_scale", options.k_scale);
    return values;
}

} // namespace

size_t latents_workspace_bytes(LatentShape const& shape, LatentOptions const& options)
{
    check(shape, options);
    Kernels const kernels = kernels_of(shape, options);
    for (KernelChoice const* choice : {&kernels.write, &kernels.plan, &kernels.reduction})
    {
        choice->require();
    }
    Partition const part(shape, kernels.tile, launch_rules::MAX_MULTIPROCESSORS);
    return Workspace(part, kernels.tile, options.latent_dim).num_bytes;
}

PreparedLaunches prepare_latents(LatentShape const& shape, LatentOptions const& options, Device const& device)
{
    check(shape, options);
    Kernels const kernels = kernels_of(shape, options);
    Partition const part(shape, kernels.tile, device.num_multiprocessors);
    Values const values = values_of(shape, options, part, kernels.tile);
    PreparedLaunches launches;
    for (KernelChoice const* choice : {&kernels.write, &kernels.plan, &kernels.attention, &kernels.reduction})
    {
        launches.emplace_back(choice->best(values, device), values, device);
    }
    return launches;
}

} // namespace dflash_trt
