// Which of a kernel's variants a call takes.
#pragma once

#include "runtime/embedded_kernel.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace dflash_trt
{

/// What a variant must be. Of those that fit, the one with the smallest `at_least` constants is taken, and of these
/// the one that was compiled for more multiples of 16.
class KernelChoice
{
public:
    explicit KernelChoice(std::string_view kernel);

    KernelChoice& type(std::string_view argument, std::string_view type);
    KernelChoice& equal(std::string_view constant, int64_t value);
    KernelChoice& at_least(std::string_view constant, int64_t value);

    /// Every variant that fits, whatever is a multiple of 16 and for whichever size: what a shape may need later.
    /// Throws Problem when there is none, saying which the library has.
    [[nodiscard]] std::vector<EmbeddedKernel const*> candidates(int device_major, int device_minor) const;

    /// Throws Problem when there is none.
    [[nodiscard]] EmbeddedKernel const& best(Values const& values, int device_major, int device_minor) const;

    /// Throws Problem when there is none.
    void require(int device_major, int device_minor) const;

    /// The same for any architecture, where no GPU is known yet.
    [[nodiscard]] std::vector<EmbeddedKernel const*> candidates() const;
    void require() const;

private:
    struct Constant
    {
        std::string_view name;
        int64_t value;
    };

    struct Type
    {
        std::string_view argument;
        std::string_view type;
    };

    [[nodiscard]] bool fits(EmbeddedKernel const& kernel) const;
    [[nodiscard]] std::string wanted() const;
    [[nodiscard]] std::string offered() const;
    [[nodiscard]] bool is_built_for(int device_major, int device_minor) const;

    std::string_view mKernel;
    std::vector<Type> mTypes;
    std::vector<Constant> mEqual;
    std::vector<Constant> mAtLeast;
};

} // namespace dflash_trt
