// PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier". Transactions (expect_tx) are not implemented.
#include "decode.h"
#include "tensor_core.h"

namespace software_gpu {

Mbarrier& Block::mbarrier(uint32_t address) {
    const auto found = mbarriers.find(address);
    if (found == mbarriers.end()) throw Fault("no mbarrier at " + std::to_string(address) + " of shared memory");
    return found->second;
}

// "Phase Completion of the mbarrier object": the next phase expects as many.
void Block::arrive(Mbarrier& barrier, const Clock& clock, uint32_t count) const {
    if (count > barrier.num_pending) throw Fault("more arrivals at an mbarrier than it expects");
    barrier.next_clock.join(clock);
    barrier.num_pending -= count;
    if (barrier.num_pending) return;
    barrier.clock = barrier.next_clock;
    barrier.num_pending = barrier.num_expected;
    ++barrier.phase;
}

namespace {

// One of all lanes that take part, for operands that they must share.
uint32_t shared_value(Warp& warp, const Use& use, Mask active) {
    const auto* values = warp.lanes<uint32_t>(use);
    const uint32_t value = values[std::countr_zero(active)];
    for (int lane = 0; lane < kLanes; ++lane)
        if (active >> lane & 1 && values[lane] != value) throw Fault("operands that differ between lanes");
    return value;
}

uint32_t address_of(Warp& warp, const Instruction& instruction, Mask active) {
    return shared_value(warp, instruction.from[0], active) + static_cast<uint32_t>(instruction.offset);
}

Mbarrier& used(Warp& warp, const Instruction& instruction, Mask active) {
    Mbarrier& barrier = warp.block.mbarrier(address_of(warp, instruction, active));
    if (!warp.clock.has_seen(barrier.init)) throw Fault("a race: an mbarrier that warp " + std::to_string(barrier.init.warp) + " initializes without a barrier before this use");
    barrier.used[warp.index] = warp.now().time;
    return barrier;
}

// from: address, arrivals of a phase.
void initialize(Warp& warp, const Instruction& instruction, Mask active) {
    if (std::popcount(active) != 1) throw Fault("mbarrier.init by more than one lane");
    const uint32_t address = address_of(warp, instruction, active), count = shared_value(warp, instruction.from[1], active);
    if (!count) throw Fault("mbarrier.init for no arrivals");
    if (warp.block.mbarriers.contains(address)) throw Fault("mbarrier.init without mbarrier.inval of the one before");
    const uint64_t opaque = 0;
    warp.block.write_shared(warp, address, &opaque, kMbarrierBytes);
    const Clock none(warp.block.num_warps);
    warp.block.mbarriers.emplace(address, Mbarrier{count, count, 0, warp.now(), std::vector<uint32_t>(warp.block.num_warps), none, none});
}

void invalidate(Warp& warp, const Instruction& instruction, Mask active) {
    if (std::popcount(active) != 1) throw Fault("mbarrier.inval by more than one lane");
    const Mbarrier& barrier = used(warp, instruction, active);
    const uint32_t address = address_of(warp, instruction, active);
    for (int other = 0; other < warp.block.num_warps; ++other)
        if (!warp.clock.has_seen({Actor::kWarp, static_cast<uint8_t>(other), barrier.used[other]})) throw Fault("a race: mbarrier.inval of an mbarrier that warp " + std::to_string(other) + " uses without a barrier between them");
    if (has_commit(warp.block, address)) throw Fault("mbarrier.inval before the tcgen05.commit to it has arrived");
    warp.block.mbarriers.erase(address);
    const uint64_t opaque = 0;
    warp.block.write_shared(warp, address, &opaque, kMbarrierBytes, true);
}

// from: address, arrivals of a lane.
void arrive_at(Warp& warp, const Instruction& instruction, Mask active) {
    Mbarrier& barrier = used(warp, instruction, active);
    warp.block.arrive(barrier, warp.clock, shared_value(warp, instruction.from[1], active) * static_cast<uint32_t>(std::popcount(active)));
    warp.tick();
}

// to: has it ended; from: address, parity of the phase. "Even phases have parity 0".
void wait_for_phase(Warp& warp, const Instruction& instruction, Mask active) {
    Mbarrier& barrier = used(warp, instruction, active);
    const uint32_t parity = shared_value(warp, instruction.from[1], active), address = address_of(warp, instruction, active);
    if (parity > 1) throw Fault("a parity that is neither 0 nor 1");
    while ((barrier.phase & 1) == parity && end_commit(warp.block, address)) {
    }
    const bool has_ended = (barrier.phase & 1) != parity;
    if (has_ended) warp.clock.join(barrier.clock);
    else warp.yields = warp.is_stalled = true;
    warp.set_predicate(instruction.to[0], has_ended ? kAll : 0, active);
}

void decode_mbarrier(Decoder& decoder) {
    Instruction& instruction = decoder.instruction();
    const std::string& verb = decoder.statement().opcode.at(1);
    const bool is_wait = verb == "try_wait" || verb == "test_wait", is_arrival = verb == "arrive";
    for (const char* modifier : {"expect_tx", "noComplete", "shared::cluster", "relaxed"})
        if (decoder.has(modifier)) decoder.refuse();
    if (is_wait) {
        if (!decoder.has("parity")) decoder.refuse("a wait for a state");
        decoder.to(0, 1);
    }
    decoder.from_address(is_wait || is_arrival, 32);
    if (verb == "init") decoder.from(1, 32);
    if (is_wait) decoder.from(2, 32);
    if (is_arrival) {
        if (decoder.operand(0).text != "_") decoder.refuse("the state of an mbarrier");
        if (decoder.num_operands() > 2) decoder.from(2, 32);
        else instruction.from.push_back(decoder.constant(1, 1));
    }
    instruction.needs = Needs::kAll;
    instruction.run = is_wait ? wait_for_phase : is_arrival ? arrive_at : verb == "init" ? initialize : verb == "inval" ? invalidate : nullptr;
    if (!instruction.run) decoder.refuse();
}

}  // namespace

void add_mbarrier(DecodeTable& table) { table["mbarrier"] = decode_mbarrier; }

}  // namespace software_gpu
