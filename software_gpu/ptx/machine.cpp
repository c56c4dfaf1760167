#include "machine.h"

#include <algorithm>
#include <thread>

namespace software_gpu {
namespace {

constexpr uint64_t kTurn = 20'000;        // instructions of a warp before the next one
constexpr uint64_t kBlockTurn = 4'000'000;  // of a block that waits for another
constexpr int kMaxStalledTurns = 1'000;      // of all warps in a row

std::string lanes_text(Mask mask) {
    char text[16];
    std::snprintf(text, sizeof text, "%08x", mask);
    return text;
}

}  // namespace

std::string place_of(const Kernel& kernel, const Instruction& instruction) {
    const Statement& statement = *instruction.statement;
    std::string place;
    const auto file = kernel.module->files.find(statement.file);
    if (file != kernel.module->files.end()) {
        const size_t slash = file->second.find_last_of('/');
        place = file->second.substr(slash == std::string::npos ? 0 : slash + 1) + ":" + std::to_string(statement.line) + ": ";
    }
    return place + statement.text;
}

// ---- blocks

Block::Block(const Launch& of_launch, std::array<uint32_t, 3> block_index, uint64_t linear)
    : launch(of_launch), index(block_index), linear_index(linear), num_warps((of_launch.num_threads + kLanes - 1) / kLanes) {
    shared.assign(std::max(launch.shared_bytes, 16), 0xff);  // NaN in every float format
    if (launch.options.finds_races) shadow.resize(shared.size());
    warps.reserve(num_warps);
    for (int warp = 0; warp < num_warps; ++warp) warps.emplace_back(*this, warp);
}

bool Block::run() {
    uint64_t before = 0;
    int num_stalled_turns = 0;
    for (const Warp& warp : warps) before += warp.num_instructions;
    while (true) {
        bool is_done = true, has_run = false, is_stalled = true;
        uint64_t after = 0;
        for (Warp& warp : warps) {
            if (!warp.is_done && !warp.is_waiting) {
                warp.run(kTurn);
                has_run = true;
                is_stalled = is_stalled && warp.is_stalled;
            }
            is_done = is_done && warp.is_done;
            after += warp.num_instructions;
        }
        if (is_done) {
            require_ended();
            return true;
        }
        num_stalled_turns = is_stalled ? num_stalled_turns + 1 : 0;
        if (!has_run || num_stalled_turns > kMaxStalledTurns) refuse_endless_wait(has_run);
        if (after - before > kBlockTurn) return false;
    }
}

void Block::refuse_endless_wait(bool is_at_mbarrier) const {
    std::string who;
    for (const Warp& warp : warps)
        if (is_at_mbarrier ? warp.is_stalled && !warp.is_done : warp.is_waiting) who += " " + std::to_string(warp.index);
    throw Fault("block " + std::to_string(linear_index) + ": warps" + who + " wait " + (is_at_mbarrier ? "for a phase of an mbarrier that never ends" : "at a barrier that the others never reach"));
}

void Block::require_ended() const {
    if (tensor_memory && tensor_memory->has_allocations()) throw Fault(launch.kernel.entry->name + ", block " + std::to_string(linear_index) + " ends without tcgen05.dealloc of its tensor memory");
}

void Block::arrive(int which, Warp& warp, int num_threads, bool waits) {
    Barrier& barrier = barriers[which];
    if (barrier.num_arrived && barrier.num_expected != num_threads) throw Fault("a barrier with another number of threads than before");
    barrier.num_expected = num_threads;
    barrier.num_arrived += kLanes;
    if (!barrier.clock) barrier.clock.emplace(num_warps);
    barrier.clock->join(warp.clock);
    warp.tick();
    if (waits) {
        barrier.waiting.push_back(warp.index);
        warp.is_waiting = true;
    }
    if (barrier.num_arrived < num_threads) return;
    for (const int index_of_warp : barrier.waiting) {
        warps[index_of_warp].is_waiting = false;
        warps[index_of_warp].clock.join(*barrier.clock);
    }
    barrier = Barrier();
    ++epoch;
}

void Block::check_shared(uint64_t address, int bytes) const {
    char text[128];
    if (address % static_cast<uint64_t>(bytes)) {
        std::snprintf(text, sizeof text, "misaligned address %llu of %d bytes of shared memory", static_cast<unsigned long long>(address), bytes);
        throw Fault(text);
    }
    if (address + bytes <= shared.size()) return;
    std::snprintf(text, sizeof text, "%d bytes at %llu are outside of the %zu of shared memory", bytes, static_cast<unsigned long long>(address), shared.size());
    throw Fault(text);
}

namespace {

[[noreturn]] void refuse_race(const char* what, uint64_t address, int warp, uint32_t others, const char* have) {
    throw Fault(std::string("a race: ") + what + " of shared memory at " + std::to_string(address) + " by warp " + std::to_string(warp) + ", which warp " +
                std::to_string(std::countr_zero(others)) + have + " since the last barrier");
}

}  // namespace

void Block::require_no_mbarrier(uint64_t address, int bytes) const {
    const auto after = mbarriers.lower_bound(static_cast<uint32_t>(address + bytes));
    if (after != mbarriers.begin() && std::prev(after)->first + kMbarrierBytes > address) throw Fault("shared memory at " + std::to_string(address) + " holds an mbarrier");
}

void Block::note_read(const Warp& warp, uint64_t address, int bytes) {
    require_no_mbarrier(address, bytes);
    const uint32_t me = 1u << warp.index;
    for (int i = 0; i < bytes; ++i) {
        ShadowByte& byte = shadow[address + i];
        if (byte.writer < 0) throw Fault("shared memory that nobody has written, at " + std::to_string(address + i));
        byte.begin(epoch);
        if (byte.writers && !(byte.writers & me)) refuse_race("a read", address + i, warp.index, byte.writers, " has written");
        byte.readers |= me;
    }
}

// Several warps may write the same: compilers let all of them write what all of them have.
void Block::note_write(const Warp& warp, uint64_t address, const void* content, int bytes, bool is_undefined) {
    require_no_mbarrier(address, bytes);
    const uint32_t me = 1u << warp.index;
    for (int i = 0; i < bytes; ++i) {
        ShadowByte& byte = shadow[address + i];
        byte.begin(epoch);
        if (byte.readers & ~me) refuse_race("a write", address + i, warp.index, byte.readers & ~me, " has read");
        const bool is_same = shared[address + i] == static_cast<const uint8_t*>(content)[i];
        if (byte.writers & ~me && !is_same) refuse_race("a write", address + i, warp.index, byte.writers & ~me, " has written");
        if (!warp.clock.has_seen(byte.tensor_core))
            throw Fault("a race: a write of shared memory at " + std::to_string(address + i) + " by warp " + std::to_string(warp.index) + ", which tcgen05 of warp " + std::to_string(byte.tensor_core.warp) + " reads: no wait for its tcgen05.commit between them");
        byte.writers |= me;
        byte.writer = static_cast<int16_t>(warp.index);
        byte.is_undefined = is_undefined;
        byte.time = warp.now().time;
    }
}

bool Block::is_defined(uint64_t address, int bytes) const {
    return std::none_of(shadow.begin() + static_cast<ptrdiff_t>(address), shadow.begin() + static_cast<ptrdiff_t>(address) + bytes, [](const ShadowByte& byte) { return byte.is_undefined; });
}

bool Block::read_shared(const Warp& warp, uint64_t address, void* out, int bytes) {
    check_shared(address, bytes);
    std::memcpy(out, shared.data() + address, bytes);
    if (shadow.empty()) return true;
    note_read(warp, address, bytes);
    return is_defined(address, bytes);
}

void Block::write_shared(const Warp& warp, uint64_t address, const void* content, int bytes, bool is_undefined) {
    check_shared(address, bytes);
    if (!shadow.empty()) note_write(warp, address, content, bytes, is_undefined);
    std::memcpy(shared.data() + address, content, bytes);
}

// PTX ISA, "Async Proxy": a fence somewhere between the write and this access.
void Block::require_fenced(const Clock& clock, uint64_t address) const {
    const ShadowByte& byte = shadow[address];
    if (byte.writer < 0) throw Fault("shared memory that nobody has written, at " + std::to_string(address));
    if (!clock.has_seen({Actor::kWarp, static_cast<uint8_t>(byte.writer), byte.time}))
        throw Fault("a race: the tensor core reads shared memory at " + std::to_string(address) + ", which warp " + std::to_string(byte.writer) + " has written, without a barrier between them");
    if (clock.fenced(byte.writer) < byte.time)
        throw Fault("the tensor core reads shared memory at " + std::to_string(address) + " without a fence.proxy.async after warp " + std::to_string(byte.writer) + " has written it");
}

bool Block::read_shared_by_tensor_core(const Warp& warp, uint64_t address, void* out, int bytes) {
    check_shared(address, bytes);
    if (!shadow.empty()) require_fenced(warp.clock, address);
    return read_shared(warp, address, out, bytes);
}

void Block::note_tensor_core(const Clock& clock, const Event& event, uint64_t address) {
    check_shared(address, 16);
    for (uint64_t at = address; !shadow.empty() && at < address + 16; ++at) {
        require_fenced(clock, at);
        shadow[at].tensor_core = event;
    }
}

bool Block::read_shared_late(uint64_t address, void* out, int bytes) const {
    std::memcpy(out, shared.data() + address, bytes);
    return shadow.empty() || is_defined(address, bytes);
}

// ---- warps

Warp::Warp(Block& of_block, int warp_index)
    : block(of_block), index(warp_index), kernel(of_block.launch.kernel), constants(kernel.constants.data()), clock(of_block.num_warps) {
    tick();
    registers.resize(size_t{kernel.num_words} * kLanes);
    predicates.resize(kernel.num_predicates);
    defined.resize(kernel.num_words + kernel.num_predicates);
    in_flight.resize(kernel.num_words);
    for (const Use& use : kernel.undefined) {
        for (int i = 0; i < use.num_words; ++i) defined[use.index + i] = kAll;
        std::fill_n(registers.begin() + size_t{use.index} * kLanes, size_t{use.num_words} * kLanes, 0xffffffffu);
    }
    const Launch& launch = block.launch;
    const int num_lanes = std::min(kLanes, launch.num_threads - warp_index * kLanes);
    paths = {{0, num_lanes == kLanes ? kAll : (Mask{1} << num_lanes) - 1}};
    const auto dimensions = [&](const std::string& name, uint32_t x, uint32_t y, uint32_t z) { return name.back() == 'x' ? x : name.back() == 'y' ? y : z; };
    for (const auto& [name, use] : kernel.specials) {
        for (int i = 0; i < use.num_words; ++i) defined[use.index + i] = kAll;
        for (int lane = 0; lane < kLanes; ++lane) {
            const auto thread = static_cast<uint32_t>(warp_index * kLanes + lane);
            uint32_t value = 0;
            if (name.rfind("%tid", 0) == 0) value = dimensions(name, thread, 0, 0);
            else if (name.rfind("%ntid", 0) == 0) value = dimensions(name, static_cast<uint32_t>(launch.num_threads), 1, 1);
            else if (name.rfind("%ctaid", 0) == 0) value = dimensions(name, block.index[0], block.index[1], block.index[2]);
            else if (name.rfind("%nctaid", 0) == 0) value = dimensions(name, launch.grid[0], launch.grid[1], launch.grid[2]);
            else if (name == "%laneid") value = static_cast<uint32_t>(lane);
            else if (name == "%warpid") value = static_cast<uint32_t>(warp_index);
            else if (name == "%cluster_nctarank") value = 1;
            if (use.num_words == 2) lanes<uint64_t>(use)[lane] = value;
            else lanes<uint32_t>(use)[lane] = value;
        }
    }
}

Mask Warp::live() const {
    Mask mask = 0;
    for (const Path& path : paths) mask |= path.lanes;
    return mask;
}

void Warp::run(uint64_t max_instructions) {
    const uint64_t end = num_instructions + max_instructions;
    yields = is_stalled = false;
    while (!paths.empty() && !is_waiting && !yields && num_instructions < end) step();
    if (!paths.empty()) return;
    if (!copies.empty() || !copy_groups.empty()) {
        // Copies that nobody waits for may arrive after the block's end: nobody may need them.
        copies.clear();
        copy_groups.clear();
    }
    is_done = true;
}

void Warp::step() {
    size_t at = 0;
    for (size_t i = 1; i < paths.size(); ++i)
        if (paths[i].pc < paths[at].pc) at = i;
    const uint32_t pc = paths[at].pc;
    if (pc >= kernel.instructions.size()) {
        paths.erase(paths.begin() + static_cast<ptrdiff_t>(at));
        return;
    }
    const Instruction& instruction = kernel.instructions[pc];
    const Mask here = paths[at].lanes;
    ++num_instructions;
    Mask active = here;
    try {
        if (instruction.has_guard) {
            if (undefined_lanes(instruction.guard) & here) throw Fault("a predicate that was never set");
            active &= predicate(instruction.guard);
        }
        paths[at].pc = pc + 1;
        if (instruction.is_branch) {
            if (active == here) {
                paths[at].pc = instruction.target;
            } else if (active) {
                paths[at].lanes = here & ~active;
                paths.push_back({instruction.target, active});
            }
        } else if (active) {
            require_defined(instruction, active);
            instruction.run(*this, instruction, active);
            const Mask set = active & ~undefined;
            if (!instruction.sets_defined)
                for (const uint32_t place : instruction.written) defined[place] = (defined[place] & ~active) | set;
        }
    } catch (const Fault& fault) {
        const std::string what = fault.what();
        if (what.find("\n  at ") != std::string::npos) throw;
        throw Fault(what + "\n  at " + place_of(kernel, instruction) + "\n  in " + kernel.entry->name + ", block " + std::to_string(block.linear_index) + ", warp " +
                    std::to_string(index) + ", lanes " + lanes_text(active));
    }
    if (paths.size() == 1) return;
    for (size_t i = 0; i < paths.size(); ++i)
        for (size_t j = paths.size() - 1; j > i; --j)
            if (paths[j].pc == paths[i].pc) {
                paths[i].lanes |= paths[j].lanes;
                paths.erase(paths.begin() + static_cast<ptrdiff_t>(j));
            }
}

void Warp::require_defined(const Instruction& instruction, Mask active) {
    Mask is_missing = 0, is_unset = 0;
    for (const uint32_t place : instruction.needed) is_missing |= ~defined[place];
    if (is_missing & active) throw Fault("a register that was never set, of lanes " + lanes_text(is_missing & active));
    for (const uint32_t place : instruction.read) is_unset |= ~defined[place];
    is_unset &= active;
    undefined = is_unset && instruction.mixes_lanes ? kAll : is_unset;
    if (num_in_flight && !instruction.may_use_in_flight) require_landed(instruction);
}

void Warp::require_landed(const Instruction& instruction) const {
    for (const std::vector<Use>* uses : {&instruction.from, &instruction.to})
        for (const Use& use : *uses)
            if (!use.is_constant && !use.is_predicate && in_flight[use.index]) throw Fault("a register that an asynchronous product still writes");
}

// ---- launches

void Launch::run() {
    const uint64_t num_blocks = uint64_t{grid[0]} * grid[1] * grid[2];
    std::deque<std::unique_ptr<Block>> unfinished;
    uint64_t next = 0;
    const auto count = [&](const Block& block) {
        uint64_t total = 0;
        for (const Warp& warp : block.warps) total += warp.num_instructions;
        return total;
    };
    while (next < num_blocks || !unfinished.empty()) {
        std::unique_ptr<Block> block;
        if (next < num_blocks) {
            const auto x = static_cast<uint32_t>(next % grid[0]), y = static_cast<uint32_t>(next / grid[0] % grid[1]), z = static_cast<uint32_t>(next / grid[0] / grid[1]);
            block = std::make_unique<Block>(*this, std::array<uint32_t, 3>{x, y, z}, next);
            ++next;
        } else {
            block = std::move(unfinished.front());
            unfinished.pop_front();
        }
        const uint64_t before = count(*block);
        const bool is_done = block->run();
        num_instructions += count(*block) - before;
        if (num_instructions > options.max_instructions) throw Fault(kernel.entry->name + " has run " + std::to_string(num_instructions) + " instructions and does not end");
        if (!is_done) {
            unfinished.push_back(std::move(block));
            std::this_thread::yield();
        }
    }
}

}  // namespace software_gpu
