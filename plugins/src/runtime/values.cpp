#include "runtime/values.h"

#include "runtime/problem.h"

namespace dflash_trt
{

Values& Values::pointer(std::string_view name, void const* address)
{
    return set(name, address);
}

Values& Values::integer(std::string_view name, int64_t value)
{
    return set(name, value);
}

Values& Values::real(std::string_view name, float value)
{
    return set(name, value);
}

void const* Values::pointer_of(std::string_view name) const
{
    return get<void const*>(name, "address");
}

int64_t Values::integer_of(std::string_view name) const
{
    return get<int64_t>(name, "integer");
}

float Values::real_of(std::string_view name) const
{
    return get<float>(name, "real number");
}

Values& Values::set(std::string_view name, Value value)
{
    for (Named& named : mNamed)
    {
        if (named.name == name)
        {
            named.value = value;
            return *this;
        }
    }
    mNamed.push_back({name, value});
    return *this;
}

template <typename T>
T Values::get(std::string_view name, char const* kind) const
{
    for (Named const& named : mNamed)
    {
        if (named.name == name)
        {
            if (T const* value = std::get_if<T>(&named.value))
            {
                return *value;
            }
            break;
        }
    }
    throw Problem("argument " + std::string(name), kind, "none of this kind",
        "The kernels and the library are of different versions: build the library again.");
}

} // namespace dflash_trt
