// A handler for a function of a lane's values.
#pragma once

#include "machine.h"

namespace software_gpu {

template <class R, auto F, class... A, size_t... I>
void map_lanes(Warp& warp, const Instruction& instruction, Mask active, std::index_sequence<I...>) {
    R results[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) results[lane] = static_cast<R>(F(warp.get<A>(instruction.from[I], lane)...));
    const Use& to = instruction.to[0];
    if (active == kAll) {
        for (int lane = 0; lane < kLanes; ++lane) warp.put<R>(to, lane, results[lane]);
        return;
    }
    for (int lane = 0; lane < kLanes; ++lane)
        if (active >> lane & 1) warp.put<R>(to, lane, results[lane]);
}

// `F` must have a value for any argument: it is computed for idle lanes, too.
template <class R, auto F, class... A>
void map(Warp& warp, const Instruction& instruction, Mask active) {
    map_lanes<R, F, A...>(warp, instruction, active, std::index_sequence_for<A...>{});
}

}  // namespace software_gpu
