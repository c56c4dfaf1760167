// Sampling and acceptance: the launches of dflash_trt/kernels/sampling_launch.py, in their order.
#pragma once

#include "operations/float_type.h"
#include "runtime/device.h"

#include <cstddef>
#include <cstdint>

namespace dflash_trt
{

struct SamplingShape
{
    FloatType type;
    int64_t num_requests;
    int64_t width; // rows of a request, K + 1
    int64_t vocab_size;

    [[nodiscard]] int64_t num_rows() const noexcept { return num_requests * width; }
};

/// Inputs and outputs in the order of plugins/README.md.
struct SamplingBuffers
{
    void const* logits;
    void const* token_ids;
    void const* positions;
    void const* token_offsets;
    void const* context_lens;
    void const* logit_rows;
    void const* num_candidates;
    void const* temperature;
    void const* top_k;
    void const* top_p;
    void const* min_p;
    void const* seed;
    void* emitted_tokens;
    void* emitted_logprobs;
    void* num_accepted;
    void* bonus_tokens;
    void* next_context_lens;
    void* workspace; // sampling_workspace_bytes()
};

/// Grows with rows and vocabulary: the bytes of a shape serve all smaller ones. Throws Problem when the library has no
/// kernels for it.
size_t sampling_workspace_bytes(SamplingShape const& shape);

void prepare_sampling(SamplingShape const& shape, Device const& device);

void sample_and_accept(
    SamplingShape const& shape, SamplingBuffers const& buffers, Device const& device, CUstream stream);

} // namespace dflash_trt
