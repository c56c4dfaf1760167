// A module of PTX, parsed: entries, their instructions and where their operands lie.
//
// Knows the text of PTX (https://docs.nvidia.com/cuda/parallel-thread-execution/, "PTX ISA" below) and no meaning of an
// instruction; `decode.h` gives each one its meaning.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace software_gpu {

constexpr int kLanes = 32;
using Mask = uint32_t;
constexpr Mask kAll = ~Mask{0};

// What a GPU would have refused, or answered with undefined behaviour.
struct Fault : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// An operand as it is written.
struct Operand {
    enum class Kind { kRegister, kNumber, kName, kAddress, kVector, kPair } kind = Kind::kNumber;
    std::string text;             // of a register or a name
    uint64_t number = 0;          // an immediate's bits, or an address's offset
    bool is_negated = false;      // !%p
    std::vector<Operand> parts;   // of a vector {a, b}, of a pair d|p, or an address's base
};

struct Statement {
    std::vector<std::string> opcode;  // between the dots
    std::vector<Operand> operands;
    std::string guard;                // the predicate's register, or ""
    bool is_guard_negated = false;
    std::string text;
    int file = 0, line = 0;           // of the source, by .loc
};

struct Parameter {
    std::string name;
    int offset, bytes;
};

struct Entry {
    std::string name;
    std::vector<Parameter> parameters;
    int parameter_bytes = 0;
    std::map<std::string, int> register_bits;  // 1 for a predicate
    std::vector<Statement> statements;
    std::map<std::string, int> labels;         // index of the statement that follows
};

struct Module {
    std::string target;  // sm_90a
    std::map<std::string, std::vector<uint8_t>> globals;
    std::map<int, std::string> files;
    std::map<std::string, Entry> entries;
};

// Raises Fault for text that is not PTX as compilers emit it.
Module parse_module(const std::string& text);

}  // namespace software_gpu
