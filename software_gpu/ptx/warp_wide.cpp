// What lanes and warps do together: PTX ISA, "Control Flow", "Parallel Synchronization and Communication".
#include <algorithm>

#include "decode.h"

namespace software_gpu {
namespace {

void require_whole(const Warp& warp, Mask active, const char* what) {
    if (active != warp.live()) throw Fault(std::string(what) + " reached by a part of a warp");
}

// ---- control flow. The warp takes branches itself; see Warp::run.

void nothing(Warp&, const Instruction&, Mask) {}
void trap(Warp&, const Instruction&, Mask) { throw Fault("trap"); }

void decode_branch(Decoder& decoder) {
    Instruction& instruction = decoder.instruction();
    instruction.is_branch = true;
    instruction.run = nothing;
    const auto& entry = decoder.entry();
    if (decoder.statement().opcode[0] != "bra") {
        instruction.target = static_cast<uint32_t>(entry.statements.size());
        return;
    }
    const auto found = entry.labels.find(decoder.operand(0).text);
    if (found == entry.labels.end()) decoder.refuse("no such label");
    instruction.target = static_cast<uint32_t>(found->second);
}

// ---- shuffles and votes

enum ShuffleKind { kButterfly, kUp, kDown, kIndex };

// to: value [, is it of another lane]; from: value, lane or distance, clamp and segments, members. n[0]: ShuffleKind.
void shuffle(Warp& warp, const Instruction& instruction, Mask active) {
    const auto* value = warp.lanes<uint32_t>(instruction.from[0]);
    const auto* distance = warp.lanes<uint32_t>(instruction.from[1]);
    const auto* clamps = warp.lanes<uint32_t>(instruction.from[2]);
    const Mask members = warp.lanes<uint32_t>(instruction.from[3])[0];
    if ((members & warp.live()) != active) throw Fault("shfl.sync names lanes that do not take part");
    const Mask unset = warp.undefined_lanes(instruction.from[0]);
    warp.undefined = 0;
    uint32_t results[kLanes];
    Mask is_within = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
        const int segments = clamps[lane] >> 8 & 31, clamp = clamps[lane] & 31, by = static_cast<int>(distance[lane] & 31);
        const int last = (lane & segments) | (clamp & ~segments);
        int source = 0;
        bool is_in = false;
        switch (instruction.n[0]) {
            case kButterfly: source = lane ^ by; is_in = source <= last; break;
            case kUp: source = lane - by; is_in = source >= last; break;
            case kDown: source = lane + by; is_in = source <= last; break;
            default: source = (lane & segments) | (by & ~segments); is_in = source <= last;
        }
        if (!is_in) source = lane;
        if (active >> lane & 1 && !(active >> source & 1)) throw Fault("shfl.sync reads a lane that does not take part");
        results[lane] = value[source];
        warp.undefined |= (unset >> source & 1) << lane;
        is_within |= Mask{is_in} << lane;
    }
    for (int lane = 0; lane < kLanes; ++lane)
        if (active >> lane & 1) warp.put<uint32_t>(instruction.to[0], lane, results[lane]);
    if (instruction.to.size() > 1) warp.set_predicate(instruction.to[1], is_within, active);
}
void decode_shfl(Decoder& decoder) {
    Instruction& instruction = decoder.instruction();
    const Operand& result = decoder.operand(0);
    if (result.kind == Operand::Kind::kPair) {
        instruction.to = {decoder.use(result.parts[0], 32), decoder.use(result.parts[1], 1)};
    } else {
        decoder.to(0, 32);
    }
    for (size_t i = 1; i <= 4; ++i) decoder.from(i, 32);
    instruction.n[0] = decoder.has("bfly") ? kButterfly : decoder.has("up") ? kUp : decoder.has("down") ? kDown : kIndex;
    instruction.needs = Needs::kAllButFirst;
    instruction.run = shuffle;
}

enum VoteKind { kAllVote, kAnyVote, kUniform, kBallot };

void vote(Warp& warp, const Instruction& instruction, Mask active) {
    const Mask yes = warp.predicate(instruction.from[0]) & active;
    switch (instruction.n[0]) {
        case kBallot:
            for (int lane = 0; lane < kLanes; ++lane)
                if (active >> lane & 1) warp.put<uint32_t>(instruction.to[0], lane, yes);
            break;
        case kAllVote: warp.set_predicate(instruction.to[0], yes == active ? kAll : 0, active); break;
        case kAnyVote: warp.set_predicate(instruction.to[0], yes ? kAll : 0, active); break;
        default: warp.set_predicate(instruction.to[0], yes == active || yes == 0 ? kAll : 0, active);
    }
}
void decode_vote(Decoder& decoder) {
    Instruction& instruction = decoder.instruction();
    instruction.n[0] = decoder.has("ballot") ? kBallot : decoder.has("all") ? kAllVote : decoder.has("any") ? kAnyVote : kUniform;
    decoder.to(0, instruction.n[0] == kBallot ? 32 : 1);
    decoder.from(1, 1);
    instruction.mixes_lanes = true;
    instruction.run = vote;
}

void active_mask(Warp& warp, const Instruction& instruction, Mask active) {
    for (int lane = 0; lane < kLanes; ++lane)
        if (active >> lane & 1) warp.put<uint32_t>(instruction.to[0], lane, active);
}

// to: the leader's lane, is it this one.
void elect(Warp& warp, const Instruction& instruction, Mask active) {
    const int leader = std::countr_zero(active);
    if (instruction.to.size() > 1)
        for (int lane = 0; lane < kLanes; ++lane)
            if (active >> lane & 1) warp.put<uint32_t>(instruction.to[1], lane, static_cast<uint32_t>(leader));
    warp.set_predicate(instruction.to[0], Mask{1} << leader, active);
}
void decode_elect(Decoder& decoder) {
    const Operand& result = decoder.operand(0);
    if (result.kind != Operand::Kind::kPair) decoder.refuse();
    decoder.instruction().to = {decoder.use(result.parts[1], 1)};
    if (result.parts[0].text != "_") decoder.instruction().to.push_back(decoder.use(result.parts[0], 32));
    decoder.instruction().run = elect;
}

enum ReduceKind { kReduceAdd, kReduceMin, kReduceMax, kReduceAnd, kReduceOr, kReduceXor };

// n: ReduceKind, is signed, is of floats.
void reduce(Warp& warp, const Instruction& instruction, Mask active) {
    const auto* values = warp.lanes<uint32_t>(instruction.from[0]);
    uint32_t total = 0;
    bool is_first = true;
    for (int lane = 0; lane < kLanes; ++lane) {
        if (!(active >> lane & 1)) continue;
        const uint32_t value = values[lane];
        if (is_first) total = value;
        const auto less = [&](uint32_t a, uint32_t b) {
            if (instruction.n[2]) return std::bit_cast<float>(a) < std::bit_cast<float>(b);
            return instruction.n[1] ? static_cast<int32_t>(a) < static_cast<int32_t>(b) : a < b;
        };
        if (!is_first) {
            switch (instruction.n[0]) {
                case kReduceAdd: total += value; break;
                case kReduceMin: total = less(value, total) ? value : total; break;
                case kReduceMax: total = less(total, value) ? value : total; break;
                case kReduceAnd: total &= value; break;
                case kReduceOr: total |= value; break;
                default: total ^= value;
            }
        }
        is_first = false;
    }
    for (int lane = 0; lane < kLanes; ++lane)
        if (active >> lane & 1) warp.put<uint32_t>(instruction.to[0], lane, total);
}
void decode_redux(Decoder& decoder) {
    static const char* const kNames[] = {"add", "min", "max", "and", "or", "xor"};
    const Type type = type_of(decoder.statement().opcode.back());
    const auto found = std::find_if(std::begin(kNames), std::end(kNames), [&](const char* name) { return decoder.has(name); });
    if (found == std::end(kNames) || decoder.has("abs") || decoder.has("NaN")) decoder.refuse();
    decoder.to(0, 32);
    decoder.from(1, 32);
    decoder.instruction().n = {found - std::begin(kNames), type.kind == 's', type.kind == 'f'};
    decoder.instruction().mixes_lanes = true;
    decoder.instruction().run = reduce;
}

// ---- barriers

// n: barrier, threads (0: all of the block), waits.
void barrier(Warp& warp, const Instruction& instruction, Mask active) {
    require_whole(warp, active, "a barrier");
    const int num_threads = instruction.n[1] ? static_cast<int>(instruction.n[1]) : warp.block.launch.num_threads;
    warp.block.arrive(static_cast<int>(instruction.n[0]), warp, num_threads, instruction.n[2] != 0);
}
void warp_barrier(Warp& warp, const Instruction& instruction, Mask active) {
    const Mask members = warp.lanes<uint32_t>(instruction.from[0])[0];
    if ((members & warp.live()) != active) throw Fault("bar.warp.sync reached by a part of its lanes");
}
void decode_bar(Decoder& decoder) {
    Instruction& instruction = decoder.instruction();
    if (decoder.has("warp")) {
        decoder.from(0, 32);
        instruction.needs = Needs::kAll;
        instruction.run = warp_barrier;
        return;
    }
    if (decoder.has("cluster") || decoder.has("red")) decoder.refuse();
    const auto number = [&](size_t i) {
        if (decoder.operand(i).kind != Operand::Kind::kNumber) decoder.refuse("a barrier in a register");
        return static_cast<int64_t>(decoder.operand(i).number);
    };
    instruction.n = {number(0), decoder.num_operands() > 1 ? number(1) : 0, !decoder.has("arrive")};
    if (instruction.n[0] > 15) decoder.refuse("a barrier beyond the 16");
    instruction.run = barrier;
}

// Memory is the same for all at once: a fence orders nothing more, but for the asynchronous proxy's.
void proxy_fence(Warp& warp, const Instruction&, Mask) {
    warp.clock.fence();
    warp.tick();
}
void decode_fence(Decoder& decoder) { decoder.instruction().run = decoder.has("proxy") ? proxy_fence : nothing; }

void decode_nothing(Decoder& decoder) { decoder.instruction().run = nothing; }
void yield(Warp& warp, const Instruction&, Mask) { warp.yields = true; }

}  // namespace

