#include "four_bits.h"
#include "kernels.h"

#include <algorithm>
#include <type_traits>
#include <vector>

namespace dflash_trt
{
namespace
{

/// The sizes of a tile: rows at most, and vectors of outputs that some rows have sums for.
template <typename Element>
constexpr int kMostRows = std::is_same_v<Element, int8_t> ? kTiles.byte_rows : kLanes == 16 ? 12 : 4;

template <typename Element>
constexpr int columns_of(int rows)
{
    if (std::is_same_v<Element, int8_t>)
    {
        return rows <= kTiles.byte_rows_of_four ? 4 : rows <= 4 ? 2 : 1;
    }
    return kLanes == 16 ? (rows <= 2 ? 4 : 2) : rows == 1 ? 2 : 1;
}

/// Of activations, where a row has `block` inputs.
template <typename Element>
constexpr int64_t elements_of(int64_t block)
{
    return std::is_same_v<Element, float> ? block : BlockHeader::kSize + block;
}

template <typename Element>
class Product
{
public:
    Product(DflashTrtFourBitLinear const& arguments, RowsOf<Element> const& x)
        : a_(arguments)
        , layer_{arguments.codes, arguments.num_in, arguments.block}
        , table_(arguments.values)
        , x_(x)
    {
    }

    /// All rows, in parts of the panels that the threads share. A panel stays in the first cache while the rows pass by.
    void run() const
    {
        int64_t const panels = (a_.num_out + kPanel - 1) / kPanel;
        int64_t const num_parts = std::min<int64_t>(a_.num_threads, panels);
        int64_t const num_tiles = (x_.count + kMostRows<Element> - 1) / kMostRows<Element>;
        int64_t const at_once = num_tiles > 1 ? 1 : panels;
#pragma omp parallel for num_threads(num_parts) if (num_parts > 1)
        for (int64_t part = 0; part < num_parts; ++part)
        {
            int64_t const stop = panels * (part + 1) / num_parts;
            for (int64_t panel = panels * part / num_parts; panel < stop; panel += at_once)
            {
                int64_t const end = std::min(panel + at_once, stop);
                for (int64_t tile = 0, row = 0; tile < num_tiles; ++tile)
                {
                    int64_t const left = num_tiles - tile, count = (x_.count - row + left - 1) / left;
                    multiply<kMostRows<Element>>(row, count, panel * kVectors, end * kVectors);
                    row += count;
                }
            }
        }
    }

private:
    /// `count` rows from `row` on, at most kRows, with vectors of outputs.
    template <int kRows>
    void multiply(int64_t row, int64_t count, int64_t start, int64_t stop) const
    {
        if constexpr (kRows > 1)
        {
            if (count < kRows)
            {
                return multiply<kRows - 1>(row, count, start, stop);
            }
        }
        constexpr int kColumns = columns_of<Element>(kRows);
        int64_t column = start;
        for (; column + kColumns <= stop; column += kColumns)
        {
            multiply_tile<kRows, kColumns>(row, column);
        }
        if constexpr (kVectors % kColumns != 0)
        {
            for (; column < stop; ++column)
            {
                multiply_tile<kRows, 1>(row, column);
            }
        }
    }

    template <int kRows, int kColumns>
    void multiply_tile(int64_t row, int64_t column) const
    {
        Vec sums[kRows][kColumns];
#pragma GCC unroll 16
        for (auto& of_row : sums)
        {
#pragma GCC unroll 8
            for (Vec& sum : of_row)
            {
                sum = broadcast(0.0F);
            }
        }
        Outputs const first = Outputs::of(layer_, column);
        Element const* x = x_.first + row * x_.stride;
        for (int64_t i = 0; i < a_.num_in / a_.block; ++i, x += elements_of<Element>(a_.block))
        {
            multiply_block(first.after(i * layer_.block_bytes()), a_.block, table_, x, x_.stride, sums);
        }
        write(row, column * kLanes, sums);
    }

    template <int kRows, int kColumns>
    void write(int64_t row, int64_t first, Vec const (&sums)[kRows][kColumns]) const
    {
        int64_t const count = std::min<int64_t>(kColumns * kLanes, a_.num_out - first);
        float values[kRows][kColumns * kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i)
        {
#pragma GCC unroll 8
            for (int column = 0; column < kColumns; ++column)
            {
                store(values[i] + column * kLanes, sums[i][column]);
            }
        }
        for (int i = 0; i < kRows; ++i)
        {
            float* const out = a_.out + (row + i) * a_.num_out + first;
            for (int64_t column = 0; column < count; ++column)
            {
                float const value = values[i][column];
                float const scaled = a_.scales == nullptr ? value : value * a_.scales[first + column];
                out[column] = a_.bias == nullptr ? scaled : scaled + a_.bias[first + column];
            }
        }
    }

    DflashTrtFourBitLinear const& a_;
    FourBits layer_;
    CodeTable table_;
    RowsOf<Element> x_;
};

} // namespace
} // namespace dflash_trt

using namespace dflash_trt;

void dflash_trt_cpu_pack_four_bits(
    uint8_t const* codes, uint16_t const* scales, int64_t num_out, int64_t num_in, int64_t block, uint8_t* packed)
{
    FourBits const layer{packed, num_in, block};
    int64_t const num_panels = (num_out + kPanel - 1) / kPanel, num_blocks = num_in / block, num_bytes = block / 2;
    std::memset(packed, 0, num_panels * layer.panel_bytes());
    for (int64_t panel = 0; panel < num_panels; ++panel)
    {
        int64_t const first = panel * kPanel, count = std::min<int64_t>(kPanel, num_out - first);
        for (int64_t i = 0; i < num_blocks; ++i)
        {
            uint8_t* const to = packed + panel * layer.panel_bytes() + i * layer.block_bytes();
            for (int64_t out = 0; out < count; ++out)
            {
                std::memcpy(to + out * sizeof(BFloat16), scales + (first + out) * num_blocks + i, sizeof(BFloat16));
                uint8_t const* const from = codes + ((first + out) * num_blocks + i) * num_bytes;
                uint8_t* group = to + kScaleBytes + out * 4;
                for (int64_t byte = 0; byte < num_bytes; byte += 4, group += kGroupBytes)
                {
                    for (int e = 0; e < 4; ++e)
                    {
                        int const shift = e % 2 * 4;
                        int const low = from[byte + e / 2] >> shift & 15, high = from[byte + 2 + e / 2] >> shift & 15;
                        group[e] = static_cast<uint8_t>(low | high << 4);
                    }
                }
            }
        }
    }
}

void dflash_trt_cpu_four_bit_linear(DflashTrtFourBitLinear const* arguments)
{
    DflashTrtFourBitLinear const& a = *arguments;
    if (a.block_scales != nullptr)
    {
        return multiply_stored(a);
    }
    if (a.rounds_inputs)
    {
        thread_local CodedBlocks coded;
        coded.fill(a.x, a.num_rows, a.num_in, a.block);
        return Product<int8_t>(a, coded.rows()).run();
    }
    Product<float>(a, {a.x, a.num_in, a.num_rows}).run();
}
