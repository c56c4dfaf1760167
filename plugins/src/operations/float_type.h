// The network's float type F.
#pragma once

#include <cstddef>
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

/// As kernel signatures say it: "*bf16".
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

} // namespace dflash_trt
