// What generated grids and programs call, besides the launch rules. Nothing is negative.
#pragma once

#include <algorithm>
#include <cstdint>

namespace dflash_trt
{

/// a / b, rounded up.
constexpr int64_t ceil_div(int64_t a, int64_t b) noexcept
{
    return (a + b - 1) / b;
}

/// Of a power of two.
constexpr int64_t log2(int64_t power) noexcept
{
    int64_t exponent = 0;
    while ((int64_t{1} << exponent) < power)
    {
        ++exponent;
    }
    return exponent;
}

/// Of the divisors that are not larger than `most`.
constexpr int64_t largest_divisor(int64_t number, int64_t most) noexcept
{
    int64_t divisor = std::min(number, most);
    while (number % divisor != 0)
    {
        --divisor;
    }
    return divisor;
}

} // namespace dflash_trt
