#include "codes.h"
#include "kernels.h"

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

int64_t num_code_groups(int64_t num_in)
{
    return (num_in + kCodes - 1) / kCodes;
}

constexpr int32_t kBfloat16 = 1, kRounded = 2, kCoded = 3; // forms of x

/// A layer whose activations are of a type: float, pairs of bfloat16, or codes.
template <typename Element>
struct Layer
{
    static constexpr bool kIsCoded = std::is_same_v<Element, Code>;
    using Weight = std::conditional_t<kIsCoded, Codes, Pair>;

    DflashTrtLinear const& a;

    Panels<Weight> from_panel(int64_t panel) const
    {
        int64_t const stride = (kIsCoded ? num_code_groups(a.num_in) : num_pairs(a.num_in)) * kPanel;
        return {static_cast<Weight const*>(a.packed) + panel * stride, kPanel, stride};
    }

    /// What panels write whose first output has this scale and this bias.
    static auto outputs(float* to, int64_t stride, float const* scales, float const* bias)
    {
        if constexpr (kIsCoded)
        {
            return ScaledSums{to, stride, scales, bias};
        }
        else
        {
            return Sums{to, stride, bias, 0};
        }
    }

    /// The last panel, of fewer columns than it has room for.
    void multiply_last(RowsOf<Element> const& x, int64_t panel, float* out) const
    {
        int64_t const first = panel * kPanel, num_columns = a.num_out - first;
        float scales[kPanel] = {}, bias[kPanel] = {}, sums[kPanel];
        std::copy_n(a.scales + first, a.scales == nullptr ? 0 : num_columns, scales);
        std::copy_n(a.bias + first, a.bias == nullptr ? 0 : num_columns, bias);
        for (int64_t row = 0; row < x.count; ++row)
        {
            RowsOf<Element> const one{x.first + row * x.stride, x.stride, 1};
            multiply(one, from_panel(panel), 1, a.num_in, outputs(sums, kPanel, scales, bias));
            std::copy_n(sums, num_columns, out + row * a.num_out + first);
        }
    }

    /// Panels [start, stop) of some rows.
    void multiply_some(RowsOf<Element> const& x, float* out, int64_t start, int64_t stop) const
    {
        int64_t const stop_whole = std::min(stop, a.num_out / kPanel);
        auto const whole = outputs(out, a.num_out, a.scales, a.bias).beside(start * kPanel);
        multiply(x, from_panel(start), stop_whole - start, a.num_in, whole);
        if (stop_whole < stop)
        {
            multiply_last(x, stop_whole, out);
        }
    }

    /// All rows, in parts of the panels that the threads share.
    void run(RowsOf<Element> const& x) const
    {
        int64_t const panels = num_panels(a.num_out);
        int64_t const num_parts = std::min<int64_t>(a.num_threads, panels);
#pragma omp parallel for num_threads(num_parts) if (num_parts > 1)
        for (int64_t part = 0; part < num_parts; ++part)
        {
            int64_t const start = panels * part / num_parts, stop = panels * (part + 1) / num_parts;
            for (int64_t row = 0; row < x.count; row += kRowsAtOnce)
            {
                RowsOf<Element> const some{x.first + row * x.stride, x.stride, std::min(x.count - row, kRowsAtOnce)};
                // A panel stays in the first cache while all of these rows pass by, unless they are a single tile.
                int64_t const step = some.count <= kMaxRows<Element> ? stop - start : 1;
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
    return 6;
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

void dflash_trt_cpu_pack_codes(int8_t const* codes, int64_t num_out, int64_t num_in, uint8_t* packed)
{
    int64_t const panel_size = num_code_groups(num_in) * kPanel * kCodes;
    std::fill_n(packed, num_panels(num_out) * panel_size, uint8_t{kZero});
    for (int64_t row = 0; row < num_out; ++row)
    {
        uint8_t* const to = packed + row / kPanel * panel_size + row % kPanel * kCodes;
        for (int64_t column = 0; column < num_in; ++column)
        {
            int const code = codes[row * num_in + column] + kZero;
            to[column / kCodes * kPanel * kCodes + column % kCodes] = static_cast<uint8_t>(code);
        }
    }
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
#if defined(__AVX512BF16__)
    if (a.form == kBfloat16)
    {
        return Layer<Pair>{a}.run({static_cast<Pair const*>(a.x), a.num_in / 2, a.num_rows});
    }
    if (a.form == kRounded)
    {
        thread_local std::vector<Pair> rounded;
        rounded.resize(a.num_rows * a.num_in / 2);
        round_rows(static_cast<float const*>(a.x), a.num_rows * a.num_in, &rounded.data()->first);
        return Layer<Pair>{a}.run({rounded.data(), a.num_in / 2, a.num_rows});
    }
#endif
    auto const* const x = static_cast<float const*>(a.x);
    if (a.form == kCoded)
    {
        thread_local CodedRows coded;
        coded.fill(x, a.num_rows, a.num_in);
        return Layer<Code>{a}.run(coded.rows());
    }
    Layer<float>{a}.run({x, a.num_in, a.num_rows});
}
