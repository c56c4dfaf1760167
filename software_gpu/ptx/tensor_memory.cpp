#include "tensor_memory.h"

namespace software_gpu {

TensorMemory::TensorMemory(int num_warps)
    : num_warps_(num_warps), words_(kNumLanes * kNumColumns, 0xffffffffu), undefined_(kNumLanes / 32 * kNumColumns, kAll),
      places_(kNumLanes / kGroup * kNumColumns) {}

// From the end, so that a kernel which forgets its base is noticed.
std::optional<uint32_t> TensorMemory::allocate(uint32_t num_columns) {
    if (num_columns < 32 || num_columns > kNumColumns || num_columns & (num_columns - 1)) throw Fault("tcgen05.alloc of " + std::to_string(num_columns) + " columns");
    uint32_t end = kNumColumns;
    for (auto taken = allocations_.rbegin(); taken != allocations_.rend() && end < taken->first + taken->second + num_columns; ++taken) end = taken->first;
    if (end < num_columns) return std::nullopt;
    allocations_[end - num_columns] = num_columns;
    return end - num_columns;
}

void TensorMemory::deallocate(uint32_t column, uint32_t num_columns, const Clock& clock) {
    const auto found = allocations_.find(column);
    if (found == allocations_.end() || found->second != num_columns) throw Fault("tcgen05.dealloc of " + std::to_string(num_columns) + " columns at " + std::to_string(column) + ", which tcgen05.alloc has not given");
    for (uint32_t at = column; at < column + num_columns; ++at) {
        for (uint32_t lane = 0; lane < kNumLanes; lane += kGroup) note(Access::kDeallocate, clock, {}, lane, at);
        for (uint32_t row = 0; row < kNumLanes / 32; ++row) undefined_[index(row, at)] = kAll;
    }
    allocations_.erase(found);
}

void TensorMemory::refuse(uint32_t lane, uint32_t column, const std::string& what) const {
    throw Fault("tensor memory at lane " + std::to_string(lane) + ", column " + std::to_string(column) + ": " + what);
}

void TensorMemory::require_allocated(uint32_t lane, uint32_t column) const {
    const auto after = allocations_.upper_bound(column);
    if (lane >= kNumLanes || after == allocations_.begin() || std::prev(after)->first + std::prev(after)->second <= column) refuse(lane, column, "outside of every allocation");
}

// PTX ISA, "Memory Consistency Model for 5th generation of TensorCore operations": what a thread's tcgen05.wait, an mbarrier
// of tcgen05.commit and the block's barriers order. "Pipelined tcgen05 Instructions": products into the same accumulator, and
// products after copies, of one warp keep their order.
void TensorMemory::note(Access access, const Clock& clock, const Event& event, uint32_t lane, uint32_t column) {
    static const char* const kNames[] = {"tcgen05.ld", "tcgen05.st", "tcgen05.mma", "tcgen05.mma", "tcgen05.cp", "tcgen05.dealloc"};
    require_allocated(lane, column);
    Place& place = places_[index(lane / kGroup, column)];
    const auto require = [&](const Event& before, const char* verb, const char* what, const char* wait) {
        if (!clock.has_seen(before)) refuse(lane, column, std::string(kNames[static_cast<int>(access)]) + " " + verb + " before " + what + " of warp " + std::to_string(before.warp) + " has ended: no " + wait + " and barrier between them");
    };
    const char* const verb = access == Access::kDeallocate ? "frees it" : access == Access::kLoad || access == Access::kFactor ? "reads it" : "writes it";
    const bool is_same_core = event.actor == Actor::kTensorCore && place.writer.actor == Actor::kTensorCore && place.writer.warp == event.warp;
    const bool is_pipelined = is_same_core && ((access == Access::kProduct && place.written_by == Access::kProduct) || (place.written_by == Access::kCopy && access != Access::kCopy));
    if (!is_pipelined) require(place.writer, verb, kNames[static_cast<int>(place.written_by)], place.writer.actor == Actor::kTensorStore ? "tcgen05.wait::st" : "wait for its tcgen05.commit");
    if (access == Access::kLoad) {
        place.loads[event.warp / 4] = event.time;
        return;
    }
    if (access == Access::kFactor) {
        place.factor = event;
        return;
    }
    require(place.factor, verb, "tcgen05.mma", "wait for its tcgen05.commit");
    for (int warp = static_cast<int>(lane) / 32; warp < num_warps_; warp += 4) require({Actor::kTensorLoad, static_cast<uint8_t>(warp), place.loads[warp / 4]}, verb, "tcgen05.ld", "tcgen05.wait::ld");
    place.writer = event;
    place.written_by = access;
}

void TensorMemory::write(uint32_t lane, uint32_t column, uint32_t word, bool is_undefined) {
    const Mask bit = Mask{1} << lane % 32;
    Mask& undefined = undefined_[index(lane / 32, column)];
    undefined = is_undefined ? undefined | bit : undefined & ~bit;
    words_[index(lane, column)] = word;
}

}  // namespace software_gpu
