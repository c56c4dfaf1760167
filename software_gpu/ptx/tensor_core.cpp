// PTX ISA, "TensorCore 5th Generation Matrix Multiply and accumulate Operations" and "Async Synchronization Operations":
// tcgen05.mma and tcgen05.commit of one block (.cta_group::1), dense matrices, sums in float32 or int32.
//
// When a product is issued, it is checked against everything that must come before; it is computed at once, or when its
// commit is waited for. A product is summed in double and rounded once with the accumulator, as in matrix.cpp.
#include "tensor_core.h"

#include "decode.h"
#include "matrix_formats.h"

namespace software_gpu {
namespace {

using Access = TensorMemory::Access;
enum Kind : int64_t { kTf32, kF16, kF8f6f4, kI8, kMxf8f6f4, kMxf4, kMxf4nvf4 };
// Of TensorCoreWork::values.
enum Value { kD, kA, kB, kDescriptor, kScaleA, kScaleB };

constexpr int kRowBytes = 32;  // of A and B: K elements of every kind

// PTX ISA, "Instruction descriptor".
struct Shape {
    int m, n, k;
    int64_t a_element, b_element;
    bool is_a_m_major, is_b_n_major;
    int scales = 0;  // of a row of A and of a column of B
    int a_byte = 0, b_byte = 0;  // of a word of tensor memory, of the first scale
    bool is_ue8m0 = false;

    Shape(int64_t kind, int64_t num_scales, uint32_t bits) : scales(static_cast<int>(num_scales)) {
        const auto field = [&](int first, int size) { return static_cast<int>(bits >> first & ((1u << size) - 1)); };
        const bool is_scaled = kind >= kMxf8f6f4, is_mxf4 = kind >= kMxf4;
        n = field(17, 6) * 8;
        m = is_scaled ? field(27, 2) * 128 : field(24, 5) * 16;
        a_element = element(kind, field(7, 3));
        b_element = element(kind, field(10, is_mxf4 ? 2 : 3));
        k = kRowBytes * 8 / bits_of(a_element);
        is_a_m_major = field(15, 1);
        is_b_n_major = field(16, 1);
        if (field(0, 4)) throw Fault("a sparse or saturating product");
        if (field(13, 2)) throw Fault("a product of negated matrices");
        if (is_scaled) {
            is_ue8m0 = field(23, 1);
            b_byte = field(4, 2);
            a_byte = field(29, 2);
            if (field(31, 1)) throw Fault("a product with another K");
            if (is_ue8m0 != (kind != kMxf4nvf4 || scales == 2) && !(kind == kMxf4nvf4 && scales == 4)) throw Fault("no such type of scales for this product");
        } else if (field(4, 2) != (kind == kI8 ? 2 : 1)) {
            throw Fault("a product with sums that are neither of float32 nor, of integers, of int32");
        }
        if ((m != 128 && (m != 64 || is_scaled)) || n < 8 || n > 256) throw Fault("a product of " + std::to_string(m) + " by " + std::to_string(n));
        if ((is_a_m_major || is_b_n_major) && (is_mxf4 || kind == kTf32)) throw Fault("a transposed matrix of this type");
    }

  private:
    static int64_t element(int64_t kind, int code) {
        if (kind == kTf32 && code == 2) return kTf32Element;
        if (kind == kF16 && code < 2) return code ? kBfloatElement : kHalfElement;
        if ((kind == kF8f6f4 || kind == kMxf8f6f4) && code < 2) return code ? kE5m2Element : kE4m3Element;
        if (kind == kI8 && code == 1) return kS8Element;
        if (kind >= kMxf4 && code == 1) return kE2m1Element;
        throw Fault("no such element of a matrix: " + std::to_string(code));
    }
};

// Rows of A or columns of B, each with K numbers, and where some of it is undefined.
struct Matrix {
    Matrix(int of_rows, int of_k) : k(of_k), values(static_cast<size_t>(of_rows) * of_k), is_undefined(of_rows) {}
    double& at(int row, int column) { return values[static_cast<size_t>(row) * k + column]; }

