#include "decode.h"

#include <algorithm>

namespace software_gpu {
namespace {

const DecodeTable& table() {
    static const DecodeTable all = [] {
        DecodeTable made;
        add_elementwise(made);
        add_conversions(made);
        add_memory(made);
        add_warp_wide(made);
        add_matrix(made);
        add_mbarrier(made);
        add_tcgen05(made);
        return made;
    }();
    return all;
}

// PTX ISA, "Special Registers".
int bits_of_special(const std::string& name) { return name == "%clock64" || name == "%globaltimer" ? 64 : 32; }

bool is_special(const std::string& name) {
    static const char* const kNames[] = {"%tid.", "%ntid.", "%ctaid.", "%nctaid.", "%laneid", "%warpid", "%smid", "%clock", "%clock64", "%globaltimer", "%cluster_"};
    return std::any_of(std::begin(kNames), std::end(kNames), [&](const char* start) { return name.rfind(start, 0) == 0; });
}

}  // namespace

bool is_type(const std::string& word) {
    static const char* const kTypes[] = {"pred", "b8", "u8", "s8", "b16", "u16", "s16", "f16", "bf16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64", "f16x2", "bf16x2", "s16x2", "u16x2", "f32x2"};
    return std::any_of(std::begin(kTypes), std::end(kTypes), [&](const char* type) { return word == type; });
}

Type type_of(const std::string& word) {
    if (word == "pred") return {'p', 1};
    if (!is_type(word)) throw Fault("no such type: ." + word);
    Type type;
    type.kind = word.rfind("bf16", 0) == 0 ? 'g' : word[0];
    if (word.size() > 2 && word.compare(word.size() - 2, 2, "x2") == 0) type.num_packed = 2;
    const size_t digits = word.find_first_of("0123456789");
    type.bits = std::atoi(word.c_str() + digits);
    return type;
}

Decoder::Decoder(std::shared_ptr<const Module> module, const Entry& entry)
    : module_(std::move(module)), entry_(entry), kernel_(std::make_unique<Kernel>()) {
    kernel_->module = module_;
    kernel_->entry = &entry_;
}

std::unique_ptr<Kernel> Decoder::decode() {
    for (const auto& [name, bits] : entry_.register_bits) {
        Use use;
        use.is_predicate = bits == 1;
        use.num_words = bits <= 32 ? 1 : static_cast<uint8_t>(bits / 32);
        use.index = use.is_predicate ? kernel_->num_predicates++ : kernel_->num_words;
        if (!use.is_predicate) kernel_->num_words += use.num_words;
        registers_[name] = use;
    }
    for (const Statement& statement : entry_.statements) {
        statement_ = &statement;
        instruction_ = Instruction();
        instruction_.statement = &statement;
        allows_wider_ = false;
        const auto found = table().find(statement.opcode[0]);
        if (found == table().end()) refuse();
        if (!statement.guard.empty()) {
            instruction_.has_guard = true;
            instruction_.guard = register_of(statement.guard);
            instruction_.guard.is_negated = statement.is_guard_negated;
        }
        try {
            found->second(*this);
            for (const Use& to : instruction_.to)
                if (to.is_constant) throw Fault("a constant as a result");
        } catch (const Fault& fault) {
            refuse(fault.what());
        }
        kernel_->instructions.push_back(std::move(instruction_));
    }
    // LLVM's `undef` is a register that no instruction writes: half of a pair that nobody reads, for instance.
    std::vector<bool> is_written(kernel_->num_words);
    for (const Instruction& instruction : kernel_->instructions)
        for (const Use& use : instruction.to)
            if (!use.is_predicate) is_written[use.index] = true;
    for (const auto& [name, use] : registers_)
        if (!use.is_predicate && !is_written[use.index] && !is_special(name)) kernel_->undefined.push_back(use);
    for (Instruction& instruction : kernel_->instructions) find_places(instruction);
    return std::move(kernel_);
}

// Of arguments and results, in Warp::defined.
void Decoder::find_places(Instruction& instruction) const {
    const auto add = [&](std::vector<uint32_t>& places, const Use& use) {
        if (use.is_constant) return;
        const uint32_t first = use.index + (use.is_predicate ? kernel_->num_words : 0);
        for (uint32_t i = 0; i < use.num_words; ++i) places.push_back(first + i);
    };
    const Needs needs = instruction.needs;
    for (size_t i = 0; i < instruction.from.size(); ++i) {
        const bool is_needed = needs == Needs::kAll || (i == 0 ? needs == Needs::kFirst : needs == Needs::kAllButFirst);
        add(is_needed ? instruction.needed : instruction.read, instruction.from[i]);
    }
    for (const Use& use : instruction.to) add(instruction.written, use);
}

void Decoder::refuse(const std::string& why) const { throw Fault(why + ": " + statement_->text); }

bool Decoder::has(const std::string& modifier) const {
    const auto& opcode = statement_->opcode;
    return std::find(opcode.begin() + 1, opcode.end(), modifier) != opcode.end();
}

const Operand& Decoder::operand(size_t i) const {
    if (i >= statement_->operands.size()) throw Fault("an operand is missing");
    return statement_->operands[i];
}

Use Decoder::register_of(const std::string& name) {
    const auto found = registers_.find(name);
    if (found != registers_.end()) return found->second;
    if (!is_special(name)) throw Fault("no such register: " + name);
    Use use;
    use.num_words = bits_of_special(name) / 32;
    use.index = kernel_->num_words;
    kernel_->num_words += use.num_words;
    return kernel_->specials[name] = registers_[name] = use;
}

Use Decoder::constant(uint64_t bits, int num_words) {
    const auto [place, is_new] = constants_.try_emplace({bits, num_words});
    if (is_new) {
        place->second.is_constant = true;
        place->second.num_words = static_cast<uint8_t>(num_words);
        place->second.index = static_cast<uint32_t>(kernel_->constants.size() / kLanes);
        for (int lane = 0; lane < kLanes; ++lane) {
            kernel_->constants.push_back(static_cast<uint32_t>(bits));
            if (num_words == 2) kernel_->constants.push_back(static_cast<uint32_t>(bits >> 32));
        }
    }
    return place->second;
}

// PTX ISA, "Sink symbol": a result that nobody wants.
Use Decoder::sink(int bits) {
    const auto [place, is_new] = registers_.try_emplace("_" + std::to_string(bits));
    if (is_new) {
        place->second.is_predicate = bits == 1;
        place->second.num_words = bits == 64 ? 2 : 1;
        place->second.index = bits == 1 ? kernel_->num_predicates++ : kernel_->num_words;
        if (bits != 1) kernel_->num_words += place->second.num_words;
    }
    return place->second;
}

Use Decoder::use(const Operand& operand, int bits) {
    switch (operand.kind) {
        case Operand::Kind::kRegister: {
            Use use = register_of(operand.text);
            use.is_negated = operand.is_negated;
            if (use.is_predicate != (bits == 1)) throw Fault("a predicate where a number is expected, or the reverse");
            if (bits == 64 && use.num_words != 2) throw Fault("a register of 32 bits where 64 are expected");
            if (bits < 64 && use.num_words == 2 && !allows_wider_) throw Fault("a register of 64 bits where fewer are expected");
            return use;
        }
        case Operand::Kind::kNumber: {
            if (bits == 1) {
                Use use;
                use.is_predicate = use.is_constant = true;
                use.index = operand.number != 0;
                return use;
            }
            const uint64_t mask = bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
            return constant(operand.number & mask, bits == 64 ? 2 : 1);
        }
        case Operand::Kind::kName: {
            if (operand.text == "_") return sink(bits);
            const auto found = module_->globals.find(operand.text);
            if (found != module_->globals.end()) return constant(reinterpret_cast<uint64_t>(found->second.data()), 2);
            return constant(0, bits == 64 ? 2 : 1);  // the one array of shared memory begins at 0
        }
        default: throw Fault("an operand of another kind is expected");
    }
}

void Decoder::from_address(size_t i, int bits) {
    const Operand& address = operand(i);
    if (address.kind != Operand::Kind::kAddress) throw Fault("an address is expected");
    instruction_.offset = static_cast<int64_t>(address.number);
    const Operand& base = address.parts[0];
    if (base.kind == Operand::Kind::kRegister) {
        const Use use = register_of(base.text);
        instruction_.from.push_back(use);
        return;
    }
    instruction_.from.push_back(use(base, bits));
}

void Decoder::to_all(size_t i, int bits) {
    const Operand& written = operand(i);
    if (written.kind != Operand::Kind::kVector) return to(i, bits);
    for (const Operand& part : written.parts) instruction_.to.push_back(use(part, bits));
}

void Decoder::from_all(size_t i, int bits) {
    const Operand& read = operand(i);
    if (read.kind != Operand::Kind::kVector) return from(i, bits);
    for (const Operand& part : read.parts) instruction_.from.push_back(use(part, bits));
}

}  // namespace software_gpu
