// Direct attention of prompts that begin in a step: the launches of dflash_trt/kernels/latent_chunk_launch.py, behind
// those of latents.h, which leaves these rows out.
#pragma once

#include "operations/latents.h"
#include "runtime/device.h"
#include "runtime/prepared_launch.h"

#include <cstddef>
#include <cstdint>

namespace dflash_trt
{

constexpr int64_t kPlanWords = 8; // attention_partition.PLAN_WORDS, int32 each

/// Rows from which a prompt is attended directly in such a step; launch_rules::ANY_ROWS: none is.
int64_t min_direct_rows(LatentShape const& shape, LatentOptions const& options);

/// Of a shape and all smaller ones, of more requests too. Throws Problem when the library has no kernels for them.
size_t direct_workspace_bytes(LatentShape const& shape, LatentOptions const& options);

/// None where no prompt is. `rows`: F [N, row_size], what the pages hold of the step's rows; the workspace begins at
/// `workspace`.
PreparedLaunches prepare_direct(LatentShape const& shape, LatentOptions const& options, TensorSlot rows,
    size_t workspace, Device const& device);

} // namespace dflash_trt
