/// The product of a few rows with weights of four bits: codes that a table gives values, times a scale for each block of
/// inputs. A panel of kPanel outputs has, block after block,
///
///     scales  bfloat16 [kPanel]
///     codes   uint8 [block / 4, kPanel, 2]: byte e of input group g and an output has the codes of input 4g + e in bits
///             0-3 and of input 4g + 2 + e in bits 4-7
///
/// Every sum is made in the order of the inputs: the bits of a row do not depend on the rows beside it.
#pragma once

#include "codes.h"
#include "kernels.h"

namespace dflash_trt
{

constexpr int kGroup = 4; // inputs
constexpr int kGroupBytes = kPanel * 2;
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

/// Where a vector of outputs has its scales, or its codes, of a tile that begins at `first`.
inline uint8_t const* column_of(uint8_t const* first, int64_t panel_bytes, int64_t column)
{
    return first + column / kVectors * panel_bytes + column % kVectors * kLanes * 2;
}

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
inline void multiply_block(FourBits const& layer, CodeTable const& table, float const* a, int64_t stride,
    uint8_t const* block, int64_t panel_bytes, Vec (&sums)[kRows][kColumns])
{
    Vec scales[kColumns];
#pragma GCC unroll 8
    for (int column = 0; column < kColumns; ++column)
    {
        scales[column] = load(reinterpret_cast<BFloat16 const*>(column_of(block, panel_bytes, column)));
    }
    uint8_t const* codes = block + kScaleBytes;
    for (int64_t k = 0; k < layer.block; k += kGroup, codes += kGroupBytes)
    {
        Bits words[kColumns];
#pragma GCC unroll 8
        for (int column = 0; column < kColumns; ++column)
        {
            words[column] = load_words(column_of(codes, panel_bytes, column));
        }
        float const* const x = a + k;
        multiply_input<0>(words, scales, table, x, stride, sums);
        multiply_input<8>(words, scales, table, x + 1, stride, sums);
        multiply_input<4>(words, scales, table, x + 2, stride, sums);
        multiply_input<12>(words, scales, table, x + 3, stride, sums);
    }
}

/// A block of float32 as integers of 16 bits. Returns half of what a code stands for, for weights that are doubled; NaN for
/// what is not finite.
inline float code_block(float const* x, int64_t block, int16_t* codes)
{
    float const scale = std::max(largest_magnitude(x, block) / 32767.0F, kSmallestScale);
    bool const is_finite = std::isfinite(scale);
    for (int64_t i = 0; i < block; ++i)
    {
        codes[i] = is_finite ? static_cast<int16_t>(std::nearbyint(x[i] / scale)) : int16_t{0};
    }
    return is_finite ? 0.5F * scale : NAN;
}

/// Rows, block after block its scale and its codes.
class CodedBlocks
{
public:
    static constexpr int64_t kScale = sizeof(float) / sizeof(int16_t); // before the codes of a block

    void fill(float const* x, int64_t num_rows, int64_t num_in, int64_t block)
    {
        int64_t const size = kScale + block;
        codes_.resize(num_rows * num_in / block * size);
        int16_t* to = codes_.data();
        for (int64_t i = 0; i < num_rows * num_in; i += block, to += size)
        {
            float const scale = code_block(x + i, block, to + kScale);
            std::memcpy(to, &scale, sizeof(scale));
        }
        rows_ = {codes_.data(), num_in / block * size, num_rows};
    }

    RowsOf<int16_t> const& rows() const { return rows_; }

    static float scale_of(int16_t const* block)
    {
        float scale;
        std::memcpy(&scale, block, sizeof(scale));
        return scale;
    }

private:
    std::vector<int16_t> codes_;
    RowsOf<int16_t> rows_{};
};

#if !defined(__AVX512F__)

/// Rows of `CodedBlocks`: sums of integers, exact for the block, times both scales.
template <int kRows, int kColumns>
inline void multiply_block(FourBits const& layer, CodeTable const& table, int16_t const* a, int64_t stride,
    uint8_t const* block, int64_t panel_bytes, Vec (&sums)[kRows][kColumns])
{
    Bits of_block[kRows][kColumns];
#pragma GCC unroll 16
    for (auto& of_row : of_block)
    {
#pragma GCC unroll 8
        for (Bits& sum : of_row)
        {
            sum = broadcast_integer(0);
        }
    }
    uint8_t const* codes = block + kScaleBytes;
    int16_t const* x = a + CodedBlocks::kScale;
    for (int64_t k = 0; k < layer.block; k += kGroup, codes += kGroupBytes, x += kGroup)
    {
#pragma GCC unroll 8
        for (int column = 0; column < kColumns; ++column)
        {
            Bits low, high;
            table.pairs_of(column_of(codes, panel_bytes, column), low, high);
#pragma GCC unroll 16
            for (int row = 0; row < kRows; ++row)
            {
                Bits& sum = of_block[row][column];
                sum = add_products(high, x + row * stride + 2, add_products(low, x + row * stride, sum));
            }
        }
    }
#pragma GCC unroll 8
    for (int column = 0; column < kColumns; ++column)
    {
        Vec const scale = load(reinterpret_cast<BFloat16 const*>(column_of(block, panel_bytes, column)));
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row)
        {
            Vec const both = scale * broadcast(CodedBlocks::scale_of(a + row * stride));
            sums[row][column] = fma(as_values(of_block[row][column]), both, sums[row][column]);
        }
    }
}

#endif

#if defined(__AVX512BF16__)

/// Rows of bfloat16: products with the codes, added up for the block, times its scale.
template <int kRows, int kColumns>
inline void multiply_block(FourBits const& layer, CodeTable const& table, Pair const* a, int64_t stride,
    uint8_t const* block, int64_t panel_bytes, Vec (&sums)[kRows][kColumns])
{
    Vec of_block[kRows][kColumns];
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row)
    {
#pragma GCC unroll 8
        for (int column = 0; column < kColumns; ++column)
        {
            of_block[row][column] = broadcast(0.0F);
        }
    }
    uint8_t const* codes = block + kScaleBytes;
    for (int64_t k = 0; k < layer.block / 2; k += kGroup / 2, codes += kGroupBytes)
    {
        Bits low[kColumns], high[kColumns];
#pragma GCC unroll 8
        for (int column = 0; column < kColumns; ++column)
        {
            table.pairs_of(column_of(codes, panel_bytes, column), low[column], high[column]);
        }
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row)
        {
            Bits const first = broadcast_bits(a + row * stride + k), second = broadcast_bits(a + row * stride + k + 1);
#pragma GCC unroll 8
            for (int column = 0; column < kColumns; ++column)
            {
                of_block[row][column] = dot_pairs(first, low[column], of_block[row][column]);
                of_block[row][column] = dot_pairs(second, high[column], of_block[row][column]);
            }
        }
    }
#pragma GCC unroll 8
    for (int column = 0; column < kColumns; ++column)
    {
        Vec const scale = load(reinterpret_cast<BFloat16 const*>(column_of(block, panel_bytes, column)));
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row)
        {
            sums[row][column] = fma(of_block[row][column], scale, sums[row][column]);
        }
    }
}

#endif

} // namespace dflash_trt
