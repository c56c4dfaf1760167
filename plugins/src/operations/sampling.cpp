#include "operations/sampling.h"

#include "contract/contract.h"
#include "launch_rules.h"
#include "runtime/kernel_choice.h"
#include "runtime/problem.h"
#include "runtime/values.h"

#include <string>
#include <string_view>
#include <vector>

namespace dflash_trt
{
namespace
{

constexpr size_t kAlignment = 256;

/// The launches of an operation over rows of logits, in their order.
struct Operation
{
    PluginContract const& contract;
    Rules<char const*> kernels;
    Rules<launch_rules::Scratch> scratch;
    bool has_map;
};

Operation const kSampling{kSampleAndAccept, launch_rules::SAMPLING_KERNELS, launch_rules::SAMPLING_SCRATCH, false};

Operation drafting(bool has_map)
{
    return {kDraftTokens, launch_rules::DRAFT_KERNELS, launch_rules::DRAFT_SCRATCH, has_map};
}

/// A scratch tensor of the launches, by its argument name.
struct Scratch
{
    char const* name;
    size_t num_bytes;
};

EmbeddedKernel const& any_variant(std::string_view kernel)
{
    KernelVariants const& variants = variants_of(kernel);
    if (!variants.empty())
    {
        return *variants.front();
    }
    throw Problem("plugin library", "sampling kernels", "none", "Build the library again, with all its kernels.");
}

/// Tiles of the vocabulary; their size is the same in every variant.
int64_t num_tiles(Operation const& operation, SamplingShape const& shape)
{
    return ceil_div(shape.vocab_size, any_variant(operation.kernels[0]).constant("TILE"));
}

std::vector<Scratch> scratch_tensors(Operation const& operation, SamplingShape const& shape)
{
    int64_t const tiles = num_tiles(operation, shape);
    std::vector<Scratch> tensors;
    for (auto const& [name, element_bytes, per_row, per_tile] : operation.scratch)
    {
        auto const bytes = static_cast<size_t>(shape.num_rows() * (per_row + per_tile * tiles) * element_bytes);
        tensors.push_back({name, (bytes + kAlignment - 1) / kAlignment * kAlignment});
    }
    return tensors;
}

/// A variant of `kernel`, with requirements only for what it is compiled for.
KernelChoice choice(char const* kernel, Operation const& operation, SamplingShape const& shape)
{
    EmbeddedKernel const& sample = any_variant(kernel);
    KernelChoice chosen(kernel);
    if (!sample.type_of("logits").empty())
    {
        chosen.type("logits", pointer_type(shape.type));
    }
    for (size_t i = 0; i < sample.num_constants; ++i)
    {
        std::string_view const name = sample.constants[i].name;
        if (name == "TILES")
        {
            chosen.at_least("TILES", num_tiles(operation, shape));
        }
        else if (name == "WIDTH")
        {
            chosen.at_least("WIDTH", shape.width);
        }
        else if (name == "NUM_CHOICES")
        {
            chosen.at_least("NUM_CHOICES", shape.num_choices);
        }
        else if (name == "HAS_MAP")
        {
            chosen.equal("HAS_MAP", operation.has_map ? 1 : 0);
        }
    }
    return chosen;
}

void check(SamplingShape const& shape)
{
    if (shape.num_requests < 1 || shape.width < 1 || shape.vocab_size < 1)
    {
        throw Problem("logits", "a row, a request and a token at least",
            std::to_string(shape.num_requests) + " requests of " + std::to_string(shape.width) + " rows of "
                + std::to_string(shape.vocab_size) + " tokens",
            "Logits are [R * S, vocabulary].");
    }
}

Values values_of(Operation const& operation, SamplingShape const& shape)
{
    Values values;
    for (int32_t i = 0; i < operation.contract.inputs.count; ++i)
    {
        values.pointer(operation.contract.inputs[i].name, TensorSlot{TensorSource::kInput, i, 0});
    }
    for (int32_t i = 0; i < operation.contract.outputs.count; ++i)
    {
        values.pointer(operation.contract.outputs[i].name, TensorSlot{TensorSource::kOutput, i, 0});
    }
    values.integer("num_requests", shape.num_requests)
        .integer("num_rows", shape.num_rows())
        .integer("width", shape.width)
        .integer("num_slots", shape.width)
        .integer("vocab_size", shape.vocab_size)
        .integer("num_choices", shape.num_choices)
        .integer("num_tiles", num_tiles(operation, shape));
    size_t offset = 0;
    for (Scratch const& tensor : scratch_tensors(operation, shape))
    {
        values.pointer(tensor.name, TensorSlot{TensorSource::kWorkspace, 0, offset});
        offset += tensor.num_bytes;
    }
    return values;
}

size_t workspace_bytes(Operation const& operation, SamplingShape const& shape)
{
    check(shape);
    for (char const* kernel : operation.kernels)
    {
        choice(kernel, operation, shape).require();
    }
    size_t num_bytes = 0;
    for (Scratch const& tensor : scratch_tensors(operation, shape))
    {
        num_bytes += tensor.num_bytes;
    }
    return num_bytes;
}

PreparedLaunches prepare(Operation const& operation, SamplingShape const& shape, Device const& device)
{
    check(shape);
    Values const values = values_of(operation, shape);
    PreparedLaunches launches;
    for (char const* kernel : operation.kernels)
    {
        launches.emplace_back(choice(kernel, operation, shape).best(values, device), values, device);
    }
    return launches;
}

} // namespace

size_t sampling_workspace_bytes(SamplingShape const& shape)
{
    return workspace_bytes(kSampling, shape);
}

PreparedLaunches prepare_sampling(SamplingShape const& shape, Device const& device)
{
    return prepare(kSampling, shape, device);
}

size_t draft_workspace_bytes(SamplingShape const& shape, bool has_map)
{
    return workspace_bytes(drafting(has_map), shape);
}

PreparedLaunches prepare_drafts(SamplingShape const& shape, bool has_map, Device const& device)
{
    return prepare(drafting(has_map), shape, device);
}

} // namespace dflash_trt
