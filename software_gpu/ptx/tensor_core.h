// What the tensor core still has to do: tcgen05.mma and .cp, and the arrivals that tcgen05.commit has asked for.
#pragma once

#include "machine.h"

namespace software_gpu {

bool has_commit(const Block& block, uint32_t mbarrier);
// Does all work before the first commit to this mbarrier, which then arrives; false when there is none.
bool end_commit(Block& block, uint32_t mbarrier);

}  // namespace software_gpu
