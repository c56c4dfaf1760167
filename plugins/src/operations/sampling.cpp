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
constexpr auto const& kKernels = launch_rules::SAMPLING_KERNELS;

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

/// The sampler's tile over the vocabulary; the same in every variant.
int64_t vocabulary_tile()
{
    return any_variant(kKernels[0]).constant("TILE");
}

std::vector<Scratch> scratch_tensors(SamplingShape const& shape)
{
    int64_t const tiles = ceil_div(shape.vocab_size, vocabulary_tile());
    std::vector<Scratch> tensors;
    for (auto const& [name, element_bytes, per_row, per_tile] : launch_rules::SAMPLING_SCRATCH)
    {
        auto const bytes = static_cast<size_t>(shape.num_rows() * (per_row + per_tile * tiles) * element_bytes);
        tensors.push_back({name, (bytes + kAlignment - 1) / kAlignment * kAlignment});
    }
    return tensors;
}

/// A variant of `kernel`, with requirements only for what it is compiled for.
KernelChoice choice(char const* kernel, SamplingShape const& shape)
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
            chosen.at_least("TILES", ceil_div(shape.vocab_size, vocabulary_tile()));
        }
        else if (name == "WIDTH")
        {
            chosen.at_least("WIDTH", shape.width);
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

Values values_of(SamplingShape const& shape)
{
    Values values;
    for (int32_t i = 0; i < kSampleAndAccept.inputs.count; ++i)
    {
        values.pointer(kSampleAndAccept.inputs[i].name, TensorSlot{TensorSource::kInput, i, 0});
    }
    for (int32_t i = 0; i < kSampleAndAccept.outputs.count; ++i)
    {
        values.pointer(kSampleAndAccept.outputs[i].name, TensorSlot{TensorSource::kOutput, i, 0});
    }
    values.integer("num_requests", shape.num_requests)
        .integer("num_rows", shape.num_rows())
        .integer("width", shape.width)
        .integer("vocab_size", shape.vocab_size)
        .integer("num_tiles", ceil_div(shape.vocab_size, vocabulary_tile()));
    size_t offset = 0;
    for (Scratch const& tensor : scratch_tensors(shape))
    {
        values.pointer(tensor.name, TensorSlot{TensorSource::kWorkspace, 0, offset});
        offset += tensor.num_bytes;
    }
    return values;
}

} // namespace

size_t sampling_workspace_bytes(SamplingShape const& shape)
{
    check(shape);
    for (char const* kernel : kKernels)
    {
        choice(kernel, shape).require();
    }
    size_t num_bytes = 0;
    for (Scratch const& tensor : scratch_tensors(shape))
    {
        num_bytes += tensor.num_bytes;
    }
    return num_bytes;
}

PreparedLaunches prepare_sampling(SamplingShape const& shape, Device const& device)
{
    check(shape);
    Values const values = values_of(shape);
    PreparedLaunches launches;
    for (char const* kernel : kKernels)
    {
        launches.emplace_back(choice(kernel, shape).best(values, device), values, device);
    }
    return launches;
}

} // namespace dflash_trt
