#include "runtime/kernel_choice.h"

#include "runtime/problem.h"
#include "runtime/values.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace dflash_trt
{
namespace
{

constexpr char kMendArchitecture[] = "Build the library with scripts/build_plugin --arch for this GPU.";
constexpr char kMendVariant[] =
    "Add the combination to plugins/aot/variants.py and build the library again.";

/// All variants of a kernel, of all architectures.
std::vector<EmbeddedKernel const*> const& variants_of(std::string_view kernel)
{
    using Index = std::unordered_map<std::string_view, std::vector<EmbeddedKernel const*>>;
    static Index const index = []
    {
        Index made;
        for (EmbeddedKernel const& embedded : embedded_kernels())
        {
            made[embedded.kernel].push_back(&embedded);
        }
        return made;
    }();
    static std::vector<EmbeddedKernel const*> const none;
    auto const found = index.find(kernel);
    return found != index.end() ? found->second : none;
}

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

} // namespace

KernelChoice::KernelChoice(std::string_view kernel) : mKernel(kernel) {}

KernelChoice& KernelChoice::type(std::string_view argument, std::string_view type)
{
    mTypes.push_back({argument, type});
    return *this;
}

KernelChoice& KernelChoice::equal(std::string_view constant, int64_t value)
{
    mEqual.push_back({constant, value});
    return *this;
}

KernelChoice& KernelChoice::at_least(std::string_view constant, int64_t value)
{
    mAtLeast.push_back({constant, value});
    return *this;
}

std::vector<EmbeddedKernel const*> KernelChoice::candidates(int device_major, int device_minor) const
{
    std::vector<EmbeddedKernel const*> found;
    for (EmbeddedKernel const* kernel : variants_of(mKernel))
    {
        if (kernel->architecture.runs_on(device_major, device_minor) && fits(*kernel))
        {
            found.push_back(kernel);
        }
    }
    if (found.empty())
    {
        std::string const device =
            "compute capability " + std::to_string(device_major) + "." + std::to_string(device_minor);
        if (!is_built_for(device_major, device_minor))
        {
            throw Problem("GPU of " + device, "one of " + embedded_kernels().architectures(), "no kernels for it",
                kMendArchitecture);
        }
        throw Problem("kernel " + std::string(mKernel), wanted(), "only " + offered(), kMendVariant);
    }
    return found;
}

EmbeddedKernel const& KernelChoice::best(Values const& values, int device_major, int device_minor) const
{
    EmbeddedKernel const* best = nullptr;
    std::pair<std::vector<int64_t>, size_t> best_rank;
    for (EmbeddedKernel const* kernel : candidates(device_major, device_minor))
    {
        if (!marks_hold(*kernel, values))
        {
            continue;
        }
        std::vector<int64_t> sizes;
        for (Constant const& constant : mAtLeast)
        {
            sizes.push_back(kernel->constant(constant.name));
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
        throw Problem(
            "kernel " + std::string(mKernel), wanted(), "variants for other multiples of 16 only", kMendVariant);
    }
    return *best;
}

std::vector<EmbeddedKernel const*> KernelChoice::candidates() const
{
    std::vector<EmbeddedKernel const*> found;
    for (EmbeddedKernel const* kernel : variants_of(mKernel))
    {
        if (fits(*kernel))
        {
            found.push_back(kernel);
        }
    }
    if (found.empty())
    {
        throw Problem("kernel " + std::string(mKernel), wanted(), "only " + offered(), kMendVariant);
    }
    return found;
}

void KernelChoice::require(int device_major, int device_minor) const
{
    static_cast<void>(candidates(device_major, device_minor));
}

void KernelChoice::require() const
{
    static_cast<void>(candidates());
}

bool KernelChoice::fits(EmbeddedKernel const& kernel) const
{
    return std::all_of(mTypes.begin(), mTypes.end(),
               [&](Type const& wanted) { return kernel.type_of(wanted.argument) == wanted.type; })
        && std::all_of(mEqual.begin(), mEqual.end(),
            [&](Constant const& wanted) { return kernel.constant(wanted.name) == wanted.value; })
        && std::all_of(mAtLeast.begin(), mAtLeast.end(),
            [&](Constant const& wanted) { return kernel.constant(wanted.name) >= wanted.value; });
}

std::string KernelChoice::wanted() const
{
    std::string listed;
    auto const add = [&](std::string const& item) { listed += (listed.empty() ? "" : ", ") + item; };
    for (Type const& type : mTypes)
    {
        add(std::string(type.argument) + " " + std::string(type.type));
    }
    for (Constant const& constant : mEqual)
    {
        add(std::string(constant.name) + " = " + std::to_string(constant.value));
    }
    for (Constant const& constant : mAtLeast)
    {
        add(std::string(constant.name) + " >= " + std::to_string(constant.value));
    }
    return listed.empty() ? "a variant" : listed;
}

std::string KernelChoice::offered() const
{
    std::vector<std::string> names;
    for (EmbeddedKernel const* kernel : variants_of(mKernel))
    {
        if (std::find(names.begin(), names.end(), kernel->variant) == names.end())
        {
            names.emplace_back(kernel->variant);
        }
    }
    std::string listed;
    for (std::string const& name : names)
    {
        listed += (listed.empty() ? "" : ", ") + name;
    }
    return listed.empty() ? "nothing" : listed;
}

bool KernelChoice::is_built_for(int device_major, int device_minor) const
{
    return std::any_of(embedded_kernels().begin(), embedded_kernels().end(),
        [&](EmbeddedKernel const& kernel) { return kernel.architecture.runs_on(device_major, device_minor); });
}

} // namespace dflash_trt
