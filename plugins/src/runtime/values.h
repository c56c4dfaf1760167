// What a launch is prepared from, by name. Kernels take the arguments they declare; grids and programs compute with the
// integers.
#pragma once

#include "runtime/call_tensors.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <variant>
#include <vector>

namespace dflash_trt
{

/// The last value of a name and a kind counts. Names and shapes must outlive the object.
class Values
{
public:
    Values();

    /// Without a slot: null in every call.
    Values& pointer(std::string_view name, std::optional<TensorSlot> slot);
    Values& integer(std::string_view name, int64_t value);
    Values& real(std::string_view name, float value);
    Values& shape(std::string_view tensor, Shape const& shape);

    [[nodiscard]] size_t count() const noexcept { return mNamed.size(); }
    /// All but the first `count`.
    void forget_from(size_t count) { mNamed.resize(count); }

    /// Throws Problem when there is no value of that name, or not of that kind.
    [[nodiscard]] std::optional<TensorSlot> pointer_of(std::string_view name) const;
    [[nodiscard]] int64_t integer_of(std::string_view name) const;
    [[nodiscard]] float real_of(std::string_view name) const;
    [[nodiscard]] int64_t size_of(std::string_view tensor, size_t axis) const;

private:
    using Value = std::variant<std::optional<TensorSlot>, int64_t, float, Shape const*>;

    struct Named
    {
        std::string_view name;
        Value value;
    };

    template <typename T>
    [[nodiscard]] T get(std::string_view name, char const* kind) const;

    std::vector<Named> mNamed;
};

} // namespace dflash_trt
