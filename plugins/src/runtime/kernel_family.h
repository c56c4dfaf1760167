// The variants of a kernel that differ only in what a step's sizes decide.
#pragma once

#include "runtime/device.h"
#include "runtime/embedded_kernel.h"

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace dflash_trt
{

/// Names are literals.
struct KernelFamily
{
    std::string_view kernel;
    std::vector<std::pair<std::string_view, std::string_view>> types; // of arguments
    std::vector<std::pair<std::string_view, int64_t>> constants;

    [[nodiscard]] bool operator<(KernelFamily const& other) const;
    [[nodiscard]] bool has(EmbeddedKernel const& variant) const;
};

using KernelVariants = std::vector<EmbeddedKernel const*>;

/// All variants of a kernel, of all architectures; empty when the library has none.
KernelVariants const& variants_of(std::string_view kernel);

/// The variants of a family that run on the device, all loaded: a later shape may need another one, and a step that is
/// captured into a graph cannot load. Only the first call for a family and a device searches.
KernelVariants const& loaded_variants(KernelFamily const& family, Device const& device);

} // namespace dflash_trt
