// PTX ISA, "TensorCore 5th Generation Family Instructions": tcgen05.alloc, .dealloc, .relinquish_alloc_permit, .ld, .st, .wait
// and .fence, of one block (.cta_group::1).
//
// Values of tcgen05.ld may be used at once: "Register dependencies, same thread". tcgen05.fence is not demanded: it binds
// the compiler of PTX, and Triton emits none.
#include "decode.h"
#include "tensor_core.h"

namespace software_gpu {
namespace {

uint32_t whole_warp_value(Warp& warp, const Use& use, Mask active, const char* what) {
    const auto* values = warp.lanes<uint32_t>(use);
    if (active != kAll) throw Fault(std::string(what) + " by a part of a warp");
    if (std::any_of(values, values + kLanes, [&](uint32_t value) { return value != values[0]; })) throw Fault(std::string(what) + " with operands that differ between lanes");
    return values[0];
}

TensorMemory& memory_of(Warp& warp) {
    if (!warp.block.tensor_memory) throw Fault("tensor memory before tcgen05.alloc");
    return *warp.block.tensor_memory;
}

// ---- allocation. from: where the address is written to, or the address itself; columns.

void allocate(Warp& warp, const Instruction& instruction, Mask active) {
    Block& block = warp.block;
    if (!block.may_allocate) throw Fault("tcgen05.alloc after tcgen05.relinquish_alloc_permit");
    if (!block.tensor_memory) block.tensor_memory = std::make_unique<TensorMemory>(block.num_warps);
    const uint32_t to = whole_warp_value(warp, instruction.from[0], active, "tcgen05.alloc") + static_cast<uint32_t>(instruction.offset);
    const auto column = block.tensor_memory->allocate(whole_warp_value(warp, instruction.from[1], active, "tcgen05.alloc"));
    if (!column) throw Fault("tcgen05.alloc waits for columns of its own block");
    block.write_shared(warp, to, &*column, 4);
}

void deallocate(Warp& warp, const Instruction& instruction, Mask active) {
    memory_of(warp).deallocate(whole_warp_value(warp, instruction.from[0], active, "tcgen05.dealloc"), whole_warp_value(warp, instruction.from[1], active, "tcgen05.dealloc"), warp.clock);
}

// ---- between registers and tensor memory. n: columns from the first half of the lanes to the second (0: of 32 lanes).

struct Cell {
    uint32_t lane, column;
};

// PTX ISA, "Matrix fragments for shape .32x32b" and "... .16x32bx2".
Cell cell_of(uint32_t address, int64_t half, size_t i, int lane) {
    const uint32_t first = address >> 16, column = (address & 0xffff) + static_cast<uint32_t>(i);
    if (!half) return {first + lane, column};
    return {first + lane % 16, column + static_cast<uint32_t>(lane / 16 * half)};
}

// "Access restrictions": a warp has the lanes of its place in a warpgroup.
uint32_t base_of(Warp& warp, const Instruction& instruction, Mask active, const char* what) {
    const uint32_t address = whole_warp_value(warp, instruction.from[0], active, what) + static_cast<uint32_t>(instruction.offset);
    const uint32_t lane = address >> 16, first = static_cast<uint32_t>(warp.index % 4 * 32);
    if (lane != first && (!instruction.n[0] || lane != first + 16)) throw Fault(std::string(what) + " at lane " + std::to_string(lane) + " by warp " + std::to_string(warp.index) + ", which has lanes from " + std::to_string(first) + " on");
    return address;
}

void note(Warp& warp, const Instruction& instruction, TensorMemory::Access access, const Event& event, uint32_t address, size_t num_registers) {
    for (size_t i = 0; i < num_registers; ++i)
        for (const int lane : {0, 16}) {
            const Cell cell = cell_of(address, instruction.n[0], i, lane);
            memory_of(warp).note(access, warp.clock, event, cell.lane, cell.column);
        }
}

// to: registers; from: address.
void load(Warp& warp, const Instruction& instruction, Mask active) {
    TensorMemory& memory = memory_of(warp);
    const uint32_t address = base_of(warp, instruction, active, "tcgen05.ld");
    note(warp, instruction, TensorMemory::Access::kLoad, warp.event(Actor::kTensorLoad, ++warp.num_tensor_loads), address, instruction.to.size());
    for (size_t i = 0; i < instruction.to.size(); ++i) {
        auto* values = warp.lanes<uint32_t>(instruction.to[i]);
        Mask undefined = 0;
        for (int lane = 0; lane < kLanes; ++lane) {
            const Cell cell = cell_of(address, instruction.n[0], i, lane);
            values[lane] = memory.read(cell.lane, cell.column);
            undefined |= Mask{memory.is_undefined(cell.lane, cell.column)} << lane;
        }
        warp.defined[warp.place_in_defined(instruction.to[i])] = ~undefined;
    }
}

// from: address, registers.
void store(Warp& warp, const Instruction& instruction, Mask active) {
    TensorMemory& memory = memory_of(warp);
    const uint32_t address = base_of(warp, instruction, active, "tcgen05.st");
    note(warp, instruction, TensorMemory::Access::kStore, warp.event(Actor::kTensorStore, ++warp.num_tensor_stores), address, instruction.from.size() - 1);
    for (size_t i = 0; i + 1 < instruction.from.size(); ++i) {
        const Use& from = instruction.from[i + 1];
        const Mask undefined = warp.undefined_lanes(from);
        for (int lane = 0; lane < kLanes; ++lane) {
            const Cell cell = cell_of(address, instruction.n[0], i, lane);
            memory.write(cell.lane, cell.column, warp.lanes<uint32_t>(from)[lane], undefined >> lane & 1);
        }
    }
}

void wait_for_loads(Warp& warp, const Instruction&, Mask) { warp.clock.set(warp.event(Actor::kTensorLoad, warp.num_tensor_loads)); }
void wait_for_stores(Warp& warp, const Instruction&, Mask) { warp.clock.set(warp.event(Actor::kTensorStore, warp.num_tensor_stores)); }

void decode_allocation(Decoder& decoder) {
    Instruction& instruction = decoder.instruction();
    const std::string& verb = decoder.statement().opcode[1];
    if (!decoder.has("cta_group::1")) decoder.refuse();
    instruction.needs = Needs::kAll;
    if (verb == "relinquish_alloc_permit") {
        instruction.run = [](Warp& warp, const Instruction&, Mask) { warp.block.may_allocate = false; };
        return;
    }
    if (verb == "alloc" && !decoder.has("shared::cta")) decoder.refuse("a generic address of shared memory");
    if (verb == "alloc") decoder.from_address(0, 32);
    else decoder.from(0, 32);
    decoder.from(1, 32);
    instruction.run = verb == "alloc" ? allocate : deallocate;
}

void decode_access(Decoder& decoder) {
    Instruction& instruction = decoder.instruction();
    const bool is_load = decoder.statement().opcode[1] == "ld", is_halved = decoder.has("16x32bx2");
    if ((!is_halved && !decoder.has("32x32b")) || decoder.has("red") || decoder.has("pack::16b") || decoder.has("unpack::16b")) decoder.refuse();
    decoder.from_address(is_load, 32);
    if (is_load) decoder.to_all(0, 32);
    else decoder.from_all(is_halved ? 2 : 1, 32);
    const size_t num_registers = is_load ? instruction.to.size() : instruction.from.size() - 1;
    if (!decoder.has(std::string("x").append(std::to_string(num_registers)))) decoder.refuse("registers that do not fit the shape");
    if (is_halved) instruction.n[0] = static_cast<int64_t>(decoder.operand(is_load ? 2 : 1).number);
    instruction.needs = Needs::kFirst;
    instruction.sets_defined = true;
    instruction.run = is_load ? load : store;
}

void decode_tcgen05(Decoder& decoder) {
    const std::string& verb = decoder.statement().opcode.at(1);
    if (verb == "alloc" || verb == "dealloc" || verb == "relinquish_alloc_permit") decode_allocation(decoder);
    else if (verb == "ld" || verb == "st") decode_access(decoder);
    else if (verb == "wait::ld") decoder.instruction().run = wait_for_loads;
    else if (verb == "wait::st") decoder.instruction().run = wait_for_stores;
    else if (verb.rfind("fence::", 0) == 0) decoder.instruction().run = [](Warp&, const Instruction&, Mask) {};
    else decode_tensor_core(decoder);
}

}  // namespace

void add_tcgen05(DecodeTable& table) { table["tcgen05"] = decode_tcgen05; }

}  // namespace software_gpu
