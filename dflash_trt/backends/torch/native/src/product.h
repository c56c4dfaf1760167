/// The matrix product of a few rows, of which every sum is made in the order of the inner dimension, one fused
/// multiply-add after the other: the bits of a row do not depend on the rows beside it.
#pragma once

#include "simd.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace dflash_trt
{

constexpr int kPanel = 32; // columns of the right operand that lie beside one another
constexpr int kVectors = kPanel / kLanes;

/// Of activations in a tile.
template <typename Element>
constexpr int kMaxRows = std::is_same_v<Element, Code> ? kTiles.code_rows : kTiles.rows;

constexpr int kRowsAhead = 64; // of a panel of weights: 8 KiB in pairs, beyond the page where the CPU's own prefetcher stops

/// Columns of a right operand [depth, columns], in panels.
template <typename Weight>
struct Panels
{
    Weight const* first;
    int64_t row_stride;   // elements from one row of a panel to the next
    int64_t panel_stride; // elements from one panel to the next
};

/// Rows of a left operand; of pairs, two elements are one.
template <typename Element>
struct RowsOf
{
    Element const* first;
    int64_t stride;
    int64_t count;
};

using Rows = RowsOf<float>;

/// Where products go, which are added to what `start` has.
struct Sums
{
    float* first;
    int64_t stride;
    float const* start; // null: zeros
    int64_t start_stride;

    Sums below(int64_t rows) const { return moved(rows * stride, rows * start_stride); }
    Sums beside(int64_t columns) const { return moved(columns, columns); }

private:
    Sums moved(int64_t by, int64_t start_by) const
    {
        return {first + by, stride, start == nullptr ? nullptr : start + start_by, start_stride};
    }
};

/// Vectors of columns that a tile of some rows multiplies at once: of several panels where there are sums to spare, or
/// a part of a panel.
constexpr int columns_at_once(int rows)
{
    return rows <= kTiles.rows_of_eight ? 8 : rows <= kTiles.rows_of_four ? 4 : 2;
}

/// What the tile reads later, and the other parts of its panel. Few rows pass faster than the first cache fills: for them
/// the second cache is best.
template <int kColumns, typename Weight>
inline void prefetch(Weight const* row, int64_t panel_stride)
{
    constexpr int kPanels = kColumns > kVectors ? kColumns / kVectors : 1;
    constexpr int kLocality = kPanels > 1 ? 2 : 3;
    for (int panel = 0; panel < kPanels; ++panel)
    {
        for (int part = 0; part < kPanel; part += 64 / static_cast<int>(sizeof(Weight)))
        {
            __builtin_prefetch(row + panel * panel_stride + kRowsAhead / kPanels * kPanel + part, 0, kLocality);
        }
    }
}

/// The sums of some rows and vectors of columns.
template <int kRows, int kColumns>
struct Tile
{
    Vec sums[kRows][kColumns];

    explicit Tile(Sums const& out)
    {
        each([&](int row, int column) {
            int64_t const at = row * out.start_stride + column * kLanes;
            sums[row][column] = out.start == nullptr ? broadcast(0.0F) : load(out.start + at);
        });
    }

    void write(Sums const& out) const
    {
        each([&](int row, int column) { store(out.first + row * out.stride + column * kLanes, sums[row][column]); });
    }

    /// One element of each row, at a, times a row of the panels.
    template <typename Load>
    void add(float const* a, int64_t stride, Load const& weights_of)
    {
        Vec w[kColumns];
#pragma GCC unroll 16
        for (int column = 0; column < kColumns; ++column)
        {
            w[column] = weights_of(column);
        }
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row)
        {
            Vec const x = broadcast(a[row * stride]);
#pragma GCC unroll 16
            for (int column = 0; column < kColumns; ++column)
            {
                sums[row][column] = fma(x, w[column], sums[row][column]);
            }
        }
    }

private:
    template <typename Visit>
    static void each(Visit const& visit)
    {
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row)
        {
#pragma GCC unroll 16
            for (int column = 0; column < kColumns; ++column)
            {
                visit(row, column);
            }
        }
    }
};

template <typename Weight>
inline Weight const* vector_of(Weight const* row, int64_t panel_stride, int column)
{
    return row + column / kVectors * panel_stride + column % kVectors * kLanes;
}

