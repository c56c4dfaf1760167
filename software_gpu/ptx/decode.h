// From statements to instructions: which handler, and where its operands lie.
#pragma once

#include "machine.h"

namespace software_gpu {

// A type of PTX: kind 'u', 's', 'b', 'f' (IEEE), 'g' (bfloat16), 'p' (predicate).
struct Type {
    char kind = 'b';
    int bits = 32;
    int num_packed = 1;  // 2 for f16x2
    bool operator==(const Type&) const = default;
};
Type type_of(const std::string& word);
bool is_type(const std::string& word);

class Decoder {
  public:
    Decoder(std::shared_ptr<const Module> module, const Entry& entry);
    std::unique_ptr<Kernel> decode();

    // For the functions that decode one opcode:
    const Statement& statement() const { return *statement_; }
    Instruction& instruction() { return instruction_; }
    bool has(const std::string& modifier) const;
    const Operand& operand(size_t i) const;
    size_t num_operands() const { return statement_->operands.size(); }
    Use use(const Operand& operand, int bits);
    Use constant(uint64_t bits, int num_words);
    void to(size_t i, int bits) { instruction_.to.push_back(use(operand(i), bits)); }
    void from(size_t i, int bits) { instruction_.from.push_back(use(operand(i), bits)); }
    // For handlers that take the low bits of 64; PTX ISA, "Operand Size Exceeding Instruction-Type Size".
    void allow_wider_registers() { allows_wider_ = true; }
    void from_address(size_t i, int bits);  // sets `offset`
    void to_all(size_t i, int bits);        // of a vector, or one
    void from_all(size_t i, int bits);
    const Entry& entry() const { return entry_; }
    [[noreturn]] void refuse(const std::string& why = "no such instruction") const;

  private:
    void find_places(Instruction& instruction) const;
    Use register_of(const std::string& name);
    Use sink(int bits);

    std::shared_ptr<const Module> module_;
    const Entry& entry_;
    std::unique_ptr<Kernel> kernel_;
    std::map<std::string, Use> registers_;
    std::map<std::pair<uint64_t, int>, Use> constants_;
    const Statement* statement_ = nullptr;
    Instruction instruction_;
    bool allows_wider_ = false;
};

using DecodeFunction = void (*)(Decoder&);
using DecodeTable = std::map<std::string, DecodeFunction>;  // by the opcode's first word

// One per file of instructions.
void add_elementwise(DecodeTable& table);
void add_conversions(DecodeTable& table);
void add_memory(DecodeTable& table);
void add_warp_wide(DecodeTable& table);
void add_matrix(DecodeTable& table);
void add_mbarrier(DecodeTable& table);
void add_tcgen05(DecodeTable& table);
void decode_tensor_core(Decoder& decoder);  // tcgen05.mma, .commit

}  // namespace software_gpu
