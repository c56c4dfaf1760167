/// Vectors of float32 in the instruction set that this library is compiled for; nothing else knows which one it is, but
/// transpose.h, and what multiplies bfloat16.
/// A library holds one instruction set, so that no inline function of another one can be linked in its place.
#pragma once

#if defined(__ARM_NEON)
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstring>

namespace dflash_trt
{

/// The upper half of a float32.
struct BFloat16
{
    uint16_t bits;
};

inline float as_float(float x)
{
    return x;
}

inline float as_float(BFloat16 x)
{
    uint32_t const bits = static_cast<uint32_t>(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof(wide));
    return wide;
}

/// To nearest even; NaN stays NaN.
inline BFloat16 rounded_to_bfloat16(float x)
{
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    uint32_t const rounded = std::isnan(x) ? bits | 0x400000U : bits + 0x7FFFU + (bits >> 16 & 1U);
    return {static_cast<uint16_t>(rounded >> 16)};
}

/// The sizes of tiles: their sums and operands are no more than the registers.
struct Tiles
{
    int rows, code_rows;             // at most
    int rows_of_eight, rows_of_four; // at most, where a tile has 8 vectors of columns, or 4; others have 2
    int byte_rows, byte_rows_of_four; // the same of activations in bytes and weights of four bits
};

/// Two elements of bfloat16.
struct Pair
{
    uint16_t first, second;
};

/// What codes of four bits stand for, as bytes: doubled, which is an integer of at most 16, plus `zero`.
struct DoubledValues
{
    int8_t bytes[16];

    explicit DoubledValues(float const* values, int zero)
    {
        for (int i = 0; i < 16; ++i)
        {
            bytes[i] = static_cast<int8_t>(static_cast<int>(2.0F * values[i]) + zero);
        }
    }

#if !defined(__ARM_NEON)
    __m128i vector() const { return _mm_loadu_si128(reinterpret_cast<__m128i const*>(bytes)); }
#endif
};

/// Four bytes as they lie.
inline int32_t word_of(int8_t const* from)
{
    int32_t word;
    std::memcpy(&word, from, sizeof(word));
    return word;
}

#if defined(__AVX512F__)

using Vec = __m512;
constexpr int kLanes = 16;
constexpr Tiles kTiles{12, 8, 2, 4, 12, 2};

inline Vec load(float const* from) { return _mm512_loadu_ps(from); }
inline Vec load(BFloat16 const* from)
{
    __m256i const halves = _mm256_loadu_si256(reinterpret_cast<__m256i const*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline void store(float* to, Vec x) { _mm512_storeu_ps(to, x); }
inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); } // b where either is NaN
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec rounded(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec scaled_by_power(Vec x, Vec exponent) { return _mm512_scalef_ps(x, exponent); }

using Bits = __m512i;

inline Bits load_bits(Pair const* from) { return _mm512_loadu_si512(from); }

inline Bits load_bits(uint8_t const* from) { return _mm512_loadu_si512(from); }

template <int kShift>
inline Bits shifted(Bits bits)
{
    return _mm512_srli_epi32(bits, kShift);
}

/// What stands for 0 among weights that are bytes without a sign.
constexpr int kZeroByte = 16;

/// The values of codes of four bits.
struct CodeTable
{
    Vec floats;
    Bits bytes; // the values, doubled, plus kZeroByte

    explicit CodeTable(float const* values)
        : floats(load(values))
        , bytes(_mm512_broadcast_i32x4(DoubledValues(values, kZeroByte).vector()))
    {
    }

    Vec values_of(Bits codes) const { return _mm512_permutexvar_ps(codes, floats); } // of their lowest four bits

    /// Of the low and of the high codes.
    void bytes_of(Bits codes, Bits& low, Bits& high) const
    {
        Bits const mask = _mm512_set1_epi8(15);
        low = _mm512_shuffle_epi8(bytes, _mm512_and_si512(codes, mask));
        high = _mm512_shuffle_epi8(bytes, _mm512_and_si512(_mm512_srli_epi16(codes, 4), mask));
    }
};

inline Bits broadcast_integer(int32_t x) { return _mm512_set1_epi32(x); }
inline Vec as_values(Bits integers) { return _mm512_cvtepi32_ps(integers); }

#if defined(__AVX512VNNI__)

using Code = int8_t; // an activation of eight bits
constexpr int kCodes = 4, kZero = 128; // weights that a lane multiplies at once, and the one that stands for 0

inline Bits load_codes(uint8_t const* from) { return _mm512_loadu_si512(from); }

/// The products of kCodes weights of each lane with kCodes activations, to the sums.
inline Bits add_products(Bits weights, Code const* x, Bits sums)
{
    return _mm512_dpbusd_epi32(sums, weights, _mm512_set1_epi32(word_of(x)));
}

#else

using Code = int16_t;
constexpr int kCodes = 2, kZero = 0;

inline Bits load_codes(uint8_t const* from)
{
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<__m256i const*>(from)));
}
inline Bits add_products(Bits weights, Code const* x, Bits sums)
{
    int32_t bits;
    std::memcpy(&bits, x, sizeof(bits));
    return _mm512_add_epi32(sums, _mm512_madd_epi16(weights, _mm512_set1_epi32(bits)));
}

