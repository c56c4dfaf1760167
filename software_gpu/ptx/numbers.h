// Number formats that C++ does not have, bit for bit.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace software_gpu {

inline float flushed(float value) {  // .ftz: subnormal numbers are zeros of their sign
    return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
}

struct Bfloat16 {
    uint16_t bits;
    float value() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
};
inline Bfloat16 to_bfloat16(float value) {  // to nearest, ties to even; PTX ISA: NaN is 0x7fff
    if (std::isnan(value)) return {0x7fff};
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

struct Half {
    uint16_t bits;
    float value() const { return static_cast<float>(std::bit_cast<_Float16>(bits)); }
};
inline Half to_half(double value) {
    if (std::isnan(value)) return {0x7fff};
    return {std::bit_cast<uint16_t>(static_cast<_Float16>(value))};
}

// tf32 keeps 10 bits of the mantissa. A tensor core reads no others.
inline float tf32_read(uint32_t bits) { return std::bit_cast<float>(bits & 0xffffe000u); }
inline uint32_t to_tf32_away(float value) {  // cvt.rna: to nearest, ties away from zero
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if (std::isnan(value) || std::isinf(value)) return bits;
    return (bits + 0x1000) & 0xffffe000u;
}

// A small float of OCP's "8-bit Floating Point Specification" and "Microscaling Formats": no infinities here.
struct SmallFloat {
    int exponent_bits, mantissa_bits, bias;
    float largest;
    uint8_t nan;  // 0: none

    float value(uint8_t code) const {
        const int sign_bit = exponent_bits + mantissa_bits;
        const uint8_t magnitude = code & ((1 << sign_bit) - 1);
        if (nan && magnitude == nan) return std::nanf("");
        const int exponent = magnitude >> mantissa_bits, mantissa = magnitude & ((1 << mantissa_bits) - 1);
        const float size = exponent == 0 ? std::ldexp(float(mantissa), 1 - bias - mantissa_bits)
                                         : std::ldexp(float(mantissa + (1 << mantissa_bits)), exponent - bias - mantissa_bits);
        return code >> sign_bit & 1 ? -size : size;
    }
    // To nearest, ties to even, saturating (.rn.satfinite).
    uint8_t code(float value) const {
        const int sign_bit = exponent_bits + mantissa_bits;
        const uint8_t sign = std::signbit(value) ? 1 << sign_bit : 0;
        if (std::isnan(value)) return nan ? nan : static_cast<uint8_t>((1 << sign_bit) - 1);  // e2m1: the largest, positive
        float size = std::fabs(value);
        if (size >= largest) size = largest;
        int exponent = 0;
        std::frexp(size, &exponent);
        exponent = std::max(exponent - 1, 1 - bias);
        const float step = std::ldexp(1.0f, exponent - mantissa_bits);
        size = std::nearbyint(size / step) * step;
        if (size > largest) size = largest;
        if (size == 0) return sign;
        std::frexp(size, &exponent);
        exponent -= 1;
        if (exponent < 1 - bias) return sign | static_cast<uint8_t>(size / std::ldexp(1.0f, 1 - bias - mantissa_bits));
        const int mantissa = static_cast<int>(size / std::ldexp(1.0f, exponent - mantissa_bits)) - (1 << mantissa_bits);
        return static_cast<uint8_t>(sign | (exponent + bias) << mantissa_bits | mantissa);
    }
};
inline constexpr SmallFloat kE4m3{4, 3, 7, 448.0f, 0x7f};
inline constexpr SmallFloat kE2m1{2, 1, 1, 6.0f, 0};
// e5m2 is a half cut short, infinities included.
inline float e5m2_value(uint8_t code) { return Half{static_cast<uint16_t>(code << 8)}.value(); }

}  // namespace software_gpu
