// What executes a kernel: the launch, its blocks (CTAs), their warps. A warp's register is a vector of 32 lanes.
//
// Blocks run one after another, the warps of a block in turns, the lanes of a warp in step. Lanes that took different
// branches wait for the one furthest behind, as compilers lay out code so that paths meet again further on.
#pragma once

#include <array>
#include <bit>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>

#include "clock.h"
#include "program.h"
#include "tensor_memory.h"

namespace software_gpu {

// Where an operand's lanes are. 64-bit values take two words a lane.
struct Use {
    uint32_t index = 0;  // of words of 32 lanes, or of predicates
    bool is_constant = false;
    bool is_predicate = false;
    bool is_negated = false;
    uint8_t num_words = 1;
};

struct Warp;
struct Instruction;
using Handler = void (*)(Warp&, const Instruction&, Mask);  // with the lanes that take part

// Which arguments must have been set. Compiled code reads registers that nobody has set where it needs no value: results
// are then undefined, too, until one is needed.
enum class Needs : uint8_t { kNothing, kFirst, kAllButFirst, kAll };

struct Instruction {
    Handler run = nullptr;
    std::vector<Use> to, from;         // in the order that the handler wants
    Needs needs = Needs::kNothing;
    bool mixes_lanes = false;          // a result is undefined where an argument of any lane is
    std::vector<uint32_t> needed, read, written;  // places in Warp::defined, of `from` and `to`
    int64_t offset = 0;                // of an address
    std::array<int64_t, 8> n{};        // sizes and kinds of the opcode; the handler says which
    Use guard;
    bool has_guard = false;
    bool sets_defined = false;         // the handler says which results are defined
    bool may_use_in_flight = false;    // registers that an asynchronous product still writes
    bool is_branch = false;
    uint32_t target = 0;
    const Statement* statement = nullptr;
};

struct Kernel {
    std::shared_ptr<const Module> module;
    const Entry* entry = nullptr;
    std::vector<Instruction> instructions;
    std::vector<uint32_t> constants;           // kLanes words each
    std::map<std::string, Use> specials;       // %tid.x and so on, as registers
    std::vector<Use> undefined;                // that no instruction writes: any value will do
    uint32_t num_words = 0, num_predicates = 0;
};

// Allocations that a kernel may touch. None: every address is allowed.
class GlobalMemory {
  public:
    struct Range {
        uint64_t begin, end;
    };
    void set_ranges(std::vector<Range> ranges);
    // Raises Fault for an address that is not a multiple of `bytes`, or lies outside of every allocation.
    void check(uint64_t address, int bytes) const;

  private:
    std::vector<Range> ranges_;
    mutable size_t last_ = 0;
};

struct Options {
    bool is_late = true;        // asynchronous copies and products at the last moment that waits allow, or at the first
    bool finds_races = false;   // of shared and global memory, and reads of shared memory that nobody wrote
    uint64_t max_instructions = 2'000'000'000;
};

// Who touched a byte of shared memory since the last barrier.
struct ShadowByte {
    uint32_t epoch = 0;                  // the block's barriers before the last access, from 1; 0: never
    uint32_t writers = 0, readers = 0;   // warps, by bit
    int16_t writer = -1;                 // the last warp that wrote it, ever; -1: none has
    bool is_undefined = false;           // what was written comes from registers that nobody had set
    uint32_t time = 0;                   // the writer's
    Event tensor_core;                   // the last tcgen05 that reads it

    void begin(uint32_t of_epoch) {
        if (epoch != of_epoch) writers = readers = 0;
        epoch = of_epoch;
    }
};

struct Launch;

struct Barrier {
    int num_arrived = 0;      // threads
    int num_expected = 0;
    std::vector<int> waiting;  // warps
    std::optional<Clock> clock;  // of those that have arrived
};

constexpr uint32_t kMbarrierBytes = 8;

// PTX ISA, "mbarrier". The object in shared memory is opaque: it is kept here, by its address.
struct Mbarrier {
    uint32_t num_expected, num_pending;  // arrivals
    uint32_t phase = 0;
    Event init;
    std::vector<uint32_t> used;          // by warp, when it last did something with it
    Clock clock, next_clock;             // of the arrivals of phases that have ended, of this one's too
};

struct Block {
    Block(const Launch& launch, std::array<uint32_t, 3> index, uint64_t linear_index);
    // True when all warps are done; false when it waits for other blocks.
    bool run();
    // False when the bytes are undefined, as far as a shadow tells.
    bool read_shared(const Warp& warp, uint64_t address, void* out, int bytes);
    void write_shared(const Warp& warp, uint64_t address, const void* bytes_in, int bytes, bool is_undefined = false);
    // Of the tensor core: sees what generic stores wrote only behind a fence of its proxy.
    bool read_shared_by_tensor_core(const Warp& warp, uint64_t address, void* out, int bytes);
    // tcgen05.mma and .cp: what must have happened before; `event` reads 16 bytes.
    void note_tensor_core(const Clock& clock, const Event& event, uint64_t address);
    // At the end of tcgen05, when it may have been written already.
    bool read_shared_late(uint64_t address, void* out, int bytes) const;
    void arrive(int barrier, Warp& warp, int num_threads, bool waits);
    Mbarrier& mbarrier(uint32_t address);
    void arrive(Mbarrier& barrier, const Clock& clock, uint32_t count) const;

    const Launch& launch;
    std::array<uint32_t, 3> index;
    uint64_t linear_index;
    int num_warps;
    std::vector<uint8_t> shared;
    std::vector<ShadowByte> shadow;
    uint32_t epoch = 1;
    std::vector<Warp> warps;
    std::array<Barrier, 16> barriers;
    std::map<uint32_t, Mbarrier> mbarriers;  // by address
    std::unique_ptr<TensorMemory> tensor_memory;  // once something is allocated
    bool may_allocate = true;

