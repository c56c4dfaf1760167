#pragma once

#include "simd.h"

#include <cstdint>

namespace dflash_trt
{

#if defined(__AVX512F__)

/// kLanes rows, of kLanes elements each, to columns.
template <typename Element>
inline void transpose_square(Element const* const* rows, int64_t from, float* to, int64_t stride)
{
    __m512 r[16], t[16];
    for (int i = 0; i < 16; ++i)
    {
        r[i] = load(rows[i] + from);
    }
    for (int i = 0; i < 16; i += 4) // 4 x 4 blocks within each quarter of a vector
    {
        __m512 const a = _mm512_unpacklo_ps(r[i], r[i + 1]), b = _mm512_unpackhi_ps(r[i], r[i + 1]);
        __m512 const c = _mm512_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
        t[i] = _mm512_shuffle_ps(a, c, 0x44);
        t[i + 1] = _mm512_shuffle_ps(a, c, 0xEE);
        t[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
        t[i + 3] = _mm512_shuffle_ps(b, d, 0xEE);
    }
    for (int i = 0; i < 4; ++i) // quarters
    {
        __m512 const a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xDD);
        __m512 const c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88), d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xDD);
        store(to + i * stride, _mm512_shuffle_f32x4(a, c, 0x88));
        store(to + (i + 4) * stride, _mm512_shuffle_f32x4(b, d, 0x88));
        store(to + (i + 8) * stride, _mm512_shuffle_f32x4(a, c, 0xDD));
        store(to + (i + 12) * stride, _mm512_shuffle_f32x4(b, d, 0xDD));
    }
}

#elif defined(__ARM_NEON)

/// kLanes rows, of kLanes elements each, to columns.
template <typename Element>
inline void transpose_square(Element const* const* rows, int64_t from, float* to, int64_t stride)
{
    auto const transpose_quarter = [stride](float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d, float* corner) {
        auto const pairs = [](float32x4_t x) { return vreinterpretq_f64_f32(x); };
        auto const store_pairs = [&](int row, float64x2_t x) { vst1q_f32(corner + row * stride, vreinterpretq_f32_f64(x)); };
        float64x2_t const ab = pairs(vtrn1q_f32(a, b)), cd = pairs(vtrn1q_f32(c, d)); // of even columns
        float64x2_t const ab_odd = pairs(vtrn2q_f32(a, b)), cd_odd = pairs(vtrn2q_f32(c, d));
        store_pairs(0, vzip1q_f64(ab, cd));
        store_pairs(1, vzip1q_f64(ab_odd, cd_odd));
        store_pairs(2, vzip2q_f64(ab, cd));
        store_pairs(3, vzip2q_f64(ab_odd, cd_odd));
    };
    for (int i = 0; i < 8; i += 4)
    {
        Vec const a = load(rows[i] + from), b = load(rows[i + 1] + from);
        Vec const c = load(rows[i + 2] + from), d = load(rows[i + 3] + from);
        transpose_quarter(a.low, b.low, c.low, d.low, to + i);
        transpose_quarter(a.high, b.high, c.high, d.high, to + i + 4 * stride);
    }
}

#else

/// kLanes rows, of kLanes elements each, to columns.
template <typename Element>
inline void transpose_square(Element const* const* rows, int64_t from, float* to, int64_t stride)
{
    __m256 r[8], t[8];
    for (int i = 0; i < 8; ++i)
    {
        r[i] = load(rows[i] + from);
    }
    for (int i = 0; i < 8; i += 4) // 4 x 4 blocks within each half of a vector
    {
        __m256 const a = _mm256_unpacklo_ps(r[i], r[i + 1]), b = _mm256_unpackhi_ps(r[i], r[i + 1]);
        __m256 const c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
        t[i] = _mm256_shuffle_ps(a, c, 0x44);
        t[i + 1] = _mm256_shuffle_ps(a, c, 0xEE);
        t[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
        t[i + 3] = _mm256_shuffle_ps(b, d, 0xEE);
    }
    for (int i = 0; i < 4; ++i) // halves
    {
        store(to + i * stride, _mm256_permute2f128_ps(t[i], t[i + 4], 0x20));
        store(to + (i + 4) * stride, _mm256_permute2f128_ps(t[i], t[i + 4], 0x31));
    }
}

#endif

/// rows [num_rows][width] to [width, num_rows]; both counts are multiples of kLanes.
template <typename Element>
inline void transpose(Element const* const* rows, int64_t width, int64_t num_rows, float* to)
{
    for (int64_t row = 0; row < num_rows; row += kLanes)
    {
        for (int64_t column = 0; column < width; column += kLanes)
        {
            transpose_square(rows + row, column, to + column * num_rows + row, num_rows);
        }
    }
}

} // namespace dflash_trt
