#include "operations/experts.h"

#include "contract/contract.h"
#include "launch_rules.h"
#include "operations/tensor_slots.h"
#include "operations/workspace_layout.h"
#include "runtime/kernel_choice.h"
#include "runtime/problem.h"
#include "runtime/values.h"

#include <optional>
#include <string>
#include <vector>

namespace dflash_trt
{
namespace
{

// Forms of codes, as `packed_product.py` counts them; from kMxfp4 on a byte has two codes.
constexpr int64_t kPlain = 0, kMxfp4 = 3, kNvfp4 = 4, kInt4 = 5;

struct Scratch
{
    char const* name;
    size_t offset;
    size_t num_bytes;
};

int64_t num_entries(ExpertsShape const& shape, ExpertsOptions const& options)
{
    return shape.num_rows * options.num_chosen;
}

int64_t tokens_of_tile(ExpertsShape const& shape, ExpertsOptions const& options)
{
    return launch_rules::tile_tokens(num_entries(shape, options), shape.num_experts);
}

int64_t num_tiles(ExpertsShape const& shape, ExpertsOptions const& options, int64_t tokens)
{
    return launch_rules::max_tiles(num_entries(shape, options), shape.num_here, tokens);
}

KernelChoice routing_choice(ExpertsShape const& shape, ExpertsOptions const& options)
{
    return KernelChoice("routing_kernel")
        .type("logits", pointer_type(shape.type))
        .equal("num_experts", shape.num_experts)
        .equal("num_chosen", options.num_chosen)
        .equal("KIND", options.routing)
        .equal("NORMALIZES", options.normalizes ? 1 : 0)
        .equal("HAS_BIAS", options.has_choice_bias ? 1 : 0)
        .equal("num_groups", options.num_groups)
        .equal("num_chosen_groups", options.num_chosen_groups)
        .equal("TOKENS", tokens_of_tile(shape, options));
}

/// What the products of both matrices are chosen by.
KernelChoice& product(KernelChoice& choice, ExpertMatrix const& matrix, int64_t tokens)
{
    return choice.equal("FORM", matrix.form)
        .equal("HAS_ROW_SCALE", matrix.has_row_scale ? 1 : 0)
        .equal("HAS_BIAS", matrix.has_bias ? 1 : 0)
        .equal("TOKENS", tokens);
}

/// As which the activations between the products are stored, as `experts.py` counts it.
int64_t hidden_form(ExpertMatrix const& down)
{
    return down.num_input_scales == 0 ? 0 : down.form == kNvfp4 ? 2 : 1;
}

KernelChoice gate_up_choice(ExpertsShape const& shape, ExpertsOptions const& options)
{
    KernelChoice choice("expert_gate_up_kernel");
    choice.type("x", pointer_type(shape.type))
        .equal("IN", shape.hidden_size)
        .equal("FFN", shape.ffn_size)
        .equal("num_chosen", options.num_chosen)
        .equal("INPUT", options.gate_up.num_input_scales == 0 ? 0 : 1) // quantized by the kernel
        .equal("SPLITS_INPUT", options.gate_up.num_input_scales == 2 ? 1 : 0)
        .equal("HIDDEN", hidden_form(options.down))
        .equal("ACTIVATION", options.activation)
        .equal("SCALES_INPUTS", options.scales_inputs ? 1 : 0);
    return product(choice, options.gate_up, tokens_of_tile(shape, options));
}

KernelChoice down_choice(ExpertsShape const& shape, ExpertsOptions const& options)
{
    KernelChoice choice("expert_down_kernel");
    choice.type("results", pointer_type(shape.type))
        .equal("FFN", shape.ffn_size)
        .equal("HIDDEN_SIZE", shape.hidden_size)
        .equal("SCALES_INPUTS", options.scales_inputs ? 1 : 0)
        .equal("INPUT", options.down.num_input_scales == 0 ? 0 : 2); // codes, of the product before
    return product(choice, options.down, tokens_of_tile(shape, options));
}

KernelChoice sum_choice(ExpertsShape const& shape, ExpertsOptions const& options)
{
    return KernelChoice("expert_sum_kernel")
        .type("results", pointer_type(shape.type))
        .equal("num_chosen", options.num_chosen)
        .equal("HIDDEN_SIZE", shape.hidden_size)
        .equal("FEW", shape.num_here == shape.num_experts ? 0 : 1);
}

/// Every size grows with the rows: tiles are counted as if they were the smallest.
std::vector<Scratch> scratch_tensors(ExpertsShape const& shape, ExpertsOptions const& options)
{
    EmbeddedKernel const& routing = *routing_choice(shape, options).candidates().front();
    int64_t const entries = num_entries(shape, options);
    int64_t const programs = ceil_div(shape.num_rows, routing.constant("ROWS"));
    int64_t const tiles = num_tiles(shape, options, launch_rules::MIN_TILE_TOKENS);
    int64_t const element = element_bytes(shape.type);
    std::vector<Scratch> tensors;
    WorkspaceLayout layout;
    auto const add = [&](char const* name, int64_t num_bytes)
    { tensors.push_back({name, layout.add(num_bytes), static_cast<size_t>(num_bytes)}); };
    add("ticket", 4);
    for (char const* name : {"expert_ids", "weights", "order", "ranks"})
    {
        add(name, 4 * entries);
    }
    add("tiles", 4 * 3 * tiles);
    add("counts", 4 * (programs + 1) * routing.constant("EXPERTS"));
    add("hidden", entries * shape.ffn_size * element);
    add("hidden_block_scale", entries * shape.ffn_size / 16 + 1);
    add("results", entries * shape.hidden_size * element);
    return tensors;
}

void check(ExpertsShape const& shape, ExpertsOptions const& options)
{
    if (shape.num_rows < 1 || options.num_chosen < 1 || options.num_chosen > shape.num_experts)
    {
        throw Problem("experts", "a row at least, and at most as many chosen as there are",
            std::to_string(shape.num_rows) + " rows, " + std::to_string(options.num_chosen) + " chosen of "
                + std::to_string(shape.num_experts),
            "Logits are [N, experts].");
    }
    bool const is_even = options.num_groups > 0 && shape.num_experts % options.num_groups == 0;
    if (!is_even || options.num_chosen_groups > options.num_groups
        || options.num_chosen_groups * (shape.num_experts / options.num_groups) < options.num_chosen)
    {
        throw Problem("groups of experts",
            "some of equal groups, with " + std::to_string(options.num_chosen) + " experts",
            std::to_string(options.num_chosen_groups) + " of " + std::to_string(options.num_groups),
            "num_groups divides num_experts, and the chosen ones hold num_chosen.");
    }
    if (options.first_expert + shape.num_here > shape.num_experts)
    {
        throw Problem("experts of this rank", "some of " + std::to_string(shape.num_experts),
            std::to_string(shape.num_here) + " from " + std::to_string(options.first_expert) + " on",
            "first_expert and the weights are of different ranks.");
    }
}

/// The tensors of one matrix, by the names that its kernel has for them.
void add_matrix(Values& values, std::string const& prefix, ExpertMatrix const& matrix)
{
    auto const slot = [&](char const* name) { return input_slot(kExperts, (prefix + name).c_str()); };
    values.pointer("codes", slot("codes"))
        .pointer("block_scale", slot("block_scale"))
        .pointer("block_rows", slot("block_rows"))
        .pointer("row_scale", slot("row_scale"))
        .pointer("input_scale", slot("input_scale"))
        .pointer("bias", slot("bias"))
        .integer("num_block_rows", matrix.num_block_rows);
}

Values common_values(ExpertsShape const& shape, ExpertsOptions const& options)
{
    Values values;
    for (Scratch const& tensor : scratch_tensors(shape, options))
    {
        values.pointer(tensor.name, TensorSlot{TensorSource::kWorkspace, 0, tensor.offset});
    }
    values.pointer("x", input_slot(kExperts, "x"))
        .pointer("logits", input_slot(kExperts, "logits"))
        .pointer("choice_bias", input_slot(kExperts, "choice_bias"))
        .pointer("hidden_scale", input_slot(kExperts, "down_input_scale"))
        .pointer("out", output_slot(kExperts, "out"))
        .integer("num_rows", shape.num_rows)
        .integer("num_tiles", num_tiles(shape, options, tokens_of_tile(shape, options)))
        .integer("first_expert", options.first_expert)
        .integer("num_here", shape.num_here)
        .integer("num_experts", shape.num_here) // of the sum
        .real("factor", options.routing_scale)
        .real("limit", options.limit)
        .real("alpha", options.alpha);
    return values;
}

} // namespace

int64_t row_bytes(int64_t form, int64_t in, FloatType type)
{
    return form == kPlain ? in * element_bytes(type) : form >= kMxfp4 ? in / 2 : in;
}

int64_t block_row_bytes(int64_t form, int64_t in)
{
    switch (form)
    {
    case kFp8Blocks: return 4 * ceil_div(in, 128);
    case kMxfp4: return in / 32;
    case kNvfp4: return in / 16;
    case kInt4: return 2 * (in / 32);
    default: return 0;
    }
}

size_t experts_workspace_bytes(ExpertsShape const& shape, ExpertsOptions const& options)
{
    check(shape, options);
    for (KernelChoice const& choice : {KernelChoice("reset_ticket_kernel"), gate_up_choice(shape, options),
             down_choice(shape, options), sum_choice(shape, options)})
    {
        choice.require();
    }
    Scratch const last = scratch_tensors(shape, options).back();
    return last.offset + last.num_bytes;
}

PreparedLaunches prepare_experts(ExpertsShape const& shape, ExpertsOptions const& options, Device const& device)
{
    check(shape, options);
    Values const values = common_values(shape, options);
    Values of_gate_up = values;
    add_matrix(of_gate_up, "gate_up_", options.gate_up);
    Values of_down = values;
    add_matrix(of_down, "down_", options.down);
    PreparedLaunches launches;
    auto const add = [&](KernelChoice const& choice, Values const& arguments)
    { launches.emplace_back(choice.best(arguments, device), arguments, device); };
    add(KernelChoice("reset_ticket_kernel"), values); // the workspace holds anything
    add(routing_choice(shape, options), values);
    add(gate_up_choice(shape, options), of_gate_up);
    add(down_choice(shape, options), of_down);
    add(sum_choice(shape, options), values);
    return launches;
}

} // namespace dflash_trt