/// In 16 bits: see the other one, below.
struct ByteSums
{
    static constexpr int kSums = 2;
    Bits sums;

    void add(Bits weights, int8_t const* x)
    {
        sums = _mm512_add_epi16(sums, _mm512_maddubs_epi16(weights, broadcast_integer(word_of(x))));
    }
    Bits total() const { return _mm512_madd_epi16(sums, _mm512_set1_epi16(1)); }
};

#endif

inline Vec as_floats(Bits bits) { return _mm512_castsi512_ps(bits); }
inline Vec load_firsts(Pair const* from) { return as_floats(_mm512_slli_epi32(load_bits(from), 16)); }
inline Vec load_seconds(Pair const* from)
{
    return as_floats(_mm512_and_si512(load_bits(from), _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000))));
}

#if defined(__AVX512BF16__)

inline Bits broadcast_bits(Pair const* from)
{
    int32_t bits;
    std::memcpy(&bits, from, sizeof(bits));
    return _mm512_set1_epi32(bits);
}

/// `count` elements, at most kLanes, rounded to nearest even.
inline void store_rounded(float const* from, int64_t count, uint16_t* to)
{
    __mmask16 const mask = static_cast<__mmask16>((1U << count) - 1U);
    __m256bh const halves = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, from));
    _mm256_mask_storeu_epi16(to, mask, reinterpret_cast<__m256i>(halves));
}

inline void round_rows(float const* from, int64_t size, uint16_t* to)
{
    for (int64_t i = 0; i < size; i += kLanes)
    {
        store_rounded(from + i, size - i < kLanes ? size - i : kLanes, to + i);
    }
}

