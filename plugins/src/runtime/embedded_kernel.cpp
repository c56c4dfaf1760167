#include "runtime/embedded_kernel.h"

#include "runtime/problem.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace dflash_trt
{
namespace
{
constexpr int64_t kMaxGridX = 0x7FFFFFFF;
constexpr int64_t kMaxGridYZ = 65535;
} // namespace

bool Architecture::runs_on(int device_major, int device_minor) const noexcept
{
    return major == device_major && (is_specific ? minor == device_minor : minor <= device_minor);
}

std::string Architecture::name() const
{
    return "sm_" + std::to_string(major * 10 + minor) + (is_specific ? "a" : "");
}

int64_t EmbeddedKernel::constant(std::string_view name) const
{
    for (size_t i = 0; i < num_constants; ++i)
    {
        if (constants[i].name == name)
        {
            return constants[i].value;
        }
    }
    throw Problem(std::string("kernel ") + variant, "a constant " + std::string(name), "none",
        "The kernels and the library are of different versions: build the library again.");
}

std::string_view EmbeddedKernel::type_of(std::string_view argument) const noexcept
{
    for (size_t i = 0; i < num_arguments; ++i)
    {
        if (arguments[i].name == argument)
        {
            return arguments[i].type;
        }
    }
    return {};
}

std::string EmbeddedKernels::architectures() const
{
    std::vector<std::string> names;
    for (EmbeddedKernel const& kernel : *this)
    {
        std::string name = kernel.architecture.name();
        if (std::find(names.begin(), names.end(), name) == names.end())
        {
            names.push_back(std::move(name));
        }
    }
    std::string listed;
    for (std::string const& name : names)
    {
        listed += (listed.empty() ? "" : ", ") + name;
    }
    return listed;
}

Grid make_grid(int64_t x, int64_t y, int64_t z)
{
    if (x < 1 || y < 1 || z < 1 || x > kMaxGridX || y > kMaxGridYZ || z > kMaxGridYZ)
    {
        throw Problem("launch grid", "1 to " + std::to_string(kMaxGridX) + " x 1 to 65535 x 1 to 65535",
            std::to_string(x) + " x " + std::to_string(y) + " x " + std::to_string(z),
            "Use smaller limits: max_num_tokens, max_batch_size or max_seq_len.");
    }
    return {static_cast<uint32_t>(x), static_cast<uint32_t>(y), static_cast<uint32_t>(z)};
}

} // namespace dflash_trt
