/// The matrix product of a few rows, of which every sum is made in the order of the inner dimension, one fused
/// multiply-add after the other: the bits of a row do not depend on the rows beside it.
#pragma once

#include "simd.h"

#include <cstdint>

namespace dflash_trt
{

constexpr int kPanel = 32; // columns of the right operand that lie beside one another
constexpr int kVectors = kPanel / kLanes;
constexpr int kMaxRows = kLanes == 16 ? 12 : 3; // sums of a tile, its operands and no more than the registers

constexpr int kRowsAhead = 128; // of a panel of weights: 8 KiB, beyond the page where the CPU's own prefetcher stops

/// Where a panel of a layer's weights has a column: two vectors are read as one, of pairs (see `load_pair`).
constexpr int64_t place_in_panel(int64_t column)
{
    return column / (2 * kLanes) * 2 * kLanes + column % kLanes * 2 + column / kLanes % 2;
}

/// Columns of a right operand [depth, columns], in panels.
template <typename Weight>
struct Panels
{
    Weight const* first;
    int64_t row_stride;   // elements from one row of a panel to the next
    int64_t panel_stride; // elements from one panel to the next
};

struct Rows
{
    float const* first;
    int64_t stride;
    int64_t count;
};

struct Sums
{
    float* first;
    int64_t stride;
    bool accumulates; // adds to what is there
};

/// Panels that few rows multiply at once, as they have sums to spare.
constexpr int panels_at_once(int rows)
{
    return kLanes == 16 ? (rows <= 2 ? 4 : rows <= 4 ? 2 : 1) : (rows == 1 ? 2 : 1);
}

template <int kRows, int kPanels, typename Weight>
inline void multiply_tile(float const* a, int64_t stride, Panels<Weight> const& b, int64_t depth, Sums const& out)
{
    constexpr int kColumns = kPanels * kVectors;
    Vec sums[kRows][kColumns];
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row)
    {
#pragma GCC unroll 16
        for (int column = 0; column < kColumns; ++column)
        {
            float const* const start = out.first + row * out.stride + column * kLanes;
            sums[row][column] = out.accumulates ? load(start) : broadcast(0.0F);
        }
    }
    Weight const* weights = b.first;
    for (int64_t k = 0; k < depth; ++k, weights += b.row_stride)
    {
        Vec w[kColumns];
#pragma GCC unroll 16
        for (int column = 0; column < kColumns; column += 2)
        {
            Weight const* const from = weights + column / kVectors * b.panel_stride + column % kVectors * kLanes;
            if (sizeof(Weight) == 2 && column % kVectors == 0) // of a layer, that is read from memory
            {
                __builtin_prefetch(from + kRowsAhead * kPanel);
            }
            load_pair(from, w[column], w[column + 1]);
        }
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row)
        {
            Vec const x = broadcast(a[row * stride + k]);
#pragma GCC unroll 16
            for (int column = 0; column < kColumns; ++column)
            {
                sums[row][column] = fma(x, w[column], sums[row][column]);
            }
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row)
    {
#pragma GCC unroll 16
        for (int column = 0; column < kColumns; ++column)
        {
            store(out.first + row * out.stride + column * kLanes, sums[row][column]);
        }
    }
}

/// At most kMaxRows rows times panels.
template <int kRows, typename Weight>
inline void multiply_panels(Rows const& a, Panels<Weight> b, int64_t num_panels, int64_t depth, Sums out)
{
    if constexpr (kRows > 1)
    {
        if (a.count < kRows)
        {
            return multiply_panels<kRows - 1>(a, b, num_panels, depth, out);
        }
    }
    constexpr int kPanels = panels_at_once(kRows);
    int64_t panel = 0;
    for (; panel + kPanels <= num_panels; panel += kPanels)
    {
        multiply_tile<kRows, kPanels>(a.first, a.stride, b, depth, out);
        b.first += kPanels * b.panel_stride;
        out.first += kPanels * kPanel;
    }
    for (; panel < num_panels; ++panel)
    {
        multiply_tile<kRows, 1>(a.first, a.stride, b, depth, out);
        b.first += b.panel_stride;
        out.first += kPanel;
    }
}

/// a [count, depth] times b [depth, num_panels * kPanel], in tiles of about as many rows each.
template <typename Weight>
inline void multiply(Rows a, Panels<Weight> const& b, int64_t num_panels, int64_t depth, Sums out)
{
    int64_t const num_tiles = (a.count + kMaxRows - 1) / kMaxRows;
    for (int64_t tile = 0; tile < num_tiles; ++tile)
    {
        int64_t const left = num_tiles - tile;
        Rows const some{a.first, a.stride, (a.count + left - 1) / left};
        multiply_panels<kMaxRows>(some, b, num_panels, depth, out);
        a.first += some.count * a.stride;
        a.count -= some.count;
        out.first += some.count * out.stride;
    }
}

} // namespace dflash_trt
