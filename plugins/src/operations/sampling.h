// Sampling and acceptance, and drafts: the launches of dflash_trt/kernels/sampling_launch.py and argmax_launch.py, in
// their order.
#pragma once

#include "operations/float_type.h"
#include "runtime/device.h"
#include "runtime/prepared_launch.h"

#include <cstddef>
#include <cstdint>

namespace dflash_trt
{

struct SamplingShape
{
    FloatType type;
    int64_t num_requests;
    int64_t width; // rows of a request: K + 1, of drafts K
    int64_t vocab_size;
    int64_t num_choices; // of a draft; 0: a step that tests no drafts

    [[nodiscard]] int64_t num_rows() const noexcept { return num_requests * width; }
};

/// Grows with rows and vocabulary: the bytes of a shape serve all smaller ones. Throws Problem when the library has no
/// kernels for it.
size_t sampling_workspace_bytes(SamplingShape const& shape);

/// In the order in which they must run. Tensors are those of the contract's SampleAndAccept, with a workspace of
/// sampling_workspace_bytes().
PreparedLaunches prepare_sampling(SamplingShape const& shape, Device const& device);

/// The same for the contract's DraftTokens; `has_map`: of a draft vocabulary.
size_t draft_workspace_bytes(SamplingShape const& shape, bool has_map);
PreparedLaunches prepare_drafts(SamplingShape const& shape, bool has_map, Device const& device);

} // namespace dflash_trt
