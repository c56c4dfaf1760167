#include "runtime/prepared_launch.h"

#include "runtime/kernel_library.h"
#include "runtime/problem.h"
#include "runtime/values.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <string>

namespace dflash_trt
{
namespace
{

constexpr uint64_t kAlignment = 16;
constexpr size_t kMaxArguments = 64;

[[noreturn]] void refuse(KernelArgument const& argument, std::string const& expected, std::string const& found)
{
    throw Problem(std::string("argument ") + argument.name, expected, found,
        "Tensors must start at multiples of 16 bytes, and sizes must fit their type.");
}

/// The bytes of an argument that is no pointer.
uint64_t packed(KernelArgument const& argument, Values const& values)
{
    std::string_view const type = argument.type;
    uint64_t bytes = 0;
    if (type == "fp32")
    {
        float const value = values.real_of(argument.name);
        std::memcpy(&bytes, &value, sizeof(value));
        return bytes;
    }
    if (type != "i32" && type != "i64")
    {
        refuse(argument, "a type this library can pass", argument.type);
    }
    int64_t const value = values.integer_of(argument.name);
    if (type == "i32" && (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max()))
    {
        refuse(argument, "a 32-bit integer", std::to_string(value));
    }
    bytes = static_cast<uint64_t>(value); // little endian: the low word is the i32
    if (argument.is_multiple_of_16 && bytes % kAlignment != 0)
    {
        refuse(argument, "a multiple of 16", std::to_string(bytes));
    }
    return bytes;
}

} // namespace

PreparedLaunch::PreparedLaunch(EmbeddedKernel const& kernel, Values const& values, Device const& device)
    : mKernel(&kernel)
    , mFunction(KernelLibrary::get().function(kernel, device))
    , mGrid(kernel.grid(values))
    , mArguments(kernel.num_arguments + kernel.num_scratch_pointers, 0)
{
    if (mArguments.size() > kMaxArguments)
    {
        throw Problem(std::string("kernel ") + kernel.variant,
            "at most " + std::to_string(kMaxArguments) + " arguments", std::to_string(mArguments.size()),
            "Raise kMaxArguments in prepared_launch.cpp.");
    }
    for (uint32_t i = 0; i < kernel.num_arguments; ++i)
    {
        if (kernel.arguments[i].type[0] == '*')
        {
            add_pointer(i, values);
        }
        else
        {
            mArguments[i] = packed(kernel.arguments[i], values);
        }
    }
}

void PreparedLaunch::add_pointer(uint32_t argument, Values const& values)
{
    KernelArgument const& declared = mKernel->arguments[argument];
    if (auto const slot = values.pointer_of(declared.name))
    {
        mPointers.push_back({argument, *slot, declared.is_multiple_of_16 ? kAlignment - 1 : 0});
    }
}

void PreparedLaunch::run(CallTensors const& tensors, CUstream stream) const
{
    void const* const workspace = tensors.workspace;
    std::array<void const* const*, 3> const sources{tensors.inputs, tensors.outputs, &workspace};
    std::array<uint64_t, kMaxArguments> arguments{};
    std::copy(mArguments.begin(), mArguments.end(), arguments.begin());
    uint64_t wrong_bits = 0;
    for (Pointer const& pointer : mPointers)
    {
        void const* const tensor = sources[static_cast<size_t>(pointer.slot.source)][pointer.slot.index];
        uint64_t const address = reinterpret_cast<uintptr_t>(tensor) + pointer.slot.offset_bytes;
        arguments[pointer.argument] = address;
        wrong_bits |= address & pointer.zero_bits;
    }
    if (wrong_bits != 0)
    {
        refuse_address(arguments.data());
    }
    std::array<void*, kMaxArguments> addresses{};
    for (size_t i = 0; i < mArguments.size(); ++i)
    {
        addresses[i] = &arguments[i];
    }
    CudaDriver const& driver = CudaDriver::get();
    CUresult const result = driver.launch_kernel(mFunction, mGrid.x, mGrid.y, mGrid.z, mKernel->num_threads, 1, 1,
        mKernel->shared_bytes, stream, addresses.data(), nullptr);
    if (result != CUDA_SUCCESS)
    {
        driver.check(result, (std::string("cuLaunchKernel of ") + mKernel->variant).c_str());
    }
}

void PreparedLaunch::refuse_address(uint64_t const* arguments) const
{
    auto const wrong = std::find_if(mPointers.begin(), mPointers.end(),
        [&](Pointer const& pointer) { return (arguments[pointer.argument] & pointer.zero_bits) != 0; });
    refuse(mKernel->arguments[wrong->argument], "a multiple of 16", std::to_string(arguments[wrong->argument]));
}

void run(PreparedLaunches const& launches, CallTensors const& tensors, CUstream stream)
{
    for (PreparedLaunch const& launch : launches)
    {
        launch.run(tensors, stream);
    }
}

} // namespace dflash_trt
