#include "kernels.h"
#include "product.h"

#include <cstring>

namespace dflash_trt
{
namespace
{

constexpr int64_t kRowsAtOnce = 240; // of activations, to stay in the CPU's cache while all panels pass by

int64_t num_panels(int64_t num_out)
{
    return (num_out + kPanel - 1) / kPanel;
}

struct Linear
{
    uint16_t const* packed;
    int64_t num_out;
    int64_t num_in;
    float const* bias;

    /// Panels [start, stop) of some rows.
    void multiply_some(Rows const& x, int64_t start, int64_t stop, float* out) const
    {
        Panels<uint16_t> const weights{packed + start * num_in * kPanel, kPanel, num_in * kPanel};
        multiply(x, weights, stop - start, num_in, Sums{out, num_out, bias != nullptr});
    }

    /// The last panel, of fewer columns than it has room for.
    void multiply_last(Rows const& x, int64_t panel, float* out) const
    {
        Panels<uint16_t> const weights{packed + panel * num_in * kPanel, kPanel, num_in * kPanel};
        int64_t const num_columns = num_out - panel * kPanel;
        for (int64_t row = 0; row < x.count; ++row)
        {
            float* const to = out + row * num_out;
            float sums[kPanel] = {};
            std::memcpy(sums, to, bias == nullptr ? 0 : num_columns * sizeof(float));
            multiply(Rows{x.first + row * x.stride, x.stride, 1}, weights, 1, num_in, Sums{sums, kPanel, bias != nullptr});
            std::memcpy(to, sums, num_columns * sizeof(float));
        }
    }

    void run(Rows const& x, float* out, int64_t start, int64_t stop) const
    {
        int64_t const num_whole = num_out / kPanel;
        int64_t const stop_whole = stop < num_whole ? stop : num_whole;
        int64_t const stop_column = stop * kPanel < num_out ? stop * kPanel : num_out;
        for (int64_t row = 0; row < x.count && bias != nullptr; ++row)
        {
            std::memcpy(out + row * num_out + start * kPanel, bias + start * kPanel,
                (stop_column - start * kPanel) * sizeof(float));
        }
        multiply_some(x, start, stop_whole, out + start * kPanel);
        if (stop_whole < stop)
        {
            multiply_last(x, stop_whole, out + stop_whole * kPanel);
        }
    }
};

} // namespace
} // namespace dflash_trt

using namespace dflash_trt;

int32_t dflash_trt_cpu_version()
{
    return 3;
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
    std::memset(packed, 0, num_panels(num_out) * num_in * kPanel * sizeof(uint16_t));
    for (int64_t row = 0; row < num_out; ++row)
    {
        uint16_t* const to = packed + row / kPanel * num_in * kPanel + place_in_panel(row % kPanel);
        for (int64_t column = 0; column < num_in; ++column)
        {
            uint32_t bits;
            std::memcpy(&bits, weight + row * num_in + column, sizeof(bits));
            lost |= bits;
            to[column * kPanel] = static_cast<uint16_t>(bits >> 16);
        }
    }
    return (lost & 0xFFFFU) == 0 ? 1 : 0;
}

void dflash_trt_cpu_linear(DflashTrtLinear const* arguments)
{
    DflashTrtLinear const& a = *arguments;
    Linear const linear{a.packed, a.num_out, a.num_in, a.bias};
    int64_t const panels = num_panels(a.num_out);
    int64_t const num_parts = a.num_threads < panels ? a.num_threads : panels;
#pragma omp parallel for num_threads(num_parts) if (num_parts > 1)
    for (int64_t part = 0; part < num_parts; ++part)
    {
        int64_t const start = panels * part / num_parts, stop = panels * (part + 1) / num_parts;
        for (int64_t row = 0; row < a.num_rows; row += kRowsAtOnce)
        {
            int64_t const left = a.num_rows - row;
            Rows const some{a.x + row * a.num_in, a.num_in, left < kRowsAtOnce ? left : kRowsAtOnce};
            // A panel stays in the first cache while all of these rows pass by, unless they are a single tile.
            int64_t const step = some.count <= kMaxRows ? stop - start : 1;
            for (int64_t panel = start; panel < stop; panel += step)
            {
                linear.run(some, a.out + row * a.num_out, panel, panel + step);
            }
        }
    }
}
