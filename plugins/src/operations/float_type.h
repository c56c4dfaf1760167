// The network's float type F, and what K/V pages hold.
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

enum class PageType : int32_t
{
    kNetwork = 0, // F
    kFloat8 = 1,  // float8_e4m3fn, with a scale for K and one for V
};

/// Of one node.
struct ElementTypes
{
    FloatType network;
    PageType pages;
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

constexpr int64_t element_bytes(FloatType type) noexcept
{
    return type == FloatType::kFloat32 ? 4 : 2;
}

constexpr std::string_view page_pointer_type(ElementTypes types) noexcept
{
    return types.pages == PageType::kFloat8 ? "*fp8e4nv" : pointer_type(types.network);
}

} // namespace dflash_trt
