#include "kernels.h"
#include "product.h"

#include <cstring>
#include <vector>

namespace dflash_trt
{
namespace
{

constexpr int64_t kRowsAtOnce = 240; // of activations, to stay in the CPU's cache while all panels pass by

int64_t num_panels(int64_t num_out)
{
    return (num_out + kPanel - 1) / kPanel;
}

int64_t num_pairs(int64_t num_in)
{
    return (num_in + 1) / 2;
}

#if defined(__AVX512BF16__)

constexpr int32_t kBfloat16 = 1, kRounded = 2; // forms of x

#endif

struct Layer
{
    DflashTrtLinear const& a;

    Panels<Pair> from_panel(int64_t panel) const
    {
        int64_t const stride = num_pairs(a.num_in) * kPanel;
        return {reinterpret_cast<Pair const*>(a.packed) + panel * stride, kPanel, stride};
    }

    /// The last panel, of fewer columns than it has room for.
    template <typename Element>
    void multiply_last(RowsOf<Element> const& x, int64_t panel, float* out) const
    {
        int64_t const num_columns = a.num_out - panel * kPanel;
        for (int64_t row = 0; row < x.count; ++row)
        {
            float* const to = out + row * a.num_out;
            float sums[kPanel] = {};
            std::memcpy(sums, to, a.bias == nullptr ? 0 : num_columns * sizeof(float));
            RowsOf<Element> const one{x.first + row * x.stride, x.stride, 1};
            multiply(one, from_panel(panel), 1, a.num_in, Sums{sums, kPanel, a.bias != nullptr});
            std::memcpy(to, sums, num_columns * sizeof(float));
        }
    }

    /// Panels [start, stop) of some rows.
    template <typename Element>
    void multiply_some(RowsOf<Element> const& x, float* out, int64_t start, int64_t stop) const
    {
        int64_t const num_whole = a.num_out / kPanel, first = start * kPanel;
        int64_t const stop_whole = stop < num_whole ? stop : num_whole;
        int64_t const stop_column = stop * kPanel < a.num_out ? stop * kPanel : a.num_out;
        for (int64_t row = 0; row < x.count && a.bias != nullptr; ++row)
        {
            std::memcpy(out + row * a.num_out + first, a.bias + first, (stop_column - first) * sizeof(float));
        }
        multiply(x, from_panel(start), stop_whole - start, a.num_in, Sums{out + first, a.num_out, a.bias != nullptr});
        if (stop_whole < stop)
        {
            multiply_last(x, stop_whole, out + stop_whole * kPanel);
        }
    }

    /// All rows, in parts of the panels that the threads share.
    template <typename Element>
    void run(RowsOf<Element> const& x) const
    {
        int64_t const panels = num_panels(a.num_out);
        int64_t const num_parts = a.num_threads < panels ? a.num_threads : panels;
#pragma omp parallel for num_threads(num_parts) if (num_parts > 1)
        for (int64_t part = 0; part < num_parts; ++part)
        {
            int64_t const start = panels * part / num_parts, stop = panels * (part + 1) / num_parts;
            for (int64_t row = 0; row < x.count; row += kRowsAtOnce)
            {
                int64_t const left = x.count - row;
                RowsOf<Element> const some{x.first + row * x.stride, x.stride, left < kRowsAtOnce ? left : kRowsAtOnce};
                // A panel stays in the first cache while all of these rows pass by, unless they are a single tile.
                int64_t const step = some.count <= kMaxRows ? stop - start : 1;
                for (int64_t panel = start; panel < stop; panel += step)
                {
                    multiply_some(some, a.out + row * a.num_out, panel, panel + step);
                }
            }
        }
    }
};

} // namespace
} // namespace dflash_trt

using namespace dflash_trt;

int32_t dflash_trt_cpu_version()
{
    return 4;
}

void dflash_trt_cpu_run(DflashTrtCall const* calls, int64_t num_calls)
{
    for (int64_t i = 0; i < num_calls; ++i)
    {
        calls[i].kernel(calls[i].arguments);
    }
}

int32_t dflash_trt_cpu_pack(float const* weight, int64_t num_out, int64_t num_in, uint16_t* packed)
{
    uint32_t lost = 0;
    int64_t const panel_size = num_pairs(num_in) * kPanel * 2;
    std::memset(packed, 0, num_panels(num_out) * panel_size * sizeof(uint16_t));
    for (int64_t row = 0; row < num_out; ++row)
    {
        uint16_t* const to = packed + row / kPanel * panel_size + row % kPanel * 2;
        for (int64_t column = 0; column < num_in; ++column)
        {
            uint32_t bits;
            std::memcpy(&bits, weight + row * num_in + column, sizeof(bits));
            lost |= bits;
            to[column / 2 * kPanel * 2 + column % 2] = static_cast<uint16_t>(bits >> 16);
        }
    }
    return (lost & 0xFFFFU) == 0 ? 1 : 0;
}

int32_t dflash_trt_cpu_has_bfloat16()
{
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

void dflash_trt_cpu_linear(DflashTrtLinear const* arguments)
{
    DflashTrtLinear const& a = *arguments;
    Layer const layer{a};
#if defined(__AVX512BF16__)
    if (a.form == kBfloat16)
    {
        return layer.run(RowsOf<Pair>{static_cast<Pair const*>(a.x), a.num_in / 2, a.num_rows});
    }
    if (a.form == kRounded)
    {
        thread_local std::vector<Pair> rounded;
        rounded.resize(a.num_rows * a.num_in / 2);
        round_rows(static_cast<float const*>(a.x), a.num_rows * a.num_in, &rounded.data()->first);
        return layer.run(RowsOf<Pair>{rounded.data(), a.num_in / 2, a.num_rows});
    }
#endif
    layer.run(Rows{static_cast<float const*>(a.x), a.num_in, a.num_rows});
}
