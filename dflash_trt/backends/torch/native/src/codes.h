/// The product of a few rows with weights of eight bits: integers times integers, summed exactly, then times the scale of
/// the row and that of the output. Activations become integers here, too: `CodedRows`.
#pragma once

#include "product.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace dflash_trt
{

/// What an output of a panel has for kCodes inputs.
struct Codes
{
    uint8_t weights[kCodes];
};

constexpr float kSmallestScale = std::numeric_limits<float>::min();

/// NaN where an element is.
inline float largest_magnitude(float const* x, int64_t size)
{
    uint32_t largest = 0; // magnitudes are in the order of their bits
    for (int64_t i = 0; i < size; ++i)
    {
        uint32_t bits;
        std::memcpy(&bits, x + i, sizeof(bits));
        largest = std::max(largest, bits & 0x7FFFFFFFU);
    }
    float magnitude;
    std::memcpy(&magnitude, &largest, sizeof(magnitude));
    return magnitude;
}

/// What stands before the codes of a row.
struct RowHeader
{
    float scale;
    int32_t start; // of its sums: minus what kZero adds to them

    static constexpr int64_t kSize = 2 * sizeof(float) / sizeof(Code);

    static RowHeader of(Code const* codes)
    {
        RowHeader header;
        std::memcpy(&header, codes - kSize, sizeof(header));
        return header;
    }
};

/// Rows of float32 as `formats/int8.py` quantizes them. The scale of a row that is not finite is NaN, and so is all that
/// comes of it.
class CodedRows
{
public:
    void fill(float const* x, int64_t num_rows, int64_t num_in)
    {
        rows_.count = num_rows;
        rows_.stride = RowHeader::kSize + (num_in + kCodes - 1) / kCodes * kCodes;
        codes_.assign(num_rows * rows_.stride, 0);
        rows_.first = codes_.data() + RowHeader::kSize;
        for (int64_t row = 0; row < num_rows; ++row)
        {
            fill_row(x + row * num_in, num_in, codes_.data() + row * rows_.stride);
        }
    }

    RowsOf<Code> const& rows() const { return rows_; }

private:
    static void fill_row(float const* x, int64_t num_in, Code* to)
    {
        float const scale = std::max(largest_magnitude(x, num_in) / 127.0F, kSmallestScale);
        bool const is_finite = std::isfinite(scale);
        int32_t total = 0;
        for (int64_t i = 0; i < num_in && is_finite; ++i)
        {
            auto const code = static_cast<int32_t>(std::nearbyint(x[i] / scale));
            to[RowHeader::kSize + i] = static_cast<Code>(code);
            total += code;
        }
        RowHeader const header{is_finite ? scale : NAN, -kZero * total};
        std::memcpy(to, &header, sizeof(header));
    }

    std::vector<Code> codes_;
    RowsOf<Code> rows_{};
};

/// Where products of codes go: rows of float32.
struct ScaledSums
{
    float* first;
    int64_t stride;
    float const* scales; // of the outputs
    float const* bias;   // null: none

    ScaledSums below(int64_t rows) const { return {first + rows * stride, stride, scales, bias}; }
    ScaledSums beside(int64_t columns) const
    {
        return {first + columns, stride, scales + columns, bias == nullptr ? nullptr : bias + columns};
    }
};

template <int kRows, int kColumns>
inline void multiply_tile(Code const* a, int64_t stride, Panels<Codes> const& b, int64_t depth, ScaledSums const& out)
{
    Bits sums[kRows][kColumns];
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row)
    {
        Bits const start = broadcast_integer(RowHeader::of(a + row * stride).start);
#pragma GCC unroll 16
        for (int column = 0; column < kColumns; ++column)
        {
            sums[row][column] = start;
        }
    }
    Codes const* from = b.first;
    for (int64_t k = 0; k < depth; k += kCodes, from += b.row_stride)
    {
        prefetch<kColumns>(from, b.panel_stride);
        Bits w[kColumns];
#pragma GCC unroll 16
        for (int column = 0; column < kColumns; ++column)
        {
            w[column] = load_codes(vector_of(from, b.panel_stride, column)->weights);
        }
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row)
        {
#pragma GCC unroll 16
            for (int column = 0; column < kColumns; ++column)
            {
                sums[row][column] = add_products(w[column], a + row * stride + k, sums[row][column]);
            }
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row)
    {
        Vec const row_scale = broadcast(RowHeader::of(a + row * stride).scale);
#pragma GCC unroll 16
        for (int column = 0; column < kColumns; ++column)
        {
            int const at = column * kLanes;
            Vec const scaled = as_values(sums[row][column]) * load(out.scales + at) * row_scale;
            store(out.first + row * out.stride + at, out.bias == nullptr ? scaled : scaled + load(out.bias + at));
        }
    }
}

} // namespace dflash_trt
