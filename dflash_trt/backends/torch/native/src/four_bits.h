/// The product of a few rows with weights of four bits: codes that a table gives values, times a scale for each block of
/// inputs. A panel of kPanel outputs has, block after block,
///
///     scales  bfloat16 [kPanel]
///     codes   uint8 [block / 8, kPanel, 4]: byte e of input group g and an output has the codes of input 8g + e in bits
///             0-3 and of input 8g + 4 + e in bits 4-7
///
/// Every sum is made in the order of the inputs: the bits of a row do not depend on the rows beside it.
#pragma once

#include "codes.h"
#include "kernels.h"

namespace dflash_trt
{

constexpr int kGroup = 8; // inputs
constexpr int kGroupBytes = kPanel * 4;
constexpr int kBytesAhead = 4096; // that are fetched while a group is multiplied
constexpr int kScaleBytes = kPanel * static_cast<int>(sizeof(BFloat16));

/// The product with codes that lie as a checkpoint stores them: stored_codes.cpp.
void multiply_stored(DflashTrtFourBitLinear const& arguments);

/// Where the panels and blocks of a layer lie.
struct FourBits
{
    uint8_t const* packed;
    int64_t num_in, block;

    int64_t block_bytes() const { return kScaleBytes + block / kGroup * kGroupBytes; }
    int64_t panel_bytes() const { return num_in / block * block_bytes(); }
};

/// Vectors of outputs in a block of their inputs.
struct Outputs
{
    uint8_t const *scales_of_first, *codes_of_first;
    int64_t panel_bytes;

    /// From vector `first` on, in the first block.
    static Outputs of(FourBits const& layer, int64_t first)
    {
        uint8_t const* const panel = layer.packed + first / kVectors * layer.panel_bytes();
        int64_t const outputs = first % kVectors * kLanes;
        return {panel + outputs * 2, panel + kScaleBytes + outputs * 4, layer.panel_bytes()};
    }

    Outputs after(int64_t bytes) const { return {scales_of_first + bytes, codes_of_first + bytes, panel_bytes}; }

    Vec scales(int column) const { return load(reinterpret_cast<BFloat16 const*>(at(scales_of_first, column, 2))); }

    void prefetch(int64_t group) const
    {
        for (int line = 0; line < kGroupBytes; line += 64)
        {
            __builtin_prefetch(codes_of_first + group * kGroupBytes + kBytesAhead + line, 0, 3);
        }
    }

    Bits codes(int64_t group, int column) const { return load_bits(at(codes_of_first + group * kGroupBytes, column, 4)); }

private:
    uint8_t const* at(uint8_t const* first, int column, int64_t bytes) const
    {
        return first + column / kVectors * panel_bytes + column % kVectors * kLanes * bytes;
    }
};

/// One input, whose codes are `kShift` bits up in the words.
template <int kShift, int kRows, int kColumns>
inline void multiply_input(Bits const (&words)[kColumns], Vec const (&scales)[kColumns], CodeTable const& table, float const* x,
    int64_t stride, Vec (&sums)[kRows][kColumns])
{
    Vec weights[kColumns];
#pragma GCC unroll 8
    for (int column = 0; column < kColumns; ++column)
    {
        weights[column] = table.values_of(shifted<kShift>(words[column])) * scales[column];
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row)
    {
        Vec const given = broadcast(x[row * stride]);
#pragma GCC unroll 8
        for (int column = 0; column < kColumns; ++column)
        {
            sums[row][column] = fma(given, weights[column], sums[row][column]);
        }
    }
}

/// Float32 rows: each code times its scale, in float32, is a weight.
template <int kRows, int kColumns>
inline void multiply_block(Outputs const& outputs, int64_t block, CodeTable const& table, float const* a, int64_t stride,
    Vec (&sums)[kRows][kColumns])
{
    Vec scales[kColumns];
#pragma GCC unroll 8
    for (int column = 0; column < kColumns; ++column)
    {
        scales[column] = outputs.scales(column);
    }
    for (int64_t group = 0; group < block / kGroup; ++group)
    {
        outputs.prefetch(group);
        Bits words[kColumns];
#pragma GCC unroll 8
        for (int column = 0; column < kColumns; ++column)
        {
            words[column] = outputs.codes(group, column);
        }
        for (float const *x = a + group * kGroup, *const end = x + kGroup; x < end; x += kGroup / 2)
        {
            multiply_input<0>(words, scales, table, x, stride, sums);
            multiply_input<8>(words, scales, table, x + 1, stride, sums);
            multiply_input<16>(words, scales, table, x + 2, stride, sums);
            multiply_input<24>(words, scales, table, x + 3, stride, sums);
#pragma GCC unroll 8
            for (Bits& word : words)
            {
                word = shifted<4>(word); // the high codes
            }
        }
    }
}

/// A block of float32 as integers, of which the greatest stands for the largest element. Returns half of what a code stands
/// for, for weights that are doubled; NaN for what is not finite.
template <typename Integer>
inline float code_block(float const* x, int64_t block, Integer* codes)
{
    constexpr auto kMost = static_cast<float>(std::numeric_limits<Integer>::max());
    float const scale = std::max(largest_magnitude(x, block) / kMost, kSmallestScale);
    bool const is_finite = std::isfinite(scale);
    for (int64_t i = 0; i < block; ++i)
    {
        codes[i] = is_finite ? static_cast<Integer>(std::nearbyint(x[i] / scale)) : Integer{0};
    }
    return is_finite ? 0.5F * scale : NAN;
}

/// What stands before the codes of a block of activations.
struct BlockHeader
{
    float scale;   // half of what a code stands for
    int32_t start; // of the sums of their products: ByteSums

