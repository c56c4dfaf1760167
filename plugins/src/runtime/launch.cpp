#include "runtime/launch.h"

#include "runtime/kernel_library.h"
#include "runtime/problem.h"
#include "runtime/values.h"

#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace dflash_trt
{
namespace
{

constexpr uint64_t kAlignment = 16;

[[noreturn]] void refuse(KernelArgument const& argument, std::string const& expected, std::string const& found)
{
    throw Problem(std::string("argument ") + argument.name, expected, found,
        "Tensors must start at multiples of 16 bytes, and sizes must fit their type.");
}

/// The bytes of one argument, at an address that does not move.
uint64_t packed(KernelArgument const& argument, Values const& values)
{
    std::string_view const type = argument.type;
    uint64_t bytes = 0;
    if (type[0] == '*')
    {
        bytes = reinterpret_cast<uintptr_t>(values.pointer_of(argument.name));
    }
    else if (type == "fp32")
    {
        float const value = values.real_of(argument.name);
        std::memcpy(&bytes, &value, sizeof(value));
        return bytes;
    }
    else if (type == "i32" || type == "i64")
    {
        int64_t const value = values.integer_of(argument.name);
        if (type == "i32"
            && (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max()))
        {
            refuse(argument, "a 32-bit integer", std::to_string(value));
        }
        bytes = static_cast<uint64_t>(value); // little endian: the low word is the i32
    }
    else
    {
        refuse(argument, "a type this library can pass", argument.type);
    }
    if (argument.is_multiple_of_16 && bytes % kAlignment != 0)
    {
        refuse(argument, "a multiple of 16", std::to_string(bytes));
    }
    return bytes;
}

} // namespace

void launch(EmbeddedKernel const& kernel, Values const& values, Device const& device, CUstream stream)
{
    std::vector<uint64_t> arguments;
    arguments.reserve(kernel.num_arguments + kernel.num_scratch_pointers);
    for (size_t i = 0; i < kernel.num_arguments; ++i)
    {
        arguments.push_back(packed(kernel.arguments[i], values));
    }
    arguments.resize(kernel.num_arguments + kernel.num_scratch_pointers, 0);
    std::vector<void*> addresses;
    addresses.reserve(arguments.size());
    for (uint64_t& argument : arguments)
    {
        addresses.push_back(&argument);
    }
    Grid const grid = kernel.grid(values);
    CUfunction const function = KernelLibrary::get().function(kernel, device);
    CudaDriver const& driver = CudaDriver::get();
    CUresult const result = driver.launch_kernel(function, grid.x, grid.y, grid.z, kernel.num_threads, 1, 1,
        kernel.shared_bytes, stream, addresses.data(), nullptr);
    driver.check(result, (std::string("cuLaunchKernel of ") + kernel.variant).c_str());
}

} // namespace dflash_trt