/// Both products of each lane are added to the sum.
inline Vec dot_pairs(Bits a, Bits b, Vec sum)
{
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

#endif

#elif defined(__ARM_NEON)

/// Two of the 32 registers, so that panels, and the order of all sums, are those of AVX2.
struct Vec
{
    float32x4_t low, high;
};

constexpr int kLanes = 8;
constexpr Tiles kTiles{5, 4, 0, 2, 3, 1}; // no operand of a product comes from memory

inline Vec operator+(Vec a, Vec b) { return {a.low + b.low, a.high + b.high}; }
inline Vec operator-(Vec a, Vec b) { return {a.low - b.low, a.high - b.high}; }
inline Vec operator*(Vec a, Vec b) { return {a.low * b.low, a.high * b.high}; }
inline Vec operator/(Vec a, Vec b) { return {a.low / b.low, a.high / b.high}; }
inline Vec operator-(Vec a) { return {-a.low, -a.high}; }

struct Bits
{
    uint32x4_t low, high;
};

inline Vec as_floats(Bits bits) { return {vreinterpretq_f32_u32(bits.low), vreinterpretq_f32_u32(bits.high)}; }

inline Vec load(float const* from) { return {vld1q_f32(from), vld1q_f32(from + 4)}; }
inline Vec load(BFloat16 const* from)
{
    uint16x8_t const halves = vld1q_u16(&from->bits);
    return as_floats({vshll_n_u16(vget_low_u16(halves), 16), vshll_high_n_u16(halves, 16)});
}
inline void store(float* to, Vec x)
{
    vst1q_f32(to, x.low);
    vst1q_f32(to + 4, x.high);
}
inline Vec broadcast(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
inline float32x4_t larger(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline float32x4_t smaller(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline Vec max(Vec a, Vec b) { return {larger(a.low, b.low), larger(a.high, b.high)}; } // b where either is NaN
inline Vec min(Vec a, Vec b) { return {smaller(a.low, b.low), smaller(a.high, b.high)}; }
inline Vec rounded(Vec x) { return {vrndnq_f32(x.low), vrndnq_f32(x.high)}; }

/// In two factors, each of them a normal number, for exponents from -252 to 254.
inline Vec scaled_by_power(Vec x, Vec exponent)
{
    auto const scaled = [](float32x4_t of, float32x4_t by) {
        int32x4_t const whole = vcvtnq_s32_f32(by), first = whole >> 1;
        auto const power = [](int32x4_t part) { return vreinterpretq_f32_s32((part + 127) << 23); };
        return of * power(first) * power(whole - first);
    };
    return {scaled(x.low, exponent.low), scaled(x.high, exponent.high)};
}

inline Bits load_bits(uint8_t const* from)
{
    return {vreinterpretq_u32_u8(vld1q_u8(from)), vreinterpretq_u32_u8(vld1q_u8(from + 16))};
}
inline Bits load_bits(Pair const* from) { return load_bits(reinterpret_cast<uint8_t const*>(from)); }

template <int kShift>
inline Bits shifted(Bits bits)
{
    return {bits.low >> kShift, bits.high >> kShift};
}

constexpr int kZeroByte = 0; // bytes have a sign

/// The values of codes of four bits.
struct CodeTable
{
    uint8x16x4_t floats; // their bytes
    int8x16_t bytes;     // the values, doubled

    explicit CodeTable(float const* values)
        : bytes(vld1q_s8(DoubledValues(values, kZeroByte).bytes))
    {
        std::memcpy(&floats, values, sizeof(floats));
    }

    Vec values_of(Bits codes) const // of their lowest four bits
    {
        return as_floats({values_of(codes.low), values_of(codes.high)});
    }

    /// Of the low and of the high codes.
    void bytes_of(Bits codes, Bits& low, Bits& high) const
    {
        low = {bytes_of(codes.low & 0x0F0F0F0FU), bytes_of(codes.high & 0x0F0F0F0FU)};
        high = {bytes_of(codes.low >> 4 & 0x0F0F0F0FU), bytes_of(codes.high >> 4 & 0x0F0F0F0FU)};
    }

private:
    uint32x4_t bytes_of(uint32x4_t codes) const
    {
        return vreinterpretq_u32_s8(vqtbl1q_s8(bytes, vreinterpretq_u8_u32(codes)));
    }

    uint32x4_t values_of(uint32x4_t codes) const
    {
        uint32x4_t const indices = (codes & 15U) * 0x04040404U + 0x03020100U; // of the four bytes of each value
        return vreinterpretq_u32_u8(vqtbl4q_u8(floats, vreinterpretq_u8_u32(indices)));
    }
};

inline Bits broadcast_integer(int32_t x)
{
    uint32x4_t const all = vdupq_n_u32(static_cast<uint32_t>(x));
    return {all, all};
}
inline Vec as_values(Bits integers)
{
    return {vcvtq_f32_s32(vreinterpretq_s32_u32(integers.low)), vcvtq_f32_s32(vreinterpretq_s32_u32(integers.high))};
}

#if defined(__ARM_FEATURE_DOTPROD)

using Code = int8_t;
constexpr int kCodes = 4, kZero = 0;

inline Bits load_codes(uint8_t const* from) { return load_bits(from); }
inline Bits add_products(Bits weights, Code const* x, Bits sums)
{
    int8x16_t const four = vreinterpretq_s8_s32(vdupq_n_s32(word_of(x)));
    auto const added = [four](uint32x4_t sums, uint32x4_t weights) {
        return vreinterpretq_u32_s32(vdotq_s32(vreinterpretq_s32_u32(sums), vreinterpretq_s8_u32(weights), four));
    };
    return {added(sums.low, weights.low), added(sums.high, weights.high)};
}

#else

using Code = int16_t;
constexpr int kCodes = 2, kZero = 0;

/// The first weights of all lanes in `low`, the second ones in `high`.
inline Bits load_codes(uint8_t const* from)
{
    int8x8x2_t const codes = vld2_s8(reinterpret_cast<int8_t const*>(from));
    return {vreinterpretq_u32_s16(vmovl_s8(codes.val[0])), vreinterpretq_u32_s16(vmovl_s8(codes.val[1]))};
}
inline Bits add_products(Bits weights, Code const* x, Bits sums)
{
    int16x8_t const first = vreinterpretq_s16_u32(weights.low), second = vreinterpretq_s16_u32(weights.high);
    int32x4_t low = vreinterpretq_s32_u32(sums.low), high = vreinterpretq_s32_u32(sums.high);
    int32_t bits;
    std::memcpy(&bits, x, sizeof(bits));
    int16x4_t const both = vreinterpret_s16_s32(vdup_n_s32(bits));
    low = vmlal_lane_s16(vmlal_lane_s16(low, vget_low_s16(first), both, 0), vget_low_s16(second), both, 1);
    high = vmlal_high_lane_s16(vmlal_high_lane_s16(high, first, both, 0), second, both, 1);
    return {vreinterpretq_u32_s32(low), vreinterpretq_u32_s32(high)};
}

/// In 16 bits: see the other one, below.
struct ByteSums
{
    static constexpr int kSums = 2;
    Bits sums;

    void add(Bits weights, int8_t const* x)
    {
        int8x8_t const four = vreinterpret_s8_s32(vdup_n_s32(word_of(x)));
        sums = {added(sums.low, weights.low, four), added(sums.high, weights.high, four)};
    }

    Bits total() const { return {added_up(sums.low), added_up(sums.high)}; }

private:
    static uint32x4_t added(uint32x4_t sums, uint32x4_t weights, int8x8_t four)
    {
        int8x16_t const bytes = vreinterpretq_s8_u32(weights);
        int16x8_t const first = vmull_s8(vget_low_s8(bytes), four), second = vmull_s8(vget_high_s8(bytes), four);
        return vreinterpretq_u32_s16(vreinterpretq_s16_u32(sums) + vpaddq_s16(first, second));
    }

    static uint32x4_t added_up(uint32x4_t sums) { return vreinterpretq_u32_s32(vpaddlq_s16(vreinterpretq_s16_u32(sums))); }
};

#endif

inline Vec load_firsts(Pair const* from)
{
    Bits const bits = load_bits(from);
    return as_floats({bits.low << 16, bits.high << 16});
}
inline Vec load_seconds(Pair const* from)
{
    Bits const bits = load_bits(from);
    return as_floats({bits.low & 0xFFFF0000U, bits.high & 0xFFFF0000U});
}

#else

using Vec = __m256;
constexpr int kLanes = 8;
constexpr Tiles kTiles{6, 3, 1, 3, 4, 2};

inline Vec load(float const* from) { return _mm256_loadu_ps(from); }
inline Vec load(BFloat16 const* from)
{
    __m128i const halves = _mm_loadu_si128(reinterpret_cast<__m128i const*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline void store(float* to, Vec x) { _mm256_storeu_ps(to, x); }
inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); } // b where either is NaN
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec rounded(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

/// In two factors, each of them a normal number, for exponents from -252 to 254.
inline Vec scaled_by_power(Vec x, Vec exponent)
{
    __m256i const whole = _mm256_cvtps_epi32(exponent);
    __m256i const first = _mm256_srai_epi32(whole, 1);
    __m256i const bias = _mm256_set1_epi32(127);
    auto const power = [&](__m256i part) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(part, bias), 23)); };
    return x * power(first) * power(_mm256_sub_epi32(whole, first));
}

using Bits = __m256i;

inline Bits load_bits(Pair const* from) { return _mm256_loadu_si256(reinterpret_cast<__m256i const*>(from)); }

inline Bits load_bits(uint8_t const* from) { return _mm256_loadu_si256(reinterpret_cast<__m256i const*>(from)); }

template <int kShift>
inline Bits shifted(Bits bits)
{
    return _mm256_srli_epi32(bits, kShift);
}

/// What stands for 0 among weights that are bytes without a sign.
constexpr int kZeroByte = 16;

/// The values of codes of four bits.
struct CodeTable
{
    Vec first, second; // of codes 0 to 7, and of 8 to 15
    Bits bytes;        // the values, doubled, plus kZeroByte

    explicit CodeTable(float const* values)
        : first(load(values))
        , second(load(values + 8))
        , bytes(_mm256_broadcastsi128_si256(DoubledValues(values, kZeroByte).vector()))
    {
    }

    Vec values_of(Bits codes) const // of their lowest four bits
    {
        Vec const low = _mm256_permutevar8x32_ps(first, codes), high = _mm256_permutevar8x32_ps(second, codes);
        return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
    }

    /// Of the low and of the high codes.
    void bytes_of(Bits codes, Bits& low, Bits& high) const
    {
        Bits const mask = _mm256_set1_epi8(15);
        low = _mm256_shuffle_epi8(bytes, _mm256_and_si256(codes, mask));
        high = _mm256_shuffle_epi8(bytes, _mm256_and_si256(_mm256_srli_epi16(codes, 4), mask));
    }
};

inline Bits broadcast_integer(int32_t x) { return _mm256_set1_epi32(x); }
inline Vec as_values(Bits integers) { return _mm256_cvtepi32_ps(integers); }

using Code = int16_t;
constexpr int kCodes = 2, kZero = 0;

inline Bits load_codes(uint8_t const* from)
{
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<__m128i const*>(from)));
}
inline Bits add_products(Bits weights, Code const* x, Bits sums)
{
    int32_t bits;
    std::memcpy(&bits, x, sizeof(bits));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(weights, _mm256_set1_epi32(bits)));
}

