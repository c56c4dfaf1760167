// The tensor memory of a block: PTX ISA, "Tensor Memory". 128 lanes of 512 columns of 32 bits.
//
// Knows who wrote and read each place, and refuses an access that is not ordered behind them. So when an asynchronous
// load or store is done makes no difference.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <optional>

#include "clock.h"
#include "program.h"

namespace software_gpu {

class TensorMemory {
  public:
    static constexpr int kNumLanes = 128, kNumColumns = 512;
    static constexpr int kGroup = 16;  // lanes that no instruction divides

    enum class Access : uint8_t {
        kLoad,        // tcgen05.ld
        kStore,       // tcgen05.st
        kFactor,      // A or scales of tcgen05.mma
        kProduct,     // D of tcgen05.mma
        kCopy,        // of tcgen05.cp
        kDeallocate,
    };

    explicit TensorMemory(int num_warps);
    // The first column; none: not as many are free.
    std::optional<uint32_t> allocate(uint32_t num_columns);
    void deallocate(uint32_t column, uint32_t num_columns, const Clock& clock);
    bool has_allocations() const { return !allocations_.empty(); }

    // `event` touches the 16 lanes from `lane` on; raises Fault where `clock` has not seen what it must come after.
    void note(Access access, const Clock& clock, const Event& event, uint32_t lane, uint32_t column);

    uint32_t read(uint32_t lane, uint32_t column) const { return words_[index(lane, column)]; }
    bool is_undefined(uint32_t lane, uint32_t column) const { return undefined_[index(lane / 32, column)] >> lane % 32 & 1; }
    void write(uint32_t lane, uint32_t column, uint32_t word, bool is_undefined);

  private:
    struct Place {
        Event writer, factor;
        Access written_by = Access::kStore;
        std::array<uint32_t, 8> loads{};  // time of the last one, by warp / 4
    };
    static size_t index(uint32_t row, uint32_t column) { return size_t{row} * kNumColumns + column; }
    [[noreturn]] void refuse(uint32_t lane, uint32_t column, const std::string& what) const;
    void require_allocated(uint32_t lane, uint32_t column) const;

    int num_warps_;
    std::map<uint32_t, uint32_t> allocations_;  // columns, by the first
    std::vector<uint32_t> words_;
    std::vector<Mask> undefined_;               // or never written, by 32 lanes and column
    std::vector<Place> places_;                 // by 16 lanes and column
};

}  // namespace software_gpu
