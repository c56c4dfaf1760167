/// The product of a few rows with weights of four bits as a checkpoint stores them: codes [out, in / 2], the first of two in
/// the low bits. They are read from where they lie, such as a mapped file, so that nothing is laid out when an engine is
/// opened: for experts, of which a step reads few. Vectors go along the inputs, in the same order in every instruction set.
#include "four_bits.h"

#include <algorithm>
#include <vector>

namespace dflash_trt
{
namespace
{

constexpr int kInputs = 32; // that are multiplied at once, of one block or of two
constexpr int kHalf = kInputs / 2;
constexpr int kMostRows = 4, kOutputs = 2; // of a tile

using Lanes = float __attribute__((vector_size(32)));
using Integers = int32_t __attribute__((vector_size(32)));
using Shorts = int16_t __attribute__((vector_size(32)));

#if defined(__ARM_NEON)

/// The values of the low and of the high codes of 16 bytes.
inline void look_up(uint8_t const* codes, int8_t const* values, Shorts& low, Shorts& high)
{
    uint8x16_t const bytes = vld1q_u8(codes);
    auto const wide_values = [table = vld1q_s8(values)](uint8x16_t at) {
        int8x16_t const found = vqtbl1q_s8(table, at);
        int16x8_t const halves[2]{vmovl_s8(vget_low_s8(found)), vmovl_high_s8(found)};
        Shorts wide;
        std::memcpy(&wide, halves, sizeof(wide));
        return wide;
    };
    low = wide_values(vandq_u8(bytes, vdupq_n_u8(15)));
    high = wide_values(vshrq_n_u8(bytes, 4));
}

/// Sums of two products each.
inline Integers products(Shorts a, Shorts b)
{
    int16x8_t x[2], y[2];
    std::memcpy(x, &a, sizeof(x));
    std::memcpy(y, &b, sizeof(y));
    int32x4_t sums[2];
    for (int i = 0; i < 2; ++i)
    {
        sums[i] = vpaddq_s32(vmull_s16(vget_low_s16(x[i]), vget_low_s16(y[i])), vmull_high_s16(x[i], y[i]));
    }
    Integers found;
    std::memcpy(&found, sums, sizeof(found));
    return found;
}

#else

/// The values of the low and of the high codes of 16 bytes.
inline void look_up(uint8_t const* codes, int8_t const* values, Shorts& low, Shorts& high)
{
    __m128i const bytes = _mm_loadu_si128(reinterpret_cast<__m128i const*>(codes)), mask = _mm_set1_epi8(15);
    __m128i const table = _mm_loadu_si128(reinterpret_cast<__m128i const*>(values));
    auto const wide_values = [&](__m128i at) {
        return reinterpret_cast<Shorts>(_mm256_cvtepi8_epi16(_mm_shuffle_epi8(table, at)));
    };
    low = wide_values(_mm_and_si128(bytes, mask));
    high = wide_values(_mm_and_si128(_mm_srli_epi16(bytes, 4), mask));
}

/// Sums of two products each.
inline Integers products(Shorts a, Shorts b)
{
    return reinterpret_cast<Integers>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}

#endif

/// A scale of MXFP4: two to the power of `exponent` - 127.
struct PowerOfTwo
{
    uint8_t exponent;
};

inline float as_float(PowerOfTwo x)
{
    uint32_t const bits = x.exponent == 0 ? 1U << 22 : static_cast<uint32_t>(x.exponent) << 23;
    float wide;
    std::memcpy(&wide, &bits, sizeof(wide));
    return wide;
}

template <typename Vector>
inline Vector loaded(void const* from)
{
    Vector found;
    std::memcpy(&found, from, sizeof(found));
    return found;
}

/// kInputs activations as integers of 16 bits: those of even places, then those of odd ones. A scale, of the first half of
/// the inputs or of the second, is half of what a code stands for.
struct CodedInputs
{
    float scales[8];
    int16_t codes[2][kHalf];

    void fill(float const* x, int64_t block)
    {
        int16_t in_order[kInputs];
        for (int64_t first = 0; first < kInputs; first += block)
        {
            std::fill_n(scales + first / 4, block / 4, code_block(x + first, block, in_order + first));
        }
        for (int i = 0; i < kInputs; ++i)
        {
            codes[i % 2][i / 2] = in_order[i];
        }
    }
};

/// Halves of kInputs activations in float32, in the same order.
struct PlainInputs
{
    float values[2][kHalf];

    void fill(float const* x, int64_t)
    {
        for (int i = 0; i < kInputs; ++i)
        {
            values[i % 2][i / 2] = 0.5F * x[i];
        }
    }
};

/// kInputs weights of an output, doubled, and the scales of both halves.
class Weights
{
public:
    /// With one scale for all, or one for each half.
    template <typename Scale, int kScales>
    Weights(uint8_t const* codes, Scale const (&scales)[kScales], int8_t const* values)
    {
        float const first = as_float(scales[0]), second = as_float(scales[kScales - 1]);
        scales_ = kScales == 1 ? first - Lanes{} : Lanes{first, first, first, first, second, second, second, second};
        look_up(codes, values, even_, odd_);
    }

