#include "runtime/kernel_choice.h"

#include "runtime/problem.h"
#include "runtime/values.h"

#include <algorithm>
#include <utility>

namespace dflash_trt
{
namespace
{

constexpr char kMendArchitecture[] = "Build the library with scripts/build_plugin --arch for this GPU.";
constexpr char kMendVariant[] = "Build the library for this engine with scripts/build_plugin --engine, or for all with "
                                "--all; other sizes stand in plugins/README.md.";

bool marks_hold(EmbeddedKernel const& kernel, Values const& values)
{
    for (size_t i = 0; i < kernel.num_arguments; ++i)
    {
        KernelArgument const& argument = kernel.arguments[i];
        // An address that is not a multiple of 16 is refused at the launch, with its name; no variant serves it.
        if (argument.is_multiple_of_16 && argument.type[0] != '*' && values.integer_of(argument.name) % 16 != 0)
        {
            return false;
        }
    }
    return true;
}

size_t num_marks(EmbeddedKernel const& kernel)
{
    return static_cast<size_t>(std::count_if(kernel.arguments, kernel.arguments + kernel.num_arguments,
        [](KernelArgument const& argument) { return argument.is_multiple_of_16; }));
}

/// Throws Problem when the library has nothing at all for the GPU.
void require_architecture(Device const& device)
{
    bool const is_built_for_it = std::any_of(embedded_kernels().begin(), embedded_kernels().end(),
        [&](EmbeddedKernel const& kernel) { return kernel.architecture.runs_on(device.major, device.minor); });
    if (!is_built_for_it)
    {
        throw Problem("GPU of compute capability " + std::to_string(device.major) + "." + std::to_string(device.minor),
            "one of " + embedded_kernels().architectures(), "no kernels for it", kMendArchitecture);
    }
}

} // namespace

KernelChoice::KernelChoice(std::string_view kernel) : mFamily{kernel, {}, {}} {}

KernelChoice& KernelChoice::type(std::string_view argument, std::string_view type)
{
    mFamily.types.emplace_back(argument, type);
    return *this;
}

KernelChoice& KernelChoice::equal(std::string_view constant, int64_t value)
{
    mFamily.constants.emplace_back(constant, value);
    return *this;
}

KernelChoice& KernelChoice::sized(std::string_view constant, int64_t value)
{
    mSized.emplace_back(constant, value);
    return *this;
}

KernelChoice& KernelChoice::at_least(std::string_view constant, int64_t value)
{
    mAtLeast.emplace_back(constant, value);
    return *this;
}

KernelVariants KernelChoice::candidates(Device const& device) const
{
    KernelVariants const& loaded = loaded_variants(mFamily, device);
    KernelVariants found;
    std::copy_if(loaded.begin(), loaded.end(), std::back_inserter(found),
        [&](EmbeddedKernel const* variant) { return has_sizes(*variant); });
    if (found.empty())
    {
        require_architecture(device);
        refuse("only " + offered());
    }
    return found;
}

EmbeddedKernel const& KernelChoice::best(Values const& values, Device const& device) const
{
    EmbeddedKernel const* best = nullptr;
    std::pair<std::vector<int64_t>, size_t> best_rank;
    for (EmbeddedKernel const* kernel : candidates(device))
    {
        if (!marks_hold(*kernel, values))
        {
            continue;
        }
        std::vector<int64_t> sizes;
        for (auto const& [name, value] : mAtLeast)
        {
            sizes.push_back(kernel->constant(name));
        }
        std::pair<std::vector<int64_t>, size_t> rank{std::move(sizes), kernel->num_arguments - num_marks(*kernel)};
        if (best == nullptr || rank < best_rank)
        {
            best = kernel;
            best_rank = std::move(rank);
        }
    }
    if (best == nullptr)
    {
        refuse("variants for other multiples of 16 only");
    }
    return *best;
}

KernelVariants KernelChoice::candidates() const
{
    KernelVariants found;
    for (EmbeddedKernel const* variant : variants_of(mFamily.kernel))
    {
        if (mFamily.has(*variant) && has_sizes(*variant))
        {
            found.push_back(variant);
        }
    }
    if (found.empty())
    {
        refuse("only " + offered());
    }
    return found;
}

void KernelChoice::require() const
{
    static_cast<void>(candidates());
}

bool KernelChoice::has_sizes(EmbeddedKernel const& variant) const
{
    return std::all_of(mSized.begin(), mSized.end(),
               [&](auto const& wanted) { return variant.constant(wanted.first) == wanted.second; })
        && std::all_of(mAtLeast.begin(), mAtLeast.end(),
            [&](auto const& wanted) { return variant.constant(wanted.first) >= wanted.second; });
}

void KernelChoice::refuse(std::string const& found) const
{
    throw Problem("kernel " + std::string(mFamily.kernel), wanted(), found, kMendVariant);
}

std::string KernelChoice::wanted() const
{
    std::string listed;
    auto const add = [&](std::string const& item) { listed += (listed.empty() ? "" : ", ") + item; };
    for (auto const& [argument, type] : mFamily.types)
    {
        add(std::string(argument) + " " + std::string(type));
    }
    for (auto const* constants : {&mFamily.constants, &mSized})
    {
        for (auto const& [name, value] : *constants)
        {
            add(std::string(name) + " = " + std::to_string(value));
        }
    }
    for (auto const& [name, value] : mAtLeast)
    {
        add(std::string(name) + " >= " + std::to_string(value));
    }
    return listed.empty() ? "a variant" : listed;
}

std::string KernelChoice::offered() const
{
    std::vector<std::string> names;
    for (EmbeddedKernel const* variant : variants_of(mFamily.kernel))
    {
        if (std::find(names.begin(), names.end(), variant->variant) == names.end())
        {
            names.emplace_back(variant->variant);
        }
    }
    std::string listed;
    for (std::string const& name : names)
    {
        listed += (listed.empty() ? "" : ", ") + name;
    }
    return listed.empty() ? "nothing" : listed;
}

} // namespace dflash_trt
