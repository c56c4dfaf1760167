#include "runtime/kernel_family.h"

#include "runtime/kernel_library.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>
#include <unordered_map>

namespace dflash_trt
{
namespace
{

KernelVariants load_variants(KernelFamily const& family, Device const& device)
{
    KernelVariants found;
    for (EmbeddedKernel const* variant : variants_of(family.kernel))
    {
        if (variant->architecture.runs_on(device.major, device.minor) && family.has(*variant))
        {
            KernelLibrary::get().function(*variant, device);
            found.push_back(variant);
        }
    }
    return found;
}

} // namespace

bool KernelFamily::operator<(KernelFamily const& other) const
{
    return std::tie(kernel, types, constants) < std::tie(other.kernel, other.types, other.constants);
}

bool KernelFamily::has(EmbeddedKernel const& variant) const
{
    return kernel == variant.kernel
        && std::all_of(types.begin(), types.end(),
            [&](auto const& wanted) { return variant.type_of(wanted.first) == wanted.second; })
        && std::all_of(constants.begin(), constants.end(),
            [&](auto const& wanted) { return variant.constant(wanted.first) == wanted.second; });
}

KernelVariants const& variants_of(std::string_view kernel)
{
    static auto const index = []
    {
        std::unordered_map<std::string_view, KernelVariants> made;
        for (EmbeddedKernel const& embedded : embedded_kernels())
        {
            made[embedded.kernel].push_back(&embedded);
        }
        return made;
    }();
    static KernelVariants const none;
    auto const found = index.find(kernel);
    return found != index.end() ? found->second : none;
}

KernelVariants const& loaded_variants(KernelFamily const& family, Device const& device)
{
    static std::mutex mutex;
    static std::map<std::pair<Device, KernelFamily>, KernelVariants> known;
    std::lock_guard<std::mutex> const lock(mutex);
    std::pair<Device, KernelFamily> key(device, family);
    auto found = known.find(key);
    if (found == known.end())
    {
        found = known.emplace(std::move(key), load_variants(family, device)).first;
    }
    return found->second;
}

} // namespace dflash_trt