    /// Products with activations, partly added up.
    Lanes times(CodedInputs const& x) const
    {
        Integers const sums = products(even_, loaded<Shorts>(x.codes[0])) + products(odd_, loaded<Shorts>(x.codes[1]));
        return __builtin_convertvector(sums, Lanes) * (scales_ * loaded<Lanes>(x.scales));
    }

    Lanes times(PlainInputs const& x) const { return of_half(x, 0) * scales_[0] + of_half(x, 1) * scales_[4]; }

private:
    Lanes of_half(PlainInputs const& x, int half) const
    {
        return floats(even_, half) * loaded<Lanes>(x.values[0] + 8 * half)
            + floats(odd_, half) * loaded<Lanes>(x.values[1] + 8 * half);
    }

    /// In two steps: one would take the integers apart.
    static Lanes floats(Shorts values, int half)
    {
        using Eight = int16_t __attribute__((vector_size(16)));
        Eight parts[2];
        std::memcpy(parts, &values, sizeof(parts));
        return __builtin_convertvector(__builtin_convertvector(parts[half], Integers), Lanes);
    }

    Shorts even_, odd_;
    Lanes scales_;
};

template <typename Inputs>
class Product
{
public:
    explicit Product(DflashTrtFourBitLinear const& arguments)
        : a_(arguments)
        , num_steps_(arguments.num_in / kInputs)
        , values_(arguments.values, 0)
    {
    }

    void run() const
    {
        thread_local std::vector<Inputs> inputs;
        inputs.resize(a_.num_rows * num_steps_);
        for (int64_t i = 0; i < a_.num_rows * num_steps_; ++i)
        {
            inputs[i].fill(a_.x + i * kInputs, a_.block);
        }
        Inputs const* const x = inputs.data();
        int64_t const pairs = (a_.num_out + kOutputs - 1) / kOutputs, parts = std::min<int64_t>(a_.num_threads, pairs);
#pragma omp parallel for num_threads(parts) if (parts > 1)
        for (int64_t part = 0; part < parts; ++part)
        {
            int64_t const stop = std::min(a_.num_out, pairs * (part + 1) / parts * kOutputs);
            for (int64_t out = pairs * part / parts * kOutputs; out < stop; out += kOutputs)
            {
                for (int64_t row = 0; row < a_.num_rows; row += kMostRows)
                {
                    multiply<kMostRows>(x + row * num_steps_, row, std::min<int64_t>(kMostRows, a_.num_rows - row), out);
                }
            }
        }
    }

private:
    /// `count` rows, at most kRows, with the outputs from `first` on.
    template <int kRows>
    void multiply(Inputs const* x, int64_t row, int64_t count, int64_t first) const
    {
        if constexpr (kRows > 1)
        {
            if (count < kRows)
            {
                return multiply<kRows - 1>(x, row, count, first);
            }
        }
        if (a_.has_powers)
        {
            return multiply_tile<kRows, PowerOfTwo[1]>(x, row, first);
        }
        return a_.block < kInputs ? multiply_tile<kRows, BFloat16[2]>(x, row, first)
                                  : multiply_tile<kRows, BFloat16[1]>(x, row, first);
    }

    /// `Scales` of kInputs inputs. The last output of an odd number is computed twice.
    template <int kRows, typename Scales>
    void multiply_tile(Inputs const* x, int64_t row, int64_t first) const
    {
        int64_t const outs[kOutputs] = {first, std::min(first + 1, a_.num_out - 1)};
        Lanes sums[kRows][kOutputs] = {};
        auto const* const scales = reinterpret_cast<Scales const*>(a_.block_scales);
        for (int64_t step = 0; step < num_steps_; ++step, ++x)
        {
#pragma GCC unroll 2
            for (int i = 0; i < kOutputs; ++i)
            {
                int64_t const at = outs[i] * num_steps_ + step;
                Weights const weights(a_.codes + at * kHalf, scales[at], values_.bytes);
#pragma GCC unroll 4
                for (int j = 0; j < kRows; ++j)
                {
                    sums[j][i] += weights.times(x[j * num_steps_]);
                }
            }
        }
        for (int j = 0; j < kRows; ++j)
        {
            for (int i = 0; i < kOutputs; ++i)
            {
                write(row + j, outs[i], sums[j][i]);
            }
        }
    }

    void write(int64_t row, int64_t out, Lanes const& sums) const
    {
        float total = 0.0F;
        for (int lane = 0; lane < 8; ++lane)
        {
            total += sums[lane];
        }
        float const scaled = a_.scales == nullptr ? total : total * a_.scales[out];
        a_.out[row * a_.num_out + out] = a_.bias == nullptr ? scaled : scaled + a_.bias[out];
    }

    DflashTrtFourBitLinear const& a_;
    int64_t num_steps_;
    DoubledValues values_;
};

} // namespace

void multiply_stored(DflashTrtFourBitLinear const& arguments)
{
    return arguments.rounds_inputs ? Product<CodedInputs>(arguments).run() : Product<PlainInputs>(arguments).run();
}

} // namespace dflash_trt
