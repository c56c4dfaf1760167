#include "operations/latents.h"

#include "contract/contract.h"
#include "launch_rules.h"
#include "operations/latents_direct.h"
#include "operations/page_geometry.h"
#include "operations/tensor_slots.h"
#include "operations/workspace_layout.h"
#include "runtime/kernel_choice.h"
#include "runtime/problem.h"
#include "runtime/values.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

namespace dflash_trt
{
namespace
{

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
        tile_capacity = launch_rules::row_tiles(shape.num_rows, shape.num_requests, rows_per_tile, 1);
        num_slots = launch_rules::latent_slots(
            groups, std::min<int64_t>(num_multiprocessors, launch_rules::MAX_MULTIPROCESSORS));
    }
};

/// Where the launches leave what the next ones read. What prompts need comes last.
struct Workspace
{
    size_t plan;     // int32 [items, kPlanWords]
    size_t partials; // float32 [slots, groups, tile, latent_dim]
    size_t stats;    // float32 [slots, groups, 2, tile]
    size_t kept;     // F [N, row_size], what FP8 pages hold of the rows
    size_t end;

    Workspace(LatentShape const& shape, Partition const& part, int64_t tile, int64_t latent_dim)
    {
        WorkspaceLayout layout;
        plan = layout.add(4 * (part.tile_capacity + part.num_slots) * kPlanWords);
        partials = layout.add(4 * launch_rules::num_partials(tile, part.groups, latent_dim, part.num_slots));
        stats = layout.add(4 * launch_rules::num_stats(tile, part.groups, part.num_slots));
        bool const is_kept = shape.types.pages == PageType::kFloat8;
        kept = layout.add(is_kept ? shape.num_rows * shape.row_size * element_bytes(shape.types.network) : 0);
        end = layout.end();
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
    if (shape.num_rows < 1 || shape.num_requests < 1 || shape.num_heads < 1 || options.max_verify_rows < 1)
    {
        throw Problem("q", "a row, a request, a head and a verify row at least",
            std::to_string(shape.num_rows) + " rows of " + std::to_string(shape.num_requests) + " requests, "
                + std::to_string(shape.num_heads) + " heads, " + std::to_string(options.max_verify_rows)
                + " verify rows",
            "Shapes stand in plugins/README.md.");
    }
}

TensorSlot scratch(size_t offset)
{
    return {TensorSource::kWorkspace, 0, offset};
}

void add_pointers(Values& values, Workspace const& workspace)
{
    for (char const* name : {"q", "state_pools", "positions", "token_offsets", "context_lens", "page_table"})
    {
        values.pointer(name, input_slot(kAttendLatents, name));
    }
    values.pointer("rows", input_slot(kAttendLatents, "own"))
        .pointer("attended", output_slot(kAttendLatents, "attended"))
        .pointer("direct", output_slot(kAttendLatents, "direct"))
        .pointer("pages", std::nullopt) // of it only the type
        .pointer("sinks", std::nullopt)
        .pointer("plan", scratch(workspace.plan))
        .pointer("partials", scratch(workspace.partials))
        .pointer("partial_stats", scratch(workspace.stats))
        .pointer("kept", scratch(workspace.kept));
}

Values values_of(
    LatentShape const& shape, LatentOptions const& options, Partition const& part, Workspace const& workspace)
{
    Values values;
    add_pointers(values, workspace);
    values.integer("num_rows", shape.num_rows)
        .integer("num_requests", shape.num_requests)
        .integer("pages_per_request", shape.pages_per_request)
        .integer("block_rows", 0) // not read without a block
        .integer("rows_per_tile", part.rows_per_tile)
        .integer("tile_capacity", part.tile_capacity)
        .integer("groups", part.groups)
        .integer("kv_heads", part.groups)
        .integer("group_heads", part.group_heads)
        .integer("heads_per_kv", part.group_heads)
        .integer("heads_reciprocal", launch_rules::heads_reciprocal(part.group_heads))
        .integer("page_shift", page_shift(options.page_size))
        .integer("state_index", options.state)
        .integer("max_lag", launch_rules::ANY_DISTANCE)
        .integer("window_step", 1)
        .integer("min_rows", 1)
        .integer("max_rows", launch_rules::ANY_ROWS)
        .integer("min_direct_rows", min_direct_rows(shape, options))
        .integer("direct_columns", shape.num_heads * shape.value_dim)
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
    return Workspace(shape, part, kernels.tile, options.latent_dim).end + direct_workspace_bytes(shape, options);
}

PreparedLaunches prepare_latents(LatentShape const& shape, LatentOptions const& options, Device const& device)
{
    check(shape, options);
    Kernels const kernels = kernels_of(shape, options);
    Partition const part(shape, kernels.tile, device.num_multiprocessors);
    Workspace const workspace(shape, part, kernels.tile, options.latent_dim);
    Values const values = values_of(shape, options, part, workspace);
    PreparedLaunches launches;
    for (KernelChoice const* choice : {&kernels.write, &kernels.plan, &kernels.attention, &kernels.reduction})
    {
        launches.emplace_back(choice->best(values, device), values, device);
    }
    bool const is_kept = shape.types.pages == PageType::kFloat8;
    TensorSlot const rows = is_kept ? scratch(workspace.kept) : input_slot(kAttendLatents, "own");
    for (PreparedLaunch& launch : prepare_direct(shape, options, rows, workspace.end, device))
    {
        launches.push_back(std::move(launch));
    }
    return launches;
}

} // namespace dflash_trt
