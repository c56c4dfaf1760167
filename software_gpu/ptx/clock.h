// What happened before what within a block: vector clocks of its warps and of the asynchronous work that they start.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace software_gpu {

// Whose work: a warp's own, that of the tensor core for a warp (tcgen05.mma, .cp), and a warp's tcgen05.st and .ld.
enum class Actor : uint8_t { kWarp, kTensorCore, kTensorStore, kTensorLoad };

struct Event {
    Actor actor = Actor::kWarp;
    uint8_t warp = 0;
    uint32_t time = 0;  // from 1; 0: never

    bool operator==(const Event&) const = default;
};

class Clock {
  public:
    explicit Clock(int num_warps) : num_warps_(num_warps), times_(4 * num_warps), fenced_(num_warps) {}

    uint32_t time(Actor actor, int warp) const { return times_[place(actor, warp)]; }
    void set(const Event& event) { times_[place(event.actor, event.warp)] = event.time; }
    bool has_seen(const Event& event) const { return time(event.actor, event.warp) >= event.time; }
    // Until when the asynchronous proxy sees what a warp has written: PTX ISA, "Async Proxy".
    uint32_t fenced(int warp) const { return fenced_[warp]; }
    void fence() {
        for (int warp = 0; warp < num_warps_; ++warp) fenced_[warp] = std::max(fenced_[warp], times_[warp]);
    }
    // After something that has seen `other`.
    void join(const Clock& other) {
        for (size_t i = 0; i < times_.size(); ++i) times_[i] = std::max(times_[i], other.times_[i]);
        for (size_t i = 0; i < fenced_.size(); ++i) fenced_[i] = std::max(fenced_[i], other.fenced_[i]);
    }

  private:
    size_t place(Actor actor, int warp) const { return static_cast<size_t>(static_cast<int>(actor) * num_warps_ + warp); }

    int num_warps_;
    std::vector<uint32_t> times_, fenced_;
};

}  // namespace software_gpu
