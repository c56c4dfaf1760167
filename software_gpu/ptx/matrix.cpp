// Products of matrices: PTX ISA, "Warp Level Matrix Instructions" (ldmatrix, stmatrix, mma) and "Asynchronous Warpgroup
// Level Matrix Instructions" (wgmma).
//
// A product of one instruction is summed in double and rounded once with the accumulator. The hardware documents neither
// the order nor the width of its sums. Sums of integers are exact, and wrap around or saturate in 32 bits.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "decode.h"
#include "matrix_formats.h"

namespace software_gpu {
namespace {

// ---- 8 by 8 matrices of 16-bit numbers between shared memory and registers

// from: addresses; to: one register a matrix. n: is transposed.
void load_matrices(Warp& warp, const Instruction& instruction, Mask active) {
    if (active != warp.live()) throw Fault("ldmatrix by a part of a warp");
    const auto* addresses = warp.lanes<uint32_t>(instruction.from[0]);
    for (size_t matrix = 0; matrix < instruction.to.size(); ++matrix) {
        uint16_t rows[8][8];
        for (int row = 0; row < 8; ++row)
            if (!warp.block.read_shared(warp, addresses[8 * matrix + row] + static_cast<uint64_t>(instruction.offset), rows[row], 16)) warp.undefined = kAll;
        for (int lane = 0; lane < kLanes; ++lane) {
            const int row = lane / 4, column = lane % 4 * 2;
            const uint32_t low = instruction.n[0] ? rows[column][row] : rows[row][column];
            const uint32_t high = instruction.n[0] ? rows[column + 1][row] : rows[row][column + 1];
            warp.put<uint32_t>(instruction.to[matrix], lane, low | high << 16);
        }
    }
}
// from: addresses, then one register a matrix.
void store_matrices(Warp& warp, const Instruction& instruction, Mask active) {
    if (active != warp.live()) throw Fault("stmatrix by a part of a warp");
    const auto* addresses = warp.lanes<uint32_t>(instruction.from[0]);
    for (size_t matrix = 0; matrix + 1 < instruction.from.size(); ++matrix) {
        const auto* values = warp.lanes<uint32_t>(instruction.from[matrix + 1]);
        uint16_t rows[8][8];
        for (int lane = 0; lane < kLanes; ++lane) {
            const int row = lane / 4, column = lane % 4 * 2;
            const auto low = static_cast<uint16_t>(values[lane]), high = static_cast<uint16_t>(values[lane] >> 16);
            (instruction.n[0] ? rows[column][row] : rows[row][column]) = low;
            (instruction.n[0] ? rows[column + 1][row] : rows[row][column + 1]) = high;
        }
        for (int row = 0; row < 8; ++row)
            warp.block.write_shared(warp, addresses[8 * matrix + row] + static_cast<uint64_t>(instruction.offset), rows[row], 16, warp.undefined);
    }
}
void decode_ldmatrix(Decoder& decoder) {
    if (!decoder.has("m8n8") || !decoder.has("b16")) decoder.refuse();
    decoder.to_all(0, 32);
    decoder.from_address(1, 32);
    decoder.instruction().n[0] = decoder.has("trans");
    decoder.instruction().needs = Needs::kFirst;
    decoder.instruction().run = load_matrices;
}
void decode_stmatrix(Decoder& decoder) {
    if (!decoder.has("m8n8") || !decoder.has("b16")) decoder.refuse();
    decoder.from_address(0, 32);
    decoder.from_all(1, 32);
    decoder.instruction().n[0] = decoder.has("trans");
    decoder.instruction().needs = Needs::kFirst;
    decoder.instruction().mixes_lanes = true;
    decoder.instruction().run = store_matrices;
}

int32_t as_int32(double sum, bool saturates) {
    return static_cast<int32_t>(static_cast<int64_t>(saturates ? std::clamp(sum, -2147483648.0, 2147483647.0) : sum));
}

// D[16, N] = A[16, K] B[K, N] + C, row-major; B with rows of `columns`. Sum: float or int32_t.
template <class Sum>
void multiply(const float* a, const float* b, Sum* c, int n, int k, bool saturates) {
    double sums[256];
    for (int row = 0; row < 16; ++row) {
        std::fill(sums, sums + n, 0.0);
        for (int i = 0; i < k; ++i) {
            const double factor = a[row * k + i];
            for (int column = 0; column < n; ++column) sums[column] += factor * b[i * n + column];
        }
        for (int column = 0; column < n; ++column) {
            const double sum = sums[column] + c[row * n + column];
            if constexpr (std::is_same_v<Sum, float>) c[row * n + column] = static_cast<float>(sum);
            else c[row * n + column] = as_int32(sum, saturates);
        }
    }
}

// The 16 rows of A that a warp holds: PTX ISA, figures of the fragments of m16n8k8 (tf32), m16n8k16 and m16n8k32.
void read_a(Warp& warp, const Use* uses, size_t num_uses, int64_t element, int k, float* a) {
    const int per = 32 / bits_of(element);
    for (size_t i = 0; i < num_uses; ++i) {
        const auto* words = warp.lanes<uint32_t>(uses[i]);
        for (int lane = 0; lane < kLanes; ++lane)
            for (int j = 0; j < per; ++j) {
                const int row = lane / 4 + 8 * (i % 2), column = lane % 4 * per + j + 4 * per * static_cast<int>(i / 2);
                a[row * k + column] = element_value(words[lane] >> (j * 32 / per), element);
            }
    }
}

// ---- mma.sync: from: A, B, C. n: element of A, of B, K, registers of A, of B, saturates.
template <class Sum>
void mma(Warp& warp, const Instruction& instruction, Mask active) {
    if (active != kAll) throw Fault("mma by a part of a warp");
    const int k = static_cast<int>(instruction.n[2]);
    const size_t num_a = static_cast<size_t>(instruction.n[3]), num_b = static_cast<size_t>(instruction.n[4]);
    float a[16 * 32], b[32 * 8];
    Sum c[16 * 8];
    read_a(warp, instruction.from.data(), num_a, instruction.n[0], k, a);
    const int per = 32 / bits_of(instruction.n[1]);
    for (size_t i = 0; i < num_b; ++i) {
        const auto* words = warp.lanes<uint32_t>(instruction.from[num_a + i]);
        for (int lane = 0; lane < kLanes; ++lane)
            for (int j = 0; j < per; ++j)
                b[(lane % 4 * per + j + 4 * per * static_cast<int>(i)) * 8 + lane / 4] = element_value(words[lane] >> (j * 32 / per), instruction.n[1]);
    }
    for (size_t i = 0; i < 4; ++i)
        for (int lane = 0; lane < kLanes; ++lane)
            c[(lane / 4 + 8 * static_cast<int>(i / 2)) * 8 + lane % 4 * 2 + static_cast<int>(i % 2)] = warp.get<Sum>(instruction.from[num_a + num_b + i], lane);
    multiply(a, b, c, 8, k, instruction.n[5] != 0);
    for (size_t i = 0; i < 4; ++i)
        for (int lane = 0; lane < kLanes; ++lane)
            warp.put<Sum>(instruction.to[i], lane, c[(lane / 4 + 8 * static_cast<int>(i / 2)) * 8 + lane % 4 * 2 + static_cast<int>(i % 2)]);
}

std::array<int, 3> shape_of(const Decoder& decoder) {
    for (const std::string& word : decoder.statement().opcode) {
        std::array<int, 3> shape{};
        if (std::sscanf(word.c_str(), "m%dn%dk%d", &shape[0], &shape[1], &shape[2]) == 3) return shape;
    }
    throw Fault("a product without a shape");
}

void decode_mma(Decoder& decoder) {
    const auto& opcode = decoder.statement().opcode;
    const auto [m, n, k] = shape_of(decoder);
    const std::string &d_type = opcode[opcode.size() - 4], &c_type = opcode.back();
    const bool is_integer = d_type == "s32";
    if (m != 16 || n != 8 || !decoder.has("row") || !decoder.has("col") || d_type != c_type || (d_type != "f32" && !is_integer) || decoder.has("sp") || decoder.has("block_scale")) decoder.refuse();
    Instruction& instruction = decoder.instruction();
    decoder.to_all(0, 32);
    decoder.from_all(1, 32);
    const size_t num_a = instruction.from.size();
    decoder.from_all(2, 32);
    const size_t num_b = instruction.from.size() - num_a;
    decoder.from_all(3, 32);
    instruction.n = {element_of(opcode[opcode.size() - 3]), element_of(opcode[opcode.size() - 2]), k, static_cast<int64_t>(num_a), static_cast<int64_t>(num_b), decoder.has("satfinite")};
    if ((instruction.n[0] == kS8Element) != is_integer || (instruction.n[1] == kS8Element) != is_integer) decoder.refuse("elements that do not fit the sums");
    if (static_cast<int>(num_a) * 2 * 32 / bits_of(instruction.n[0]) != k || num_b * 2 != num_a || instruction.to.size() != 4) decoder.refuse("registers that do not fit the shape");
    instruction.mixes_lanes = true;
    instruction.run = is_integer ? mma<int32_t> : mma<float>;
}

// ---- wgmma

// False when some of it is undefined.
bool read_matrix(Warp& warp, uint64_t bits, int num_rows, int num_columns, int64_t element, bool is_k_major, int first_row, bool is_transposed, float* out) {
    bool is_defined = true;
    const SharedMatrix matrix = wgmma_matrix(bits);
    const int bytes = bits_of(element) / 8;
    for (int row = 0; row < num_rows; ++row)
        for (int column = 0; column < num_columns; ++column) {
            uint32_t content = 0;
            is_defined &= warp.block.read_shared_by_tensor_core(warp, matrix.address(first_row + row, column, 8 * bytes, is_k_major), &content, bytes);
            out[is_transposed ? column * num_rows + row : row * num_columns + column] = element_value(content, element);
        }
    return is_defined;
}

// from: descriptor of B, A (registers or descriptor) [, scale of D]. n: element of A, of B, N, K, registers of A (0: a
// descriptor), A is M-major, B is N-major, scale of D where it is a number (-1: in a register).
template <class Sum>
void multiply_group(Warp& warp, const Product& product) {
    const Instruction& instruction = *product.instruction;
    const auto& n = instruction.n;
    const int columns = static_cast<int>(n[2]), k = static_cast<int>(n[3]);
    const size_t num_d = instruction.to.size(), num_a = static_cast<size_t>(n[4]);
    float a[16 * 32];
    Sum c[16 * 256];
    std::vector<float> b(static_cast<size_t>(k) * columns);
    bool is_defined = true;
    if (num_a) read_a(warp, &instruction.from[1], num_a, n[0], k, a);
    else is_defined &= read_matrix(warp, product.a, 16, k, n[0], !n[5], 16 * (warp.index % 4), false, a);
    is_defined &= read_matrix(warp, product.b, columns, k, n[1], !n[6], 0, true, b.data());
    const auto place = [&](size_t i, int lane) { return (lane / 4 + 8 * static_cast<int>(i / 2 % 2)) * columns + 8 * static_cast<int>(i / 4) + lane % 4 * 2 + static_cast<int>(i % 2); };
    for (size_t i = 0; i < num_d; ++i)
        for (int lane = 0; lane < kLanes; ++lane) c[place(i, lane)] = product.accumulates ? warp.get<Sum>(instruction.to[i], lane) : Sum{};
    multiply(a, b.data(), c, columns, k, false);
    for (size_t i = 0; i < num_d; ++i)
        for (int lane = 0; lane < kLanes; ++lane) warp.put<Sum>(instruction.to[i], lane, c[place(i, lane)]);
    if (is_defined) return;
    warp.undefined = kAll;
    for (const uint32_t word : instruction.written) warp.defined[word] = 0;
}

void multiply_async(Warp& warp, const Product& product) {
    (product.instruction->n[0] == kS8Element ? multiply_group<int32_t> : multiply_group<float>)(warp, product);
}

void mark(Warp& warp, const Instruction& instruction, bool is_in_flight) {
    for (const Use& use : instruction.to) {
        if (warp.in_flight[use.index] == is_in_flight) continue;
        warp.in_flight[use.index] = is_in_flight;
        warp.num_in_flight += is_in_flight ? 1 : -1;
    }
}

void issue_product(Warp& warp, const Instruction& instruction, Mask active) {
    if (active != kAll) throw Fault("wgmma by a part of a warp");
    if (!warp.num_wgmma_fences) throw Fault("wgmma.mma_async without a wgmma.fence before it");
    const bool accumulates = instruction.n[7] >= 0 ? instruction.n[7] != 0 : (warp.predicate(instruction.from.back()) & 1) != 0;
    if (accumulates)
        for (const uint32_t word : instruction.written)
            if (warp.defined[word] != kAll) warp.undefined = kAll;
    mark(warp, instruction, true);
    const uint64_t a = instruction.n[4] ? 0 : warp.lanes<uint64_t>(instruction.from[1])[0];
    warp.products.push_back({&instruction, a, warp.lanes<uint64_t>(instruction.from[0])[0], accumulates});
    if (!warp.block.launch.options.is_late) multiply_async(warp, warp.products.back());
}
void commit_products(Warp& warp, const Instruction&, Mask) {
    warp.product_groups.push_back(std::move(warp.products));
    warp.products.clear();
}
void wait_for_products(Warp& warp, const Instruction& instruction, Mask) {
    while (static_cast<int64_t>(warp.product_groups.size()) > instruction.n[0]) {
        for (const Product& product : warp.product_groups.front())
            if (warp.block.launch.options.is_late) multiply_async(warp, product);
        warp.product_groups.pop_front();
    }
    std::fill(warp.in_flight.begin(), warp.in_flight.end(), false);
    warp.num_in_flight = 0;
    for (const auto& group : warp.product_groups)
        for (const Product& product : group) mark(warp, *product.instruction, true);
    for (const Product& product : warp.products) mark(warp, *product.instruction, true);
}

void decode_wgmma(Decoder& decoder) {
    Instruction& instruction = decoder.instruction();
    const auto& opcode = decoder.statement().opcode;
    if (decoder.has("fence")) {
        instruction.run = [](Warp& warp, const Instruction&, Mask) { ++warp.num_wgmma_fences; };
        return;
    }
    if (decoder.has("commit_group")) {
        instruction.run = commit_products;
        return;
    }
    if (decoder.has("wait_group")) {
        instruction.n[0] = static_cast<int64_t>(decoder.operand(0).number);
        instruction.run = wait_for_products;
        return;
    }
    const auto [m, n, k] = shape_of(decoder);
    const bool is_integer = decoder.has("s32");
    const auto type = std::find(opcode.begin(), opcode.end(), is_integer ? "s32" : "f32");
    if (m != 64 || type == opcode.end() || opcode.end() - type != 3 || decoder.has("sp") || decoder.has("satfinite") || n > 256 || k > 32) decoder.refuse();
    const Element a_element = element_of(*(type + 1)), b_element = element_of(*(type + 2));
    if ((a_element == kS8Element) != is_integer || (b_element == kS8Element) != is_integer) decoder.refuse("elements that do not fit the sums");
    decoder.to_all(0, 32);
    const size_t num_d = instruction.to.size();
    if (static_cast<int>(num_d) != n / 2) decoder.refuse("registers that do not fit the shape");
    decoder.from(2, 64);
    const bool has_a_registers = decoder.operand(1).kind == Operand::Kind::kVector;
    decoder.from_all(1, has_a_registers ? 32 : 64);
    const size_t num_a = has_a_registers ? decoder.operand(1).parts.size() : 0;
    const Operand& scale = decoder.operand(3);
    int64_t scale_number = -1;
    if (scale.kind == Operand::Kind::kNumber) scale_number = scale.number != 0;
    else decoder.from(3, 1);
    for (size_t i = 4; i < (is_integer ? 4 : 6); ++i)  // integers are not negated
        if (decoder.operand(i).number != 1) decoder.refuse("a product of negated matrices");
    const bool has_majors = bits_of(a_element) == 16;
    const auto major = [&](size_t from_the_end) { return static_cast<int64_t>(decoder.operand(decoder.num_operands() - from_the_end).number); };
    instruction.n = {a_element, b_element, n, k, static_cast<int64_t>(num_a), has_majors && !has_a_registers ? major(2) : 0, has_majors ? major(1) : 0, scale_number};
    instruction.may_use_in_flight = instruction.mixes_lanes = true;
    instruction.needs = Needs::kFirst;
    instruction.run = issue_product;
}

}  // namespace

void add_matrix(DecodeTable& table) {
    table["ldmatrix"] = decode_ldmatrix;
    table["stmatrix"] = decode_stmatrix;
    table["mma"] = decode_mma;
    table["wgmma"] = decode_wgmma;
}

}  // namespace software_gpu