void add_warp_wide(DecodeTable& table) {
    table["bra"] = table["ret"] = table["exit"] = decode_branch;
    table["trap"] = [](Decoder& decoder) { decoder.instruction().run = trap; };
    table["shfl"] = decode_shfl;
    table["vote"] = decode_vote;
    table["activemask"] = [](Decoder& decoder) {
        decoder.to(0, 32);
        decoder.instruction().run = active_mask;
    };
    table["elect"] = decode_elect;
    table["redux"] = decode_redux;
    table["bar"] = table["barrier"] = decode_bar;
    table["fence"] = table["membar"] = decode_fence;
    table["nanosleep"] = [](Decoder& decoder) { decoder.instruction().run = yield; };
    for (const char* hint : {"prefetch", "prefetchu", "discard", "griddepcontrol", "setmaxnreg"}) table[hint] = decode_nothing;
    table["createpolicy"] = [](Decoder& decoder) {
        decoder.to(0, 64);
        decoder.instruction().from.push_back(decoder.constant(0, 2));
        decoder.instruction().run = [](Warp& warp, const Instruction& instruction, Mask active) {
            for (int lane = 0; lane < kLanes; ++lane)
                if (active >> lane & 1) warp.lanes<uint64_t>(instruction.to[0])[lane] = 0;
        };
    };
}

}  // namespace software_gpu
