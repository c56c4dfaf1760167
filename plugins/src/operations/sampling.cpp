#include "operations/sampling.h"

#include "runtime/kernel_choice.h"
#include "runtime/kernel_library.h"
#include "runtime/launch.h"
#include "runtime/problem.h"
#include "runtime/values.h"

#include <array>
#include <string>
#include <string_view>
#include <vector>

namespace dflash_trt
{
namespace
{

constexpr size_t kAlignment = 256;
constexpr std::array<char const*, 7> kKernels{"tile_statistics_kernel", "row_bounds_kernel", "collect_kernel",
    "row_threshold_kernel", "tile_mass_kernel", "draw_kernel", "accept_kernel"};

/// A scratch tensor of the launches, by its argument name.
struct Scratch
{
    char const* name;
    int64_t num_elements;
    size_t element_bytes;

    [[nodiscard]] size_t num_bytes() const noexcept
    {
        size_t const bytes = static_cast<size_t>(num_elements) * element_bytes;
        return (bytes + kAlignment - 1) / kAlignment * kAlignment;
    }
};

/// What the kernels' constants say about sizes; the same in every variant.
struct Tiling
{
    int64_t tile;
    int64_t pieces;
    int64_t list_capacity;

    static Tiling of_library();
};

EmbeddedKernel const& any_variant(std::string_view kernel)
{
    for (EmbeddedKernel const& embedded : embedded_kernels())
    {
        if (kernel == embedded.kernel)
        {
            return embedded;
        }
    }
    throw Problem("plugin library", "sampling kernels", "none", "Build the library again, with all its kernels.");
}

Tiling Tiling::of_library()
{
    EmbeddedKernel const& statistics = any_variant("tile_statistics_kernel");
    return {statistics.constant("TILE"), statistics.constant("PIECES"),
        any_variant("collect_kernel").constant("LIST_CAPACITY")};
}

std::vector<Scratch> scratch_tensors(SamplingShape const& shape, Tiling const& tiling)
{
    int64_t const rows = shape.num_rows();
    int64_t const tiles = rows * ceil_div(shape.vocab_size, tiling.tile);
    return {
        {"tile_mass", tiles, sizeof(int64_t)},
        {"tile_max", tiles, sizeof(float)},
        {"tile_argmax", tiles, sizeof(int32_t)},
        {"tile_sum", tiles, sizeof(float)},
        {"tile_scaled_sum", tiles, sizeof(float)},
        {"piece_max", tiles * tiling.pieces, sizeof(float)},
        {"row_max", rows, sizeof(float)},
        {"row_log_sum", rows, sizeof(float)},
        {"row_mode", rows, sizeof(int32_t)},
        {"row_floor", rows, sizeof(float)},
        {"row_threshold", rows, sizeof(float)},
        {"list_count", rows, sizeof(int32_t)},
        {"list_values", rows * tiling.list_capacity, sizeof(float)},
    };
}

/// A variant of `kernel`, with requirements only for what it is compiled for.
KernelChoice choice(char const* kernel, SamplingShape const& shape, Tiling const& tiling)
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
            chosen.at_least("TILES", ceil_div(shape.vocab_size, tiling.tile));
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

Values values_of(SamplingShape const& shape, SamplingBuffers const& buffers, Tiling const& tiling)
{
    Values values;
    values.pointer("logits", buffers.logits)
        .pointer("token_ids", buffers.token_ids)
        .pointer("positions", buffers.positions)
        .pointer("token_offsets", buffers.token_offsets)
        .pointer("context_lens", buffers.context_lens)
        .pointer("logit_rows", buffers.logit_rows)
        .pointer("num_candidates", buffers.num_candidates)
        .pointer("temperature", buffers.temperature)
        .pointer("top_k", buffers.top_k)
        .pointer("top_p", buffers.top_p)
        .pointer("min_p", buffers.min_p)
        .pointer("seed", buffers.seed)
        .pointer("emitted_tokens", buffers.emitted_tokens)
        .pointer("emitted_logprobs", buffers.emitted_logprobs)
        .pointer("num_accepted", buffers.num_accepted)
        .pointer("bonus_tokens", buffers.bonus_tokens)
        .pointer("next_context_lens", buffers.next_context_lens);
    values.integer("num_requests", shape.num_requests)
        .integer("num_rows", shape.num_rows())
        .integer("width", shape.width)
        .integer("vocab_size", shape.vocab_size)
        .integer("num_tiles", ceil_div(shape.vocab_size, tiling.tile));
    auto* scratch = static_cast<unsigned char*>(buffers.workspace);
    for (Scratch const& tensor : scratch_tensors(shape, tiling))
    {
        values.pointer(tensor.name, scratch);
        scratch += tensor.num_bytes();
    }
    return values;
}

} // namespace

size_t sampling_workspace_bytes(SamplingShape const& shape)
{
    check(shape);
    Tiling const tiling = Tiling::of_library();
    for (char const* kernel : kKernels)
    {
        choice(kernel, shape, tiling).require();
    }
    size_t num_bytes = 0;
    for (Scratch const& tensor : scratch_tensors(shape, tiling))
    {
        num_bytes += tensor.num_bytes();
    }
    return num_bytes;
}

void prepare_sampling(SamplingShape const& shape, Device const& device)
{
    check(shape);
    Tiling const tiling = Tiling::of_library();
    for (char const* kernel : kKernels)
    {
        choice(kernel, shape, tiling).require(device.major, device.minor);
        // K may change from call to call, the vocabulary does not.
        SamplingShape const narrow{shape.type, shape.num_requests, 1, shape.vocab_size};
        for (EmbeddedKernel const* candidate : choice(kernel, narrow, tiling).candidates(device.major, device.minor))
        {
            KernelLibrary::get().function(*candidate, device);
        }
    }
}

void sample_and_accept(
    SamplingShape const& shape, SamplingBuffers const& buffers, Device const& device, CUstream stream)
{
    check(shape);
    Tiling const tiling = Tiling::of_library();
    Values const values = values_of(shape, buffers, tiling);
    for (char const* kernel : kKernels)
    {
        EmbeddedKernel const& chosen = choice(kernel, shape, tiling).best(values, device.major, device.minor);
        launch(chosen, values, device, stream);
    }
}

} // namespace dflash_trt
