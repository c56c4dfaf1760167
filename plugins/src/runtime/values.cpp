#include "runtime/values.h"

#include "runtime/problem.h"

#include <algorithm>
#include <string>

namespace dflash_trt
{
namespace
{
constexpr size_t kUsualCount = 96;
} // namespace

Values::Values()
{
    mNamed.reserve(kUsualCount);
}

Values& Values::pointer(std::string_view name, std::optional<TensorSlot> slot)
{
    mNamed.push_back({name, slot});
    return *this;
}

Values& Values::integer(std::string_view name, int64_t value)
{
    mNamed.push_back({name, value});
    return *this;
}

Values& Values::real(std::string_view name, float value)
{
    mNamed.push_back({name, value});
    return *this;
}

Values& Values::shape(std::string_view tensor, Shape const& shape)
{
    mNamed.push_back({tensor, &shape});
    return *this;
}

std::optional<TensorSlot> Values::pointer_of(std::string_view name) const
{
    return get<std::optional<TensorSlot>>(name, "tensor");
}

int64_t Values::integer_of(std::string_view name) const
{
    return get<int64_t>(name, "integer");
}

float Values::real_of(std::string_view name) const
{
    return get<float>(name, "real number");
}

int64_t Values::size_of(std::string_view tensor, size_t axis) const
{
    return get<Shape const*>(tensor, "shape")->sizes[axis];
}

template <typename T>
T Values::get(std::string_view name, char const* kind) const
{
    auto const found = std::find_if(mNamed.rbegin(), mNamed.rend(),
        [&](Named const& named) { return named.name == name && std::holds_alternative<T>(named.value); });
    if (found != mNamed.rend())
    {
        return std::get<T>(found->value);
    }
    throw Problem("argument " + std::string(name), kind, "none of this kind",
        "The kernels and the library are of different versions: build the library again.");
}

} // namespace dflash_trt