  private:
    void check_shared(uint64_t address, int bytes) const;
    void note_read(const Warp& warp, uint64_t address, int bytes);
    void note_write(const Warp& warp, uint64_t address, const void* content, int bytes, bool is_undefined);
    bool is_defined(uint64_t address, int bytes) const;
    void require_no_mbarrier(uint64_t address, int bytes) const;
    void require_fenced(const Clock& clock, uint64_t address) const;
    void require_ended() const;
    [[noreturn]] void refuse_endless_wait(bool is_at_mbarrier) const;
};

struct Path {
    uint32_t pc;
    Mask lanes;
};

// A copy of cp.async that has not arrived: its bytes are read from global memory when it does.
struct Copy {
    Mask lanes;
    std::array<uint64_t, kLanes> from;
    std::array<uint32_t, kLanes> to, num_read;  // bytes; the rest up to `bytes` is zeros
    int bytes;
};

// A wgmma that has not been waited for.
struct Product {
    const Instruction* instruction;
    uint64_t a, b;  // descriptors, where A is not in registers
    bool accumulates;
};

// tcgen05.mma, .cp or .commit that has not been waited for.
struct TensorCoreWork {
    void (*run)(Warp& warp, const TensorCoreWork& work) = nullptr;  // null: a commit
    const Instruction* instruction = nullptr;
    std::array<uint64_t, 6> values{};  // of its operands
    bool accumulates = false;
    uint32_t mbarrier = 0;             // address, of a commit
    std::optional<Clock> clock;        // of a commit
};

struct Warp {
    Warp(Block& block, int index);

    template <class T>
    auto* lanes(const Use& use) {
        using Word = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
        const uint32_t* words = use.is_constant ? constants + size_t{use.index} * kLanes : registers.data() + size_t{use.index} * kLanes;
        return reinterpret_cast<Word*>(const_cast<uint32_t*>(words));
    }
    template <class T>
    T get(const Use& use, int lane) {
        const auto word = lanes<T>(use)[lane];
        if constexpr (sizeof(T) == 8 || sizeof(T) == 4) {
            return std::bit_cast<T>(word);
        } else if constexpr (sizeof(T) == 2) {
            return std::bit_cast<T>(static_cast<uint16_t>(word));
        } else {
            return std::bit_cast<T>(static_cast<uint8_t>(word));
        }
    }
    template <class T>
    void put(const Use& use, int lane, T value) {
        auto* words = lanes<T>(use);
        if constexpr (sizeof(T) == 8 || sizeof(T) == 4) {
            words[lane] = std::bit_cast<std::remove_reference_t<decltype(words[0])>>(value);
        } else if constexpr (sizeof(T) == 2) {
            words[lane] = std::bit_cast<uint16_t>(value);
        } else {
            words[lane] = std::bit_cast<uint8_t>(value);
        }
    }
    Mask predicate(const Use& use) const {
        const Mask mask = use.is_constant ? (use.index ? kAll : 0) : predicates[use.index];
        return use.is_negated ? ~mask : mask;
    }
    void set_predicate(const Use& use, Mask value, Mask active) {
        predicates[use.index] = (predicates[use.index] & ~active) | (value & active);
    }
    uint32_t place_in_defined(const Use& use) const { return use.index + (use.is_predicate ? kernel.num_words : 0); }
    Mask undefined_lanes(const Use& use) const { return use.is_constant ? 0 : ~defined[place_in_defined(use)]; }
    Mask live() const;
    Event event(Actor actor, uint32_t time) const { return {actor, static_cast<uint8_t>(index), time}; }
    Event now() const { return event(Actor::kWarp, clock.time(Actor::kWarp, index)); }
    void tick() { clock.set(event(Actor::kWarp, now().time + 1)); }
    // Until it waits, ends, or has had its turn.
    void run(uint64_t max_instructions);

    Block& block;
    int index;
    const Kernel& kernel;
    const uint32_t* constants;
    std::vector<uint32_t> registers;
    std::vector<Mask> predicates;
    std::vector<Mask> defined;            // lanes of each word, then of each predicate, that were set
    Mask undefined = 0;                   // lanes in which the instruction's results will be; its handler may know better
    std::vector<bool> in_flight;          // words that an asynchronous product writes
    int num_in_flight = 0;
    std::vector<Path> paths;
    bool is_waiting = false, is_done = false, yields = false;
    bool is_stalled = false;              // its turn ended at an mbarrier
    uint64_t num_instructions = 0;
    Clock clock;
    std::vector<Copy> copies;                                   // since the last commit
    std::deque<std::vector<Copy>> copy_groups;
    std::vector<Product> products;                              // since the last commit
    std::deque<std::vector<Product>> product_groups;
    uint32_t num_wgmma_fences = 0;
    std::deque<TensorCoreWork> tensor_core;                     // in its order
    std::optional<Clock> tensor_core_clock;                     // of what has been issued
    uint32_t num_tensor_core = 0, num_tensor_loads = 0, num_tensor_stores = 0;

  private:
    void step();
    void require_defined(const Instruction& instruction, Mask active);
    void require_landed(const Instruction& instruction) const;
};

struct Launch {
    const Kernel& kernel;
    std::array<uint32_t, 3> grid;
    int num_threads;
    int shared_bytes;
    std::vector<uint8_t> parameters;
    GlobalMemory& memory;
    Options options;
    mutable uint64_t num_instructions = 0;

    void run();
};

// "file.py:12: add.s32 ..." of an instruction.
std::string place_of(const Kernel& kernel, const Instruction& instruction);

}  // namespace software_gpu
