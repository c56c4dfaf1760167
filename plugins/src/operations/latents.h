// Attention over latent pages: a write of the step's rows, the launches of
// dflash_trt/kernels/latent_attention_launch.py, and those of latents_direct.h for prompts that begin.
#pragma once

#include "operations/float_type.h"
#include "runtime/device.h"
#include "runtime/prepared_launch.h"

#include <cstddef>
#include <cstdint>

namespace dflash_trt
{

struct LatentShape
{
    ElementTypes types;
    int64_t num_rows;     // N
    int64_t num_requests; // R
    int64_t pages_per_request;
    int64_t num_heads;
    int64_t row_size; // of a latent and the rotated key behind it
    int64_t nope_dim; // of a head's keys that are not rotated
    int64_t value_dim;
};

struct LatentOptions
{
    int64_t state; // index of the pages' address in state_pools
    int64_t latent_dim;
    int64_t page_size;
    int64_t max_verify_rows; // of a request that is not a prompt
    float k_scale; // 1 for pages of F
    float score_scale;
};

/// Grows with rows and requests: the bytes of a shape serve all smaller ones, on any GPU. Throws Problem for sizes that
/// contradict each other, and when the library has no kernels for them.
size_t latents_workspace_bytes(LatentShape const& shape, LatentOptions const& options);

/// In the order in which they must run. Tensors are those of the contract's AttendLatents, with a workspace of
/// latents_workspace_bytes().
PreparedLaunches prepare_latents(LatentShape const& shape, LatentOptions const& options, Device const& device);

} // namespace dflash_trt
