/// The instructions of AVX-512 that the CPU kernels use, in portable C++, for a CPU without them. Each does what Intel's
/// Intrinsics Guide says. They stand in the namespace of the kernels, where they come before those of the compiler.
#pragma once

#include_next <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define __AVX512F__ 1
#if defined(SIMULATES_AVX512VNNI)
#define __AVX512VNNI__ 1
#endif
#if defined(SIMULATES_AVX512BF16)
#define __AVX512BF16__ 1
#endif

namespace dflash_trt
{

/// The lanes of a vector, which may be longer: its first ones.
template <typename Lane, int kCount = 64 / sizeof(Lane)>
struct Lanes
{
    Lane at[kCount];

    Lanes() = default;

    template <typename Vector>
    explicit Lanes(Vector const& vector)
    {
        static_assert(sizeof(vector) >= sizeof(at));
        std::memcpy(at, &vector, sizeof(at));
    }

    template <typename Vector>
    operator Vector() const
    {
        static_assert(sizeof(Vector) == sizeof(at));
        Vector vector;
        std::memcpy(&vector, at, sizeof(at));
        return vector;
    }
};

/// What `of` gives for each lane.
template <typename Lane, int kCount = 64 / sizeof(Lane), typename Of>
inline Lanes<Lane, kCount> lanes(Of const& of)
{
    Lanes<Lane, kCount> found;
    for (int i = 0; i < kCount; ++i)
    {
        found.at[i] = static_cast<Lane>(of(i));
    }
    return found;
}

inline int32_t saturated(int32_t x)
{
    return x < INT16_MIN ? INT16_MIN : x > INT16_MAX ? INT16_MAX : x;
}

inline __m512 _mm512_loadu_ps(float const* from) { return Lanes<float>(*reinterpret_cast<float const(*)[16]>(from)); }
inline __m512i _mm512_loadu_si512(void const* from) { return Lanes<char>(*static_cast<char const(*)[64]>(from)); }
inline void _mm512_storeu_ps(float* to, __m512 x) { std::memcpy(to, &x, sizeof(x)); }

inline __m512 _mm512_set1_ps(float x)
{
    return lanes<float>([&](int) { return x; });
}
inline __m512i _mm512_set1_epi32(int32_t x)
{
    return lanes<int32_t>([&](int) { return x; });
}
inline __m512i _mm512_set1_epi16(int16_t x)
{
    return lanes<int16_t>([&](int) { return x; });
}
inline __m512i _mm512_set1_epi8(int8_t x)
{
    return lanes<int8_t>([&](int) { return x; });
}
inline __m512i _mm512_broadcast_i32x4(__m128i x)
{
    return lanes<int32_t>([from = Lanes<int32_t, 4>(x)](int i) { return from.at[i % 4]; });
}

inline __m512 _mm512_castsi512_ps(__m512i x) { return Lanes<float>(x); }
inline __m512 _mm512_cvtepi32_ps(__m512i x)
{
    return lanes<float>([from = Lanes<int32_t>(x)](int i) { return from.at[i]; });
}
inline __m512i _mm512_cvtepu16_epi32(__m256i x)
{
    return lanes<int32_t>([from = Lanes<uint16_t, 16>(x)](int i) { return from.at[i]; });
}
inline __m512i _mm512_cvtepi8_epi16(__m256i x)
{
    return lanes<int16_t>([from = Lanes<int8_t, 32>(x)](int i) { return from.at[i]; });
}

inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c)
{
    return lanes<float>([x = Lanes<float>(a), y = Lanes<float>(b), z = Lanes<float>(c)](int i) {
        return std::fma(x.at[i], y.at[i], z.at[i]);
    });
}
inline __m512 _mm512_max_ps(__m512 a, __m512 b)
{
    return lanes<float>([x = Lanes<float>(a), y = Lanes<float>(b)](int i) { return x.at[i] > y.at[i] ? x.at[i] : y.at[i]; });
}
inline __m512 _mm512_min_ps(__m512 a, __m512 b)
{
    return lanes<float>([x = Lanes<float>(a), y = Lanes<float>(b)](int i) { return x.at[i] < y.at[i] ? x.at[i] : y.at[i]; });
}
inline __m512 _mm512_roundscale_ps(__m512 x, int) // to the nearest integer, the even one of two
{
    return lanes<float>([from = Lanes<float>(x)](int i) { return std::nearbyint(from.at[i]); });
}
inline __m512 _mm512_scalef_ps(__m512 x, __m512 exponent)
{
    return lanes<float>([from = Lanes<float>(x), power = Lanes<float>(exponent)](int i) {
        return std::ldexp(from.at[i], static_cast<int>(std::floor(power.at[i])));
    });
}

