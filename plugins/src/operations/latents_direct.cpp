#include "operations/latents_direct.h"

#include "contract/contract.h"
#include "launch_rules.h"
#include "operations/tensor_slots.h"
#include "operations/workspace_layout.h"
#include "runtime/kernel_choice.h"
#include "runtime/values.h"

namespace dflash_trt
{
namespace
{

constexpr int64_t kNumSlots = 1; // keys are not split: there are tiles enough

struct Kernels
{
    KernelChoice plan;
    KernelChoice kv;
    KernelChoice chunk;
    int64_t tile;
};

KernelChoice sized(char const* kernel, char const* of_network, LatentShape const& shape, LatentOptions const& options)
{
    return KernelChoice(kernel)
        .type(of_network, pointer_type(shape.types.network))
        .equal("NOPE", shape.nope_dim)
        .equal("VALUE", shape.value_dim)
        .equal("LATENT", options.latent_dim)
        .equal("ROPE", shape.row_size - options.latent_dim);
}

Kernels kernels_of(LatentShape const& shape, LatentOptions const& options)
{
    KernelChoice const chunk = sized("latent_chunk_kernel", "attended", shape, options).equal("POOLED", 1);
    EmbeddedKernel const& kernel = *chunk.candidates().front();
    int64_t const tile = kernel.constant("TILE");
    KernelChoice const plan = KernelChoice("attention_plan_kernel")
                                  .equal("TILE", tile)
                                  .equal("KEY_BLOCK", kernel.constant("KEY_BLOCK"))
                                  .equal("HAS_BLOCK", 0)
                                  .equal("CHUNK", launch_rules::NO_CHUNK)
                                  .at_least("REQUESTS", shape.num_requests);
    return {plan, sized("latent_kv_kernel", "kv", shape, options).equal("TILE", tile), chunk, tile};
}

int64_t tile_capacity(LatentShape const& shape, int64_t tile, int64_t least)
{
    return launch_rules::row_tiles(shape.num_rows, shape.num_requests, tile, least);
}

/// Where the launches leave what the next ones read.
struct Workspace
{
    size_t plan; // int32 [items, kPlanWords]
    size_t kv;   // F [N, heads, nope_dim + value_dim]
    size_t end;

    Workspace(LatentShape const& shape, int64_t num_tiles, size_t begin)
    {
        WorkspaceLayout layout(begin);
        plan = layout.add(4 * (num_tiles + kNumSlots) * kPlanWords);
        kv = layout.add(shape.num_rows * shape.num_heads * (shape.nope_dim + shape.value_dim)
            * element_bytes(shape.types.network));
        end = layout.end();
    }
};

void add_pointers(Values& values, TensorSlot rows, Workspace const& workspace)
{
    auto const scratch = [](size_t offset) { return TensorSlot{TensorSource::kWorkspace, 0, offset}; };
    for (char const* name : {"q_nope", "k_factor", "v_factor", "state_pools", "token_offsets", "context_lens"})
    {
        values.pointer(name, input_slot(kAttendLatents, name));
    }
    values.pointer("queries", input_slot(kAttendLatents, "q"))
        .pointer("rows", rows)
        .pointer("attended", output_slot(kAttendLatents, "direct"))
        .pointer("plan", scratch(workspace.plan))
        .pointer("kv", scratch(workspace.kv));
}

} // namespace

int64_t min_direct_rows(LatentShape const& shape, LatentOptions const& options)
{
    return launch_rules::min_direct_rows(shape.num_rows, shape.num_requests, options.max_verify_rows);
}

size_t direct_workspace_bytes(LatentShape const& shape, LatentOptions const& options)
{
    Kernels const kernels = kernels_of(shape, options);
    for (KernelChoice const* choice : {&kernels.plan, &kernels.kv})
    {
        choice->require();
    }
    if (shape.num_rows < launch_rules::MIN_DIRECT_ROWS)
    {
        return 0;
    }
    // The rule may find a prompt in a step of as many rows and fewer requests.
    return Workspace(shape, tile_capacity(shape, kernels.tile, launch_rules::MIN_DIRECT_ROWS), 0).end;
}

PreparedLaunches prepare_direct(LatentShape const& shape, LatentOptions const& options, TensorSlot rows,
    size_t workspace, Device const& device)
{
    Kernels const kernels = kernels_of(shape, options);
    for (KernelChoice const* choice : {&kernels.plan, &kernels.kv, &kernels.chunk})
    {
        static_cast<void>(choice->candidates(device)); // loaded with a node's first shape, whatever it is
    }
    int64_t const least = min_direct_rows(shape, options);
    if (least == launch_rules::ANY_ROWS)
    {
        return {};
    }
    int64_t const num_tiles = tile_capacity(shape, kernels.tile, least);
    Values values;
    add_pointers(values, rows, Workspace(shape, num_tiles, workspace));
    values.integer("num_requests", shape.num_requests)
        .integer("block_rows", 0) // not read without a block
        .integer("rows_per_tile", kernels.tile)
        .integer("tile_capacity", num_tiles)
        .integer("work_slots", kNumSlots)
        .integer("split_blocks", 0)
        .integer("max_lag", launch_rules::ANY_DISTANCE)
        .integer("window_step", 1)
        .integer("min_rows", least)
        .integer("max_rows", launch_rules::ANY_ROWS)
        .integer("min_direct_rows", least)
        .integer("heads", shape.num_heads)
        .integer("q_stride", shape.nope_dim)
        .integer("q_pitch", shape.num_rows * shape.nope_dim)
        .integer("state_index", options.state)
        .real("score_scale", options.score_scale);
    PreparedLaunches launches;
    for (KernelChoice const* choice : {&kernels.plan, &kernels.kv, &kernels.chunk})
    {
        launches.emplace_back(choice->best(values, device), values, device);
    }
    return launches;
}

} // namespace dflash_trt