template <int kRows, int kColumns, typename Weight>
inline void multiply_tile(float const* a, int64_t stride, Panels<Weight> const& b, int64_t depth, Sums const& out)
{
    Tile<kRows, kColumns> tile(out);
    Weight const* row = b.first;
    for (int64_t k = 0; k < depth; ++k, row += b.row_stride)
    {
        tile.add(a + k, stride, [&](int column) { return load(vector_of(row, b.panel_stride, column)); });
    }
    tile.write(out);
}

template <int kRows, int kColumns>
inline void multiply_tile(float const* a, int64_t stride, Panels<Pair> const& b, int64_t depth, Sums const& out)
{
    Tile<kRows, kColumns> tile(out);
    Pair const* row = b.first;
    int64_t k = 0;
    for (; k + 1 < depth; k += 2, row += b.row_stride)
    {
        prefetch<kColumns>(row, b.panel_stride);
        tile.add(a + k, stride, [&](int column) { return load_firsts(vector_of(row, b.panel_stride, column)); });
        tile.add(a + k + 1, stride, [&](int column) { return load_seconds(vector_of(row, b.panel_stride, column)); });
    }
    if (k < depth)
    {
        tile.add(a + k, stride, [&](int column) { return load_firsts(vector_of(row, b.panel_stride, column)); });
    }
    tile.write(out);
}

#if defined(__AVX512BF16__)

/// bfloat16 times bfloat16, two products to a sum at a time; `depth` is even.
template <int kRows, int kColumns>
inline void multiply_tile(Pair const* a, int64_t stride, Panels<Pair> const& b, int64_t depth, Sums const& out)
{
    Tile<kRows, kColumns> tile(out);
    Pair const* row = b.first;
    for (int64_t k = 0; k < depth / 2; ++k, row += b.row_stride)
    {
        prefetch<kColumns>(row, b.panel_stride);
        Bits w[kColumns];
#pragma GCC unroll 16
        for (int column = 0; column < kColumns; ++column)
        {
            w[column] = load_bits(vector_of(row, b.panel_stride, column));
        }
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i)
        {
            Bits const x = broadcast_bits(a + i * stride + k);
#pragma GCC unroll 16
            for (int column = 0; column < kColumns; ++column)
            {
                tile.sums[i][column] = dot_pairs(x, w[column], tile.sums[i][column]);
            }
        }
    }
    tile.write(out);
}

#endif

/// At most kRows rows times panels.
template <int kRows, typename Element, typename Weight, typename Out>
inline void multiply_panels(RowsOf<Element> const& a, Panels<Weight> b, int64_t num_panels, int64_t depth, Out out)
{
    if constexpr (kRows > 1)
    {
        if (a.count < kRows)
        {
            return multiply_panels<kRows - 1>(a, b, num_panels, depth, out);
        }
    }
    constexpr int kColumns = columns_at_once(kRows), kPart = std::min(kColumns, kVectors);
    constexpr int kPanels = kColumns / kVectors;
    int64_t panel = 0;
    for (; kPanels > 1 && panel + kPanels <= num_panels; panel += kPanels)
    {
        multiply_tile<kRows, kColumns>(a.first, a.stride, b, depth, out);
        b.first += kPanels * b.panel_stride;
        out = out.beside(kPanels * kPanel);
    }
    for (; panel < num_panels; ++panel)
    {
        for (int part = 0; part < kPanel; part += kPart * kLanes)
        {
            Panels<Weight> const some{b.first + part, b.row_stride, b.panel_stride};
            multiply_tile<kRows, kPart>(a.first, a.stride, some, depth, out.beside(part));
        }
        b.first += b.panel_stride;
        out = out.beside(kPanel);
    }
}

/// a [count, depth] times b [depth, num_panels * kPanel], in tiles of about as many rows each.
template <typename Element, typename Weight, typename Out>
inline void multiply(RowsOf<Element> a, Panels<Weight> const& b, int64_t num_panels, int64_t depth, Out out)
{
    int64_t const num_tiles = (a.count + kMaxRows<Element> - 1) / kMaxRows<Element>;
    for (int64_t tile = 0; tile < num_tiles; ++tile)
    {
        int64_t const left = num_tiles - tile;
        RowsOf<Element> const some{a.first, a.stride, (a.count + left - 1) / left};
        multiply_panels<kMaxRows<Element>>(some, b, num_panels, depth, out);
        a.first += some.count * a.stride;
        a.count -= some.count;
        out = out.below(some.count);
    }
}

} // namespace dflash_trt
