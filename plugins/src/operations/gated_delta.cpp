#include "operations/gated_delta.h"

#include "contract/contract.h"
#include "operations/tensor_slots.h"
#include "operations/workspace_layout.h"
#include "runtime/kernel_choice.h"
#include "runtime/problem.h"
#include "runtime/values.h"

#include <array>
#include <optional>
#include <string>

namespace dflash_trt
{
namespace
{

/// Where the launches leave what the next ones read.
struct Workspace
{
    size_t num_folded; // int32 [R]
    size_t mixed;      // F [N, channels]
    size_t attended;   // float32 [N, value_size]
    size_t num_bytes;
};

Workspace workspace_of(DeltaShape const& shape)
{
    WorkspaceLayout layout;
    size_t const num_folded = layout.add(4 * shape.num_requests);
    size_t const mixed = layout.add(shape.num_rows * shape.num_channels * element_bytes(shape.type));
    size_t const attended = layout.add(shape.num_rows * shape.value_size() * 4);
    return {num_folded, mixed, attended, layout.end()};
}

KernelChoice convolve_choice(DeltaShape const& shape, DeltaOptions const& options)
{
    return KernelChoice("convolve_kernel")
        .type("qkvz", pointer_type(shape.type))
        .equal("CHANNELS", shape.num_channels)
        .equal("GATES", shape.value_size())
        .equal("TAPS", shape.conv_size)
        .equal("RECORDS", options.num_records)
        .equal("POOLED", 1)
        .at_least("REQUESTS", shape.num_requests);
}

/// What the kernels that know heads are chosen by.
KernelChoice heads_choice(char const* kernel, DeltaShape const& shape, DeltaOptions const& options)
{
    return KernelChoice(kernel)
        .type("mixed", pointer_type(shape.type))
        .equal("KEY_HEADS", shape.key_heads)
        .equal("HEADS", shape.value_heads)
        .equal("KEY_DIM", shape.key_dim())
        .equal("VALUE_DIM", shape.value_dim)
        .equal("RECORDS", options.num_records)
        .equal("POOLED", 1);
}

KernelChoice finish_choice(DeltaShape const& shape, DeltaOptions const& options)
{
    return heads_choice("finish_kernel", shape, options)
        .equal("TAPS", shape.conv_size)
        .at_least("REQUESTS", shape.num_requests);
}

void check(DeltaShape const& shape, DeltaOptions const& options)
{
    int64_t const key_features = shape.num_channels - shape.value_size();
    bool const has_keys = key_features > 0 && key_features % (2 * shape.key_heads) == 0;
    if (!has_keys || shape.value_heads % shape.key_heads != 0)
    {
        throw Problem("gated delta net", "as many channels for keys as for queries, in whole heads",
            std::to_string(shape.num_channels) + " channels, " + std::to_string(shape.key_heads) + " key heads, "
                + std::to_string(shape.value_heads) + " value heads of " + std::to_string(shape.value_dim),
            "Channels are q, k and v.");
    }
    if (shape.num_rows < 1 || shape.num_requests < 1 || options.num_records < 1)
    {
        throw Problem("gated delta net", "a row, a request and a record at least",
            std::to_string(shape.num_rows) + " rows, " + std::to_string(shape.num_requests) + " requests, "
                + std::to_string(options.num_records) + " records",
            "Shapes stand in plugins/README.md.");
    }
}

Values values_of(DeltaShape const& shape, DeltaOptions const& options)
{
    Workspace const workspace = workspace_of(shape);
    auto const scratch = [](size_t offset) { return TensorSlot{TensorSource::kWorkspace, 0, offset}; };
    Values values;
    for (char const* name : {"qkvz", "ba", "log_rate", "dt_bias", "norm", "state_pools", "slot_ids", "token_offsets",
             "context_lens"})
    {
        values.pointer(name, input_slot(kGatedDelta, name));
    }
    values.pointer("filters", input_slot(kGatedDelta, "conv"))
        .pointer("out", output_slot(kGatedDelta, "out"))
        .pointer("num_folded", scratch(workspace.num_folded))
        .pointer("mixed", scratch(workspace.mixed))
        .pointer("attended", scratch(workspace.attended));
    // Found at the addresses in state_pools; of these only the types.
    for (char const* part : {"state", "keys", "deltas", "decays", "window", "position"})
    {
        values.pointer(part, std::nullopt);
    }
    values.integer("num_rows", shape.num_rows)
        .integer("num_requests", shape.num_requests)
        .integer("state_index", options.state)
        .real("eps", options.eps);
    return values;
}

} // namespace

size_t gated_delta_workspace_bytes(DeltaShape const& shape, DeltaOptions const& options)
{
    check(shape, options);
    for (KernelChoice const& choice :
        std::array{convolve_choice(shape, options), heads_choice("delta_verify_kernel", shape, options),
            heads_choice("delta_prompt_kernel", shape, options), finish_choice(shape, options)})
    {
        choice.require();
    }
    return workspace_of(shape).num_bytes;
}

PreparedLaunches prepare_gated_delta(DeltaShape const& shape, DeltaOptions const& options, Device const& device)
{
    check(shape, options);
    Values const values = values_of(shape, options);
    PreparedLaunches launches;
    auto const add = [&](KernelChoice const& choice)
    { launches.emplace_back(choice.best(values, device), values, device); };
    add(convolve_choice(shape, options));
    add(heads_choice("delta_verify_kernel", shape, options));
    // A node does not know the rows of each request: in steps that may have a prompt, all of them are looked at.
    if (shape.num_rows > options.num_records)
    {
        add(heads_choice("delta_prompt_kernel", shape, options));
    }
    add(finish_choice(shape, options));
    return launches;
}

} // namespace dflash_trt
