// The recurrence of a gated delta net with its convolution, norm and gate: the launches of
// dflash_trt/kernels/gated_delta_launch.py.
#pragma once

#include "operations/float_type.h"
#include "runtime/device.h"
#include "runtime/prepared_launch.h"

#include <cstddef>
#include <cstdint>

namespace dflash_trt
{

struct DeltaShape
{
    FloatType type;
    int64_t num_rows;     // N
    int64_t num_requests; // R
    int64_t num_channels; // of the convolution: q, k and v
    int64_t conv_size;
    int64_t key_heads;
    int64_t value_heads;
    int64_t value_dim;

    [[nodiscard]] int64_t value_size() const noexcept { return value_heads * value_dim; }
    [[nodiscard]] int64_t key_dim() const noexcept { return (num_channels - value_size()) / (2 * key_heads); }
};

struct DeltaOptions
{
    int64_t state;       // index in state_pools of the first of the state's addresses
    int64_t num_records; // of a slot; a request with more rows is a prompt
    float eps;
};

/// Grows with rows and requests: the bytes of a shape serve all smaller ones. Throws Problem for sizes that contradict
/// each other, and when the library has no kernels for them.
size_t gated_delta_workspace_bytes(DeltaShape const& shape, DeltaOptions const& options);

/// In the order in which they must run. Tensors are those of the contract's GatedDelta, with a workspace of
/// gated_delta_workspace_bytes().
PreparedLaunches prepare_gated_delta(DeltaShape const& shape, DeltaOptions const& options, Device const& device);

} // namespace dflash_trt
