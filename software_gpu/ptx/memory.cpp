// PTX ISA, "Data Movement": ld, st, atom, red, cp.async. Global memory is the process's own.
#include <algorithm>

#include "decode.h"
#include "numbers.h"

namespace software_gpu {

void GlobalMemory::set_ranges(std::vector<Range> ranges) {
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    ranges_.clear();
    for (const Range& range : ranges) {
        if (range.begin == range.end) continue;
        if (!ranges_.empty() && range.begin <= ranges_.back().end) ranges_.back().end = std::max(ranges_.back().end, range.end);
        else ranges_.push_back(range);
    }
    last_ = 0;
}

void GlobalMemory::check(uint64_t address, int bytes) const {
    char text[128];
    if (address % static_cast<uint64_t>(bytes)) {
        std::snprintf(text, sizeof text, "misaligned address 0x%llx of %d bytes", static_cast<unsigned long long>(address), bytes);
        throw Fault(text);
    }
    if (ranges_.empty()) return;
    const auto holds = [&](const Range& range) { return range.begin <= address && address + bytes <= range.end; };
    if (holds(ranges_[last_])) return;
    const auto after = std::upper_bound(ranges_.begin(), ranges_.end(), address, [](uint64_t at, const Range& range) { return at < range.begin; });
    if (after != ranges_.begin() && holds(*(after - 1))) {
        last_ = static_cast<size_t>(after - 1 - ranges_.begin());
        return;
    }
    std::snprintf(text, sizeof text, "%d bytes at 0x%llx are outside of every allocation", bytes, static_cast<unsigned long long>(address));
    throw Fault(text);
}

namespace {

Type last_type(const Decoder& decoder) { return type_of(decoder.statement().opcode.back()); }

bool is_shared(const Decoder& decoder) {
    const auto& opcode = decoder.statement().opcode;
    return std::any_of(opcode.begin(), opcode.end(), [](const std::string& word) { return word.rfind("shared", 0) == 0; });
}

uint64_t address_of(Warp& warp, const Instruction& instruction, const Use& base, int lane) {
    const uint64_t start = base.num_words == 2 ? warp.lanes<uint64_t>(base)[lane] : warp.lanes<uint32_t>(base)[lane];
    return start + static_cast<uint64_t>(instruction.offset);
}

uint64_t extended(uint64_t bits, const Instruction& instruction) {  // n: bytes, is_shared, is signed
    if (!instruction.n[2]) return bits;
    const int unused = 64 - 8 * static_cast<int>(instruction.n[0]);
    return static_cast<uint64_t>(static_cast<int64_t>(bits << unused) >> unused);
}

void put_raw(Warp& warp, const Use& use, int lane, uint64_t value) {
    if (use.num_words == 2) warp.lanes<uint64_t>(use)[lane] = value;
    else warp.lanes<uint32_t>(use)[lane] = static_cast<uint32_t>(value);
}

uint64_t raw(Warp& warp, const Use& use, int lane) {
    return use.num_words == 2 ? warp.lanes<uint64_t>(use)[lane] : warp.lanes<uint32_t>(use)[lane];
}

// from: the address. n: bytes of a number, is it of shared memory, is it signed.
template <bool kIsShared>
void load(Warp& warp, const Instruction& instruction, Mask active) {
    const int bytes = static_cast<int>(instruction.n[0]);
    const int total = bytes * static_cast<int>(instruction.to.size());
    for (int lane = 0; lane < kLanes; ++lane) {
        if (!(active >> lane & 1)) continue;
        uint8_t content[64];
        const uint64_t address = address_of(warp, instruction, instruction.from[0], lane);
        if constexpr (kIsShared) {
            if (!warp.block.read_shared(warp, address, content, total)) warp.undefined |= Mask{1} << lane;
        } else {
            warp.block.launch.memory.check(address, total);
            std::memcpy(content, reinterpret_cast<const void*>(address), total);
        }
        for (size_t i = 0; i < instruction.to.size(); ++i) {
            uint64_t value = 0;
            std::memcpy(&value, content + i * bytes, bytes);
            put_raw(warp, instruction.to[i], lane, extended(value, instruction));
        }
    }
}

// from: the address, then the values.
template <bool kIsShared>
void store(Warp& warp, const Instruction& instruction, Mask active) {
    const int bytes = static_cast<int>(instruction.n[0]);
    const int total = bytes * static_cast<int>(instruction.from.size() - 1);
    for (int lane = 0; lane < kLanes; ++lane) {
        if (!(active >> lane & 1)) continue;
        uint8_t content[64];
        for (size_t i = 1; i < instruction.from.size(); ++i) {
            const uint64_t value = raw(warp, instruction.from[i], lane);
            std::memcpy(content + (i - 1) * bytes, &value, bytes);
        }
        const uint64_t address = address_of(warp, instruction, instruction.from[0], lane);
        if constexpr (kIsShared) {
            warp.block.write_shared(warp, address, content, total, warp.undefined >> lane & 1);
        } else {
            warp.block.launch.memory.check(address, total);
            std::memcpy(reinterpret_cast<void*>(address), content, total);
        }
    }
}

void load_parameter(Warp& warp, const Instruction& instruction, Mask active) {
    uint64_t value = 0;
    std::memcpy(&value, warp.block.launch.parameters.data() + instruction.offset, instruction.n[0]);
    for (int lane = 0; lane < kLanes; ++lane)
        if (active >> lane & 1) put_raw(warp, instruction.to[0], lane, extended(value, instruction));
}

void decode_ld(Decoder& decoder) {
    const Type type = last_type(decoder);
    Instruction& instruction = decoder.instruction();
    const int bytes = type.bits / 8;
    decoder.allow_wider_registers();
    decoder.to_all(0, type.bits);
    instruction.n = {bytes, is_shared(decoder), type.kind == 's'};
    if (decoder.has("param")) {
        const Operand& address = decoder.operand(1);
        if (instruction.to.size() != 1) decoder.refuse();
        for (const Parameter& parameter : decoder.entry().parameters) {
            if (parameter.name != address.parts[0].text) continue;
            instruction.offset = parameter.offset + static_cast<int64_t>(address.number);
            instruction.run = load_parameter;
            return;
        }
        decoder.refuse("no such parameter");
    }
    if (!is_shared(decoder) && !decoder.has("global")) decoder.refuse("a state space that is not implemented");
    decoder.from_address(1, is_shared(decoder) ? 32 : 64);
    instruction.needs = Needs::kFirst;
    instruction.run = is_shared(decoder) ? load<true> : load<false>;
}

void decode_st(Decoder& decoder) {
    const Type type = last_type(decoder);
    Instruction& instruction = decoder.instruction();
    if (!is_shared(decoder) && !decoder.has("global")) decoder.refuse("a state space that is not implemented");
    decoder.from_address(0, is_shared(decoder) ? 32 : 64);
    decoder.allow_wider_registers();
    decoder.from_all(1, type.bits);
    instruction.needs = is_shared(decoder) ? Needs::kFirst : Needs::kAll;
    instruction.n = {type.bits / 8, is_shared(decoder), 0};
    instruction.run = is_shared(decoder) ? store<true> : store<false>;
}

// ---- atomics

enum AtomicKind { kAtomicAdd, kAtomicMin, kAtomicMax, kAtomicAnd, kAtomicOr, kAtomicXor, kAtomicExchange, kAtomicCompare, kAtomicIncrement };

uint64_t combined(int64_t kind, Type type, uint64_t old, uint64_t value, uint64_t other) {
    const int unused = 64 - type.bits;
    const auto as_signed = [&](uint64_t bits) { return static_cast<int64_t>(bits << unused) >> unused; };
    if (type.kind == 'f' && type.bits == 32) {
        const float a = std::bit_cast<float>(static_cast<uint32_t>(old)), b = std::bit_cast<float>(static_cast<uint32_t>(value));
        if (kind == kAtomicAdd) return std::bit_cast<uint32_t>(a + b);
        throw Fault("no such atomic of floats");
    }
    if (type.num_packed == 2 && kind == kAtomicAdd) {
        uint64_t result = 0;
        for (int shift = 0; shift < 32; shift += 16) {
            const auto a = static_cast<uint16_t>(old >> shift), b = static_cast<uint16_t>(value >> shift);
            const uint16_t sum = type.kind == 'g' ? to_bfloat16(Bfloat16{a}.value() + Bfloat16{b}.value()).bits : to_half(double{Half{a}.value()} + Half{b}.value()).bits;
            result |= uint64_t{sum} << shift;
        }
        return result;
    }
    if (type.kind == 'g' || type.kind == 'f') throw Fault("no such atomic of floats");
    switch (kind) {
        case kAtomicAdd: return old + value;
        case kAtomicMin: return type.kind == 's' ? (as_signed(value) < as_signed(old) ? value : old) : std::min(old, value);
        case kAtomicMax: return type.kind == 's' ? (as_signed(value) > as_signed(old) ? value : old) : std::max(old, value);
        case kAtomicAnd: return old & value;
        case kAtomicOr: return old | value;
        case kAtomicXor: return old ^ value;
        case kAtomicExchange: return value;
        case kAtomicCompare: return old == value ? other : old;
        default: return old >= value ? 0 : old + 1;
    }
}

// Global memory is shared with other threads and processes, which stand for other GPUs.
template <class T, class F>
uint64_t update(uint64_t address, F changed) {
    T* at = reinterpret_cast<T*>(address);
    T old = __atomic_load_n(at, __ATOMIC_SEQ_CST);
    while (!__atomic_compare_exchange_n(at, &old, static_cast<T>(changed(old)), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
    return old;
}

// from: address, value [, other]. to: nothing for red. n: bytes, shared, kind of operation, type's kind, packed.
void atomic(Warp& warp, const Instruction& instruction, Mask active) {
    const int bytes = static_cast<int>(instruction.n[0]);
    const Type type{static_cast<char>(instruction.n[3]), static_cast<int>(instruction.n[5]), static_cast<int>(instruction.n[4])};
    const uint64_t mask = bytes == 8 ? ~uint64_t{0} : (uint64_t{1} << 8 * bytes) - 1;
    for (int lane = 0; lane < kLanes; ++lane) {
        if (!(active >> lane & 1)) continue;
        const uint64_t address = address_of(warp, instruction, instruction.from[0], lane);
        const uint64_t value = raw(warp, instruction.from[1], lane) & mask;
        const uint64_t other = instruction.from.size() > 2 ? raw(warp, instruction.from[2], lane) & mask : 0;
        const auto changed = [&](uint64_t old) { return combined(instruction.n[2], type, old, value, other) & mask; };
        uint64_t old = 0;
        if (instruction.n[1]) {
            warp.block.read_shared(warp, address, &old, bytes);
            const uint64_t result = changed(old);
            warp.block.write_shared(warp, address, &result, bytes);
        } else {
            warp.block.launch.memory.check(address, bytes);
            old = bytes == 8 ? update<uint64_t>(address, changed) : bytes == 4 ? update<uint32_t>(address, changed) : update<uint16_t>(address, changed);
        }
        if (!instruction.to.empty()) put_raw(warp, instruction.to[0], lane, old);
    }
}

void decode_atomic(Decoder& decoder) {
    static const std::pair<const char*, AtomicKind> kKinds[] = {
        {"add", kAtomicAdd}, {"min", kAtomicMin}, {"max", kAtomicMax}, {"and", kAtomicAnd}, {"or", kAtomicOr},
        {"xor", kAtomicXor}, {"exch", kAtomicExchange}, {"cas", kAtomicCompare}, {"inc", kAtomicIncrement}};
    const Type type = last_type(decoder);
    Instruction& instruction = decoder.instruction();
    const bool has_result = decoder.statement().opcode[0] == "atom";
    const int bits = type.bits * type.num_packed;
    if (has_result) decoder.to(0, bits);
    decoder.from_address(has_result, is_shared(decoder) ? 32 : 64);
    for (size_t i = has_result + 1; i < decoder.num_operands(); ++i) decoder.from(i, bits);
    const auto found = std::find_if(std::begin(kKinds), std::end(kKinds), [&](const auto& kind) { return decoder.has(kind.first); });
    if (found == std::end(kKinds)) decoder.refuse();
    instruction.n = {bits / 8, is_shared(decoder), found->second, type.kind, type.num_packed, type.bits};
    instruction.needs = Needs::kAll;
    instruction.run = atomic;
}

// ---- asynchronous copies

void arrive(Warp& warp, const Copy& copy) {
    for (int lane = 0; lane < kLanes; ++lane) {
        if (!(copy.lanes >> lane & 1)) continue;
        uint8_t content[16] = {};
        if (copy.num_read[lane]) {
            warp.block.launch.memory.check(copy.from[lane], copy.bytes);
            std::memcpy(content, reinterpret_cast<const void*>(copy.from[lane]), copy.num_read[lane]);
        }
        warp.block.write_shared(warp, copy.to[lane], content, copy.bytes);
    }
}

// from: address in shared memory, address in global memory [, bytes to read]. n: bytes; offsets of both addresses.
void copy_async(Warp& warp, const Instruction& instruction, Mask active) {
    Copy copy{active, {}, {}, {}, static_cast<int>(instruction.n[0])};
    for (int lane = 0; lane < kLanes; ++lane) {
        copy.to[lane] = static_cast<uint32_t>(raw(warp, instruction.from[0], lane) + instruction.n[1]);
        copy.from[lane] = raw(warp, instruction.from[1], lane) + static_cast<uint64_t>(instruction.n[2]);
        copy.num_read[lane] = instruction.from.size() > 2 ? warp.lanes<uint32_t>(instruction.from[2])[lane] : copy.bytes;
        if (active >> lane & 1 && copy.num_read[lane] > static_cast<uint32_t>(copy.bytes)) throw Fault("cp.async reads more than it copies");
    }
    if (warp.block.launch.options.is_late) warp.copies.push_back(copy);
    else arrive(warp, copy);
}
void commit_copies(Warp& warp, const Instruction&, Mask) {
    warp.copy_groups.push_back(std::move(warp.copies));
    warp.copies.clear();
}
void wait_for_copies(Warp& warp, const Instruction& instruction, Mask) {
    if (instruction.n[1]) commit_copies(warp, instruction, kAll);  // wait_all
    while (static_cast<int64_t>(warp.copy_groups.size()) > instruction.n[0]) {
        for (const Copy& copy : warp.copy_groups.front()) arrive(warp, copy);
        warp.copy_groups.pop_front();
    }
}

void decode_cp(Decoder& decoder) {
    Instruction& instruction = decoder.instruction();
    if (!decoder.has("async") || decoder.has("bulk") || decoder.has("mbarrier")) decoder.refuse();
    if (decoder.has("commit_group")) {
        instruction.run = commit_copies;
        return;
    }
    if (decoder.has("wait_group") || decoder.has("wait_all")) {
        instruction.n = {decoder.has("wait_all") ? 0 : static_cast<int64_t>(decoder.operand(0).number), decoder.has("wait_all")};
        instruction.run = wait_for_copies;
        return;
    }
    decoder.from_address(0, 32);
    const int64_t to_offset = instruction.offset;
    decoder.from_address(1, 64);
    instruction.n = {static_cast<int64_t>(decoder.operand(2).number), to_offset, instruction.offset};
    if (decoder.num_operands() > 3) decoder.from(3, 32);
    instruction.needs = Needs::kAll;
    instruction.run = copy_async;
}

}  // namespace

void add_memory(DecodeTable& table) {
    table["ld"] = decode_ld;
    table["st"] = decode_st;
    table["atom"] = table["red"] = decode_atomic;
    table["cp"] = decode_cp;
}

}  // namespace software_gpu