    static constexpr int64_t kSize = sizeof(float) + sizeof(int32_t);

    static BlockHeader of(int8_t const* block)
    {
        BlockHeader header;
        std::memcpy(&header, block, sizeof(header));
        return header;
    }
};

/// Rows as integers of eight bits, block after block a header and the codes.
class CodedBlocks
{
public:
    void fill(float const* x, int64_t num_rows, int64_t num_in, int64_t block)
    {
        int64_t const size = BlockHeader::kSize + block;
        codes_.resize(num_rows * num_in / block * size);
        int8_t* to = codes_.data();
        for (int64_t i = 0; i < num_rows * num_in; i += block, to += size)
        {
            float const scale = code_block(x + i, block, to + BlockHeader::kSize);
            BlockHeader const header{scale, start_of(to + BlockHeader::kSize, block)};
            std::memcpy(to, &header, sizeof(header));
        }
        rows_ = {codes_.data(), num_in / block * size, num_rows};
    }

    RowsOf<int8_t> const& rows() const { return rows_; }

private:
    /// Minus what kZeroByte adds to the sums of a lane.
    static int32_t start_of(int8_t const* codes, int64_t size)
    {
        int32_t sums[2]{};
        for (int64_t i = 0; i < size; ++i)
        {
            sums[ByteSums::kSums == 2 ? i / 2 % 2 : 0] -= kZeroByte * codes[i];
        }
        return ByteSums::kSums == 2 ? (sums[0] & 0xFFFF) | sums[1] * 65536 : sums[0];
    }

    std::vector<int8_t> codes_;
    RowsOf<int8_t> rows_{};
};

/// Rows of `CodedBlocks`: sums of integers, exact for the block, times both scales.
template <int kRows, int kColumns>
inline void multiply_block(Outputs const& outputs, int64_t block, CodeTable const& table, int8_t const* a, int64_t stride,
    Vec (&sums)[kRows][kColumns])
{
    ByteSums of_block[kRows][kColumns];
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row)
    {
        ByteSums const start{broadcast_integer(BlockHeader::of(a + row * stride).start)};
#pragma GCC unroll 8
        for (ByteSums& sum : of_block[row])
        {
            sum = start;
        }
    }
    int8_t const* x = a + BlockHeader::kSize;
    for (int64_t group = 0; group < block / kGroup; ++group, x += kGroup)
    {
        outputs.prefetch(group);
#pragma GCC unroll 8
        for (int column = 0; column < kColumns; ++column)
        {
            Bits low, high;
            table.bytes_of(outputs.codes(group, column), low, high);
#pragma GCC unroll 16
            for (int row = 0; row < kRows; ++row)
            {
                of_block[row][column].add(low, x + row * stride);
                of_block[row][column].add(high, x + row * stride + kGroup / 2);
            }
        }
    }
#pragma GCC unroll 8
    for (int column = 0; column < kColumns; ++column)
    {
        Vec const scales = outputs.scales(column);
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row)
        {
            Vec const both = scales * broadcast(BlockHeader::of(a + row * stride).scale);
            sums[row][column] = fma(as_values(of_block[row][column].total()), both, sums[row][column]);
        }
    }
}

} // namespace dflash_trt