    int k;
    std::vector<double> values;
    std::vector<bool> is_undefined;
};

Matrix read_shared(const Block& block, uint64_t descriptor, int num_rows, int k, int64_t element, bool is_k_major) {
    const SharedMatrix shared = tcgen05_matrix(descriptor);
    const int bits = bits_of(element);
    Matrix matrix(num_rows, k);
    for (int row = 0; row < num_rows; ++row)
        for (int column = 0; column < k; ++column) {
            uint32_t content = 0;
            if (!block.read_shared_late(shared.address(row, column, bits, is_k_major), &content, std::max(bits, 8) / 8)) matrix.is_undefined[row] = true;
            matrix.at(row, column) = element_value(bits == 4 ? content >> 4 * (column % 2) : content, element);
        }
    return matrix;
}

// "Layout D" and "Layout F": the rows of 64 take 16 lanes of each warp's 32.
uint32_t lane_of(int row, int m, uint32_t first) { return first + (m == 128 ? row : row % 16 + row / 16 * 32); }

uint32_t first_lane(uint64_t address, int m) {
    const auto lane = static_cast<uint32_t>(address >> 16 & 0xffff);
    if (lane != 0 && (m == 128 || lane != 16)) throw Fault("a matrix that begins at lane " + std::to_string(lane) + " of tensor memory");
    return lane;
}

Matrix read_tensor(const TensorMemory& memory, uint64_t address, int m, int k, int64_t element) {
    const int per = 32 / bits_of(element);
    Matrix matrix(m, k);
    for (int row = 0; row < m; ++row)
        for (int column = 0; column < k; ++column) {
            const uint32_t lane = lane_of(row, m, first_lane(address, m)), at = static_cast<uint32_t>(address & 0xffff) + column / per;
            if (memory.is_undefined(lane, at)) matrix.is_undefined[row] = true;
            matrix.at(row, column) = element_value(memory.read(lane, at) >> column % per * (32 / per), element);
        }
    return matrix;
}

double scale_value(uint32_t code, bool is_ue8m0) { return is_ue8m0 ? std::ldexp(1.0, static_cast<int>(code & 0xff) - 127) : e4m3_value(code & 0x7f); }

// "Block Scaling": a word has the scales of a row, and each quarter of the lanes has all of them.
void scale(Matrix& matrix, const TensorMemory& memory, uint64_t address, uint32_t quarter, int num_rows, int first_row, const Shape& shape, int first_byte) {
    const int per = shape.k / shape.scales;
    for (int row = 0; row < num_rows; ++row) {
        const uint32_t lane = 32 * quarter + (first_row + row) % 32, column = static_cast<uint32_t>(address & 0xffff) + (first_row + row) / 32;
        const uint32_t word = memory.read(lane, column);
        if (memory.is_undefined(lane, column)) matrix.is_undefined[first_row + row] = true;
        for (int i = 0; i < shape.k; ++i) matrix.at(first_row + row, i) *= scale_value(word >> 8 * (first_byte + i / per), shape.is_ue8m0);
    }
}

// Rows of D from `first` on.
void accumulate(TensorMemory& memory, const TensorCoreWork& work, const Shape& shape, int first, int num_rows, Matrix& a, Matrix& b) {
    std::vector<double> columns(static_cast<size_t>(shape.k) * shape.n), sums(shape.n);
    for (int i = 0; i < shape.n; ++i)
        for (int k = 0; k < shape.k; ++k) columns[static_cast<size_t>(k) * shape.n + i] = b.at(i, k);
    for (int row = first; row < first + num_rows; ++row) {
        std::fill(sums.begin(), sums.end(), 0.0);
        for (int k = 0; k < shape.k; ++k) {
            const double factor = a.at(row, k);
            const double* const of_k = columns.data() + static_cast<size_t>(k) * shape.n;
            for (int i = 0; i < shape.n; ++i) sums[i] += factor * of_k[i];
        }
        const uint32_t lane = lane_of(row, shape.m, first_lane(work.values[kD], shape.m));
        for (int i = 0; i < shape.n; ++i) {
            const uint32_t column = static_cast<uint32_t>(work.values[kD] & 0xffff) + i;
            const uint32_t before = work.accumulates ? memory.read(lane, column) : 0;
            const bool is_undefined = a.is_undefined[row] || b.is_undefined[i] || (work.accumulates && memory.is_undefined(lane, column));
            const uint32_t sum = shape.a_element == kS8Element ? before + static_cast<uint32_t>(static_cast<int64_t>(sums[i])) : std::bit_cast<uint32_t>(static_cast<float>(sums[i] + std::bit_cast<float>(before)));
            memory.write(lane, column, sum, is_undefined);
        }
    }
}

// n: kind, A is in tensor memory, scales, offsets of D, A, both scales.
void multiply(Warp& warp, const TensorCoreWork& work) {
    const auto& n = work.instruction->n;
    const Shape shape(n[0], n[2], static_cast<uint32_t>(work.values[kDescriptor]));
    TensorMemory& memory = *warp.block.tensor_memory;
    Matrix a = n[1] ? read_tensor(memory, work.values[kA], shape.m, shape.k, shape.a_element)
                    : read_shared(warp.block, work.values[kA], shape.m, shape.k, shape.a_element, !shape.is_a_m_major);
    Matrix b = read_shared(warp.block, work.values[kB], shape.n, shape.k, shape.b_element, !shape.is_b_n_major);
    if (!shape.scales) return accumulate(memory, work, shape, 0, shape.m, a, b);
    for (uint32_t quarter = 0; quarter < 4; ++quarter) {
        Matrix scaled = b;
        scale(scaled, memory, work.values[kScaleB], quarter, shape.n, 0, shape, shape.b_byte);
        scale(a, memory, work.values[kScaleA], quarter, 32, 32 * static_cast<int>(quarter), shape, shape.a_byte);
        accumulate(memory, work, shape, 32 * static_cast<int>(quarter), 32, a, scaled);
    }
}

// ---- what must have happened before

void note_shared(Warp& warp, const Event& event, uint64_t descriptor, int num_rows, int k, int64_t element, bool is_k_major) {
    const SharedMatrix shared = tcgen05_matrix(descriptor);
    const int per = 128 / bits_of(element);  // of 16 bytes
    for (int row = 0; row < num_rows; row += is_k_major ? 1 : per)
        for (int column = 0; column < k; column += is_k_major ? per : 1) warp.block.note_tensor_core(warp.clock, event, shared.address(row, column, bits_of(element), is_k_major));
}

void note_tensor(Warp& warp, Access access, const Event& event, uint64_t address, int m, int num_columns) {
    const uint32_t first = first_lane(address, m), step = m == 128 ? TensorMemory::kGroup : 32;
    for (uint32_t lane = first; lane < TensorMemory::kNumLanes; lane += step)
        for (int column = 0; column < num_columns; ++column) warp.block.tensor_memory->note(access, warp.clock, event, lane, static_cast<uint32_t>(address & 0xffff) + column);
}

void note_product(Warp& warp, const TensorCoreWork& work, const Event& event) {
    const auto& n = work.instruction->n;
    const Shape shape(n[0], n[2], static_cast<uint32_t>(work.values[kDescriptor]));
    if (!warp.block.tensor_memory) throw Fault("tcgen05.mma before tcgen05.alloc");
    if (n[1]) note_tensor(warp, Access::kFactor, event, work.values[kA], shape.m, kRowBytes / 4);
    else note_shared(warp, event, work.values[kA], shape.m, shape.k, shape.a_element, !shape.is_a_m_major);
    note_shared(warp, event, work.values[kB], shape.n, shape.k, shape.b_element, !shape.is_b_n_major);
    if (shape.scales) {
        note_tensor(warp, Access::kFactor, event, work.values[kScaleA], shape.m, shape.m / 32);
        note_tensor(warp, Access::kFactor, event, work.values[kScaleB], 128, (shape.n + 31) / 32);
    }
    note_tensor(warp, Access::kProduct, event, work.values[kD], shape.m, shape.n);
}

// ---- the queue

void require_one_lane(Mask active, const char* what) {
    if (std::popcount(active) != 1) throw Fault(std::string(what) + " by more than one lane");
}

Clock& issued(Warp& warp) {
    if (!warp.tensor_core_clock) warp.tensor_core_clock.emplace(warp.block.num_warps);
    return *warp.tensor_core_clock;
}

void issue(Warp& warp, TensorCoreWork work) {
    if (warp.block.launch.options.is_late) warp.tensor_core.push_back(std::move(work));
    else work.run(warp, work);
    issued(warp).join(warp.clock);
    warp.tick();
}

// from: D, A, B, descriptor [, scales of A, of B] [, accumulates].
void issue_product(Warp& warp, const Instruction& instruction, Mask active) {
    require_one_lane(active, "tcgen05.mma");
    const int lane = std::countr_zero(active);
    const auto& n = instruction.n;
    TensorCoreWork work{multiply, &instruction, {}, (warp.predicate(instruction.from.back()) & active) != 0, 0, std::nullopt};
    const auto value = [&](size_t i) -> uint64_t { return instruction.from[i].num_words == 2 ? warp.lanes<uint64_t>(instruction.from[i])[lane] : warp.lanes<uint32_t>(instruction.from[i])[lane]; };
    for (size_t i = 0; i + 1 < instruction.from.size(); ++i) work.values[i] = value(i);
    work.values[kD] += static_cast<uint64_t>(n[3]);
    work.values[kA] += static_cast<uint64_t>(n[4]);
    work.values[kScaleA] += static_cast<uint64_t>(n[5]);
    work.values[kScaleB] += static_cast<uint64_t>(n[6]);
    note_product(warp, work, warp.event(Actor::kTensorCore, ++warp.num_tensor_core));
    issue(warp, std::move(work));
}

void commit(Warp& warp, const Instruction& instruction, Mask active) {
    require_one_lane(active, "tcgen05.commit");
    const uint32_t address = warp.lanes<uint32_t>(instruction.from[0])[std::countr_zero(active)] + static_cast<uint32_t>(instruction.offset);
    Mbarrier& barrier = warp.block.mbarrier(address);
    if (!warp.clock.has_seen(barrier.init)) throw Fault("a race: tcgen05.commit to an mbarrier that another warp initializes without a barrier between them");
    Clock clock = issued(warp);
    clock.set(warp.event(Actor::kTensorCore, warp.num_tensor_core));
    barrier.used[warp.index] = warp.now().time;
    if (warp.block.launch.options.is_late) warp.tensor_core.push_back({nullptr, &instruction, {}, false, address, std::move(clock)});
    else warp.block.arrive(barrier, clock, 1);
}

void decode_mma(Decoder& decoder) {
    static const std::map<std::string, Kind> kKinds = {{"kind::tf32", kTf32}, {"kind::f16", kF16}, {"kind::f8f6f4", kF8f6f4}, {"kind::i8", kI8}, {"kind::mxf8f6f4", kMxf8f6f4}, {"kind::mxf4", kMxf4}, {"kind::mxf4nvf4", kMxf4nvf4}};
    static const std::map<std::string, int64_t> kScales = {{"scale_vec::1X", 1}, {"scale_vec::2X", 2}, {"scale_vec::4X", 4}, {"block_scale", 0}, {"cta_group::1", 0}};
    Instruction& instruction = decoder.instruction();
    int64_t kind = -1, scales = 0;
    for (auto word = decoder.statement().opcode.begin() + 2; word != decoder.statement().opcode.end(); ++word) {
        if (kKinds.contains(*word)) kind = kKinds.at(*word);
        else if (kScales.contains(*word)) scales = std::max(scales, kScales.at(*word));
        else decoder.refuse();
    }
    const bool is_scaled = decoder.has("block_scale"), is_a_in_tensor_memory = decoder.operand(1).kind == Operand::Kind::kAddress;
    if (kind < 0 || is_scaled != (kind >= kMxf8f6f4) || is_scaled != (scales > 0) || decoder.num_operands() != (is_scaled ? 7 : 5)) decoder.refuse();
    const auto offset_of = [&](size_t i) {
        decoder.from_address(i, 32);
        return instruction.offset;
    };
    instruction.n = {kind, is_a_in_tensor_memory, scales, offset_of(0), 0, 0, 0};
    if (is_a_in_tensor_memory) instruction.n[4] = offset_of(1);
    else decoder.from(1, 64);
    decoder.from(2, 64);
    decoder.from(3, 32);
    if (is_scaled) {
        instruction.n[5] = offset_of(4);
        instruction.n[6] = offset_of(5);
    }
    decoder.from(decoder.num_operands() - 1, 1);
    instruction.needs = Needs::kAll;
    instruction.run = issue_product;
}

void decode_commit(Decoder& decoder) {
    if (!decoder.has("cta_group::1") || !decoder.has("mbarrier::arrive::one") || decoder.has("multicast::cluster") || !(decoder.has("shared::cluster") || decoder.has("shared::cta"))) decoder.refuse();
    decoder.from_address(0, 32);
    decoder.instruction().needs = Needs::kAll;
    decoder.instruction().run = commit;
}

}  // namespace

bool has_commit(const Block& block, uint32_t mbarrier) {
    return std::any_of(block.warps.begin(), block.warps.end(), [&](const Warp& warp) {
        return std::any_of(warp.tensor_core.begin(), warp.tensor_core.end(), [&](const TensorCoreWork& work) { return !work.run && work.mbarrier == mbarrier; });
    });
}

bool end_commit(Block& block, uint32_t mbarrier) {
    for (Warp& warp : block.warps) {
        const auto is_it = [&](const TensorCoreWork& work) { return !work.run && work.mbarrier == mbarrier; };
        if (std::none_of(warp.tensor_core.begin(), warp.tensor_core.end(), is_it)) continue;
        while (true) {
            const TensorCoreWork work = std::move(warp.tensor_core.front());
            warp.tensor_core.pop_front();
            if (work.run) work.run(warp, work);
            else block.arrive(block.mbarrier(work.mbarrier), *work.clock, 1);
            if (is_it(work)) return true;
        }
    }
    return false;
}

void decode_tensor_core(Decoder& decoder) {
    const std::string& verb = decoder.statement().opcode.at(1);
    if (verb == "mma") decode_mma(decoder);
    else if (verb == "commit") decode_commit(decoder);
    else decoder.refuse();
}

}  // namespace software_gpu
