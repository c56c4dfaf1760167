// The arguments of a launch, by name. Kernels take those they declare, grids compute with the integers.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace dflash_trt
{

/// Names must outlive the object: they are literals or the tables' own.
class Values
{
public:
    using Value = std::variant<void const*, int64_t, float>;

    Values& pointer(std::string_view name, void const* address);
    Values& integer(std::string_view name, int64_t value);
    Values& real(std::string_view name, float value);

    /// Throws Problem when there is no value of that name, or not of that kind.
    [[nodiscard]] void const* pointer_of(std::string_view name) const;
    [[nodiscard]] int64_t integer_of(std::string_view name) const;
    [[nodiscard]] float real_of(std::string_view name) const;

private:
    struct Named
    {
        std::string_view name;
        Value value;
    };

    Values& set(std::string_view name, Value value);

    template <typename T>
    [[nodiscard]] T get(std::string_view name, char const* kind) const;

    std::vector<Named> mNamed;
};

} // namespace dflash_trt