/// In 16 bits: see the other one, below.
struct ByteSums
{
    static constexpr int kSums = 2;
    Bits sums;

    void add(Bits weights, int8_t const* x)
    {
        sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, broadcast_integer(word_of(x))));
    }
    Bits total() const { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
};

inline Vec as_floats(Bits bits) { return _mm256_castsi256_ps(bits); }
inline Vec load_firsts(Pair const* from) { return as_floats(_mm256_slli_epi32(load_bits(from), 16)); }
inline Vec load_seconds(Pair const* from)
{
    return as_floats(_mm256_and_si256(load_bits(from), _mm256_set1_epi32(static_cast<int32_t>(0xFFFF0000))));
}

#endif

#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_DOTPROD)

/// Sums of the products of weights, bytes of a CodeTable, with activations of eight bits, four of each in a lane. They are
/// exact for 32 inputs. A lane has kSums of them.
struct ByteSums
{
    static constexpr int kSums = 1;
    Bits sums;

    void add(Bits weights, int8_t const* x) { sums = add_products(weights, x, sums); }
    Bits total() const { return sums; }
};

#endif

/// exp(x) within 2 units in the last place; 0 below -104, infinity above 89, NaN of NaN.
inline Vec exp(Vec x)
{
    // The second operand of min and max is what NaN leaves.
    x = min(broadcast(89.0F), max(broadcast(-104.0F), x));
    Vec const exponent = rounded(x * broadcast(1.44269504088896341F));
    Vec const r = fma(exponent, broadcast(2.12194440e-4F), fma(exponent, broadcast(-0.693359375F), x));
    Vec y = broadcast(1.9875691500e-4F); // Cephes' polynomial
    constexpr float kCoefficients[]{1.3981999507e-3F, 8.3334519073e-3F, 4.1665795894e-2F, 1.6666665459e-1F, 0.5F};
    for (float const coefficient : kCoefficients)
    {
        y = fma(y, r, broadcast(coefficient));
    }
    return scaled_by_power(fma(y, r * r, r + broadcast(1.0F)), exponent);
}

/// The lanes one after the other, in float32.
inline float sum(Vec x)
{
    float lanes[kLanes];
    store(lanes, x);
    float total = 0.0F;
    for (float const lane : lanes)
    {
        total += lane;
    }
    return total;
}

/// The largest lane; NaN is passed over.
inline float largest(Vec x)
{
    float lanes[kLanes];
    store(lanes, x);
    float found = lanes[0];
    for (float const lane : lanes)
    {
        found = lane > found ? lane : found;
    }
    return found;
}

} // namespace dflash_trt
