// Which of a kernel's variants a call takes.
#pragma once

#include "runtime/device.h"
#include "runtime/embedded_kernel.h"
#include "runtime/kernel_family.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace dflash_trt
{

class Values;

/// What a variant must be. Of those that fit, the one with the smallest `at_least` constants is taken, and of these
/// the one that was compiled for more multiples of 16.
class KernelChoice
{
public:
    explicit KernelChoice(std::string_view kernel);

    KernelChoice& type(std::string_view argument, std::string_view type);
    KernelChoice& equal(std::string_view constant, int64_t value);
    /// Equal, too, but of a step: variants with other values are loaded as well.
    KernelChoice& sized(std::string_view constant, int64_t value);
    KernelChoice& at_least(std::string_view constant, int64_t value);

    /// Every variant that fits, whatever is a multiple of 16; they are loaded, and those for other sizes as well.
    /// Throws Problem when there is none, saying which the library has.
    [[nodiscard]] KernelVariants candidates(Device const& device) const;

    /// Throws Problem when there is none.
    [[nodiscard]] EmbeddedKernel const& best(Values const& values, Device const& device) const;

    /// The candidates of any architecture, where no GPU is known yet.
    [[nodiscard]] KernelVariants candidates() const;
    /// Throws Problem when there is none.
    void require() const;

private:
    [[nodiscard]] bool has_sizes(EmbeddedKernel const& variant) const;
    [[noreturn]] void refuse(std::string const& found) const;
    [[nodiscard]] std::string wanted() const;
    [[nodiscard]] std::string offered() const;

    KernelFamily mFamily;
    std::vector<std::pair<std::string_view, int64_t>> mSized;
    std::vector<std::pair<std::string_view, int64_t>> mAtLeast;
};

} // namespace dflash_trt