inline __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
inline __m512i _mm512_add_epi16(__m512i a, __m512i b)
{
    return lanes<uint16_t>([x = Lanes<uint16_t>(a), y = Lanes<uint16_t>(b)](int i) { return x.at[i] + y.at[i]; });
}
inline __m512i _mm512_add_epi32(__m512i a, __m512i b)
{
    return lanes<uint32_t>([x = Lanes<uint32_t>(a), y = Lanes<uint32_t>(b)](int i) { return x.at[i] + y.at[i]; });
}
inline __m512i _mm512_slli_epi32(__m512i x, unsigned count)
{
    return lanes<uint32_t>([&, from = Lanes<uint32_t>(x)](int i) { return from.at[i] << count; });
}
inline __m512i _mm512_srli_epi32(__m512i x, unsigned count)
{
    return lanes<uint32_t>([&, from = Lanes<uint32_t>(x)](int i) { return from.at[i] >> count; });
}
inline __m512i _mm512_srli_epi16(__m512i x, unsigned count)
{
    return lanes<uint16_t>([&, from = Lanes<uint16_t>(x)](int i) { return from.at[i] >> count; });
}

inline __m512i _mm512_madd_epi16(__m512i a, __m512i b)
{
    return lanes<int32_t>([x = Lanes<int16_t>(a), y = Lanes<int16_t>(b)](int i) {
        return x.at[2 * i] * y.at[2 * i] + x.at[2 * i + 1] * y.at[2 * i + 1];
    });
}
inline __m512i _mm512_maddubs_epi16(__m512i a, __m512i b)
{
    return lanes<int16_t>([x = Lanes<uint8_t>(a), y = Lanes<int8_t>(b)](int i) {
        return saturated(x.at[2 * i] * y.at[2 * i] + x.at[2 * i + 1] * y.at[2 * i + 1]);
    });
}
inline __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i a, __m512i b)
{
    return lanes<int32_t>([sum = Lanes<int32_t>(sums), x = Lanes<uint8_t>(a), y = Lanes<int8_t>(b)](int i) {
        int32_t total = sum.at[i];
        for (int j = 4 * i; j < 4 * i + 4; ++j)
        {
            total += x.at[j] * y.at[j];
        }
        return total;
    });
}

inline __m512 _mm512_permutexvar_ps(__m512i indices, __m512 x)
{
    return lanes<float>([at = Lanes<uint32_t>(indices), from = Lanes<float>(x)](int i) { return from.at[at.at[i] % 16]; });
}
inline __m512i _mm512_shuffle_epi8(__m512i x, __m512i indices)
{
    return lanes<uint8_t>([at = Lanes<uint8_t>(indices), from = Lanes<uint8_t>(x)](int i) {
        return at.at[i] & 0x80 ? 0 : from.at[i / 16 * 16 + at.at[i] % 16];
    });
}
inline __m512 _mm512_unpacklo_ps(__m512 a, __m512 b)
{
    return lanes<float>([x = Lanes<float>(a), y = Lanes<float>(b)](int i) {
        return (i % 2 == 0 ? x : y).at[i / 4 * 4 + i % 4 / 2];
    });
}
inline __m512 _mm512_unpackhi_ps(__m512 a, __m512 b)
{
    return lanes<float>([x = Lanes<float>(a), y = Lanes<float>(b)](int i) {
        return (i % 2 == 0 ? x : y).at[i / 4 * 4 + 2 + i % 4 / 2];
    });
}
inline __m512 _mm512_shuffle_ps(__m512 a, __m512 b, int control)
{
    return lanes<float>([&, x = Lanes<float>(a), y = Lanes<float>(b)](int i) {
        return (i % 4 < 2 ? x : y).at[i / 4 * 4 + (control >> i % 4 * 2 & 3)];
    });
}
inline __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int control)
{
    return lanes<float>([&, x = Lanes<float>(a), y = Lanes<float>(b)](int i) {
        return (i < 8 ? x : y).at[(control >> i / 4 * 2 & 3) * 4 + i % 4];
    });
}

inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, float const* from)
{
    return lanes<float>([&](int i) { return mask >> i & 1 ? from[i] : 0.0F; });
}
inline void _mm256_mask_storeu_epi16(void* to, __mmask16 mask, __m256i x)
{
    Lanes<uint16_t, 16> const from(x);
    for (int i = 0; i < 16; ++i)
    {
        if (mask >> i & 1)
        {
            static_cast<uint16_t*>(to)[i] = from.at[i];
        }
    }
}

inline uint32_t bits_of(float x)
{
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits;
}
inline float float_of(uint32_t bits)
{
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
}
inline float without_subnormals(float x)
{
    return (bits_of(x) & 0x7F800000U) == 0 ? float_of(bits_of(x) & 0x80000000U) : x;
}
inline __m256bh _mm512_cvtneps_pbh(__m512 x)
{
    return lanes<uint16_t, 16>([from = Lanes<float>(x)](int i) {
        uint32_t const bits = bits_of(without_subnormals(from.at[i]));
        return (std::isnan(from.at[i]) ? bits | 0x400000U : bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16;
    });
}
inline __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh a, __m512bh b)
{
    return lanes<float>([sum = Lanes<float>(sums), x = Lanes<uint16_t>(a), y = Lanes<uint16_t>(b)](int i) {
        float total = without_subnormals(sum.at[i]);
        for (int j = 2 * i + 1; j >= 2 * i; --j) // the second product first
        {
            float const left = float_of(static_cast<uint32_t>(x.at[j]) << 16), right = float_of(static_cast<uint32_t>(y.at[j]) << 16);
            total = without_subnormals(std::fma(without_subnormals(left), without_subnormals(right), total));
        }
        return total;
    });
}

} // namespace dflash_trt
