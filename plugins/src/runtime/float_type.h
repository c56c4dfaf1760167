// The network's float type F, as kernel signatures say it.
#pragma once

#include <cstdint>
#include <string_view>

namespace dflash_trt
{

enum class FloatType : int32_t
{
    kFloat32 = 0,
    kFloat16 = 1,
    kBFloat16 = 2,
};

constexpr std::string_view kFloat8Pointer = "*fp8e4nv";

/// "*bf16"
constexpr std::string_view pointer_type(FloatType type) noexcept
{
    switch (type)
    {
    case FloatType::kFloat32: return "*fp32";
    case FloatType::kFloat16: return "*fp16";
    case FloatType::kBFloat16: return "*bf16";
    }
    return {};
}

constexpr int64_t element_bytes(FloatType type) noexcept
{
    return type == FloatType::kFloat32 ? 4 : 2;
}

} // namespace dflash_trt
