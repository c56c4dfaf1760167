// Sums, joins and exchanges of a tensor over the ranks of one world, a process each.
#pragma once

#include "runtime/float_type.h"
#include "runtime/nccl.h"

#include <cstdint>

namespace dflash_trt
{

/// The ncclComm_t of this process's world, of all collectives from now on; null for none. The caller keeps it alive.
/// Throws Problem without NCCL.
void set_communicator(void* communicator);

/// Throws Problem without a communicator of `num_ranks` ranks.
void require_communicator(int64_t num_ranks);

struct CollectiveShape
{
    FloatType type;
    int64_t num_ranks;
    int64_t num_elements; // of this rank's tensor
};

/// `summed` has `num_elements`, and may be `x`.
void all_reduce(CollectiveShape const& shape, void const* x, void* summed, CUstream stream);

/// `gathered` has `num_ranks * num_elements`, rank 0's first.
void all_gather(CollectiveShape const& shape, void const* x, void* gathered, CUstream stream);

/// `x` has a part for each rank, rank 0's first; `summed` is the sum of those for this one, and has
/// `num_elements / num_ranks`.
void reduce_scatter(CollectiveShape const& shape, void const* x, void* summed, CUstream stream);

/// `x` has a part for each rank, and `received` each rank's part for this one, rank 0's first.
void all_to_all(CollectiveShape const& shape, void const* x, void* received, CUstream stream);

} // namespace dflash_trt
