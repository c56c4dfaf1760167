// One kernel with everything that a step's shape decides; its tensors come with each call.
#pragma once

#include "runtime/call_tensors.h"
#include "runtime/device.h"
#include "runtime/embedded_kernel.h"

#include <cstdint>
#include <vector>

namespace dflash_trt
{

class Values;

/// Arguments are resolved by name when it is made, and only addresses are filled in when it runs. Immutable: it may be
/// copied, and run by several threads.
class PreparedLaunch
{
public:
    /// Loads the kernel. Throws Problem for an argument that is missing, of another kind, or not the multiple of 16
    /// that was compiled in.
    PreparedLaunch(EmbeddedKernel const& kernel, Values const& values, Device const& device);

    /// Neither allocates memory nor synchronizes. Throws Problem for an address that is not the multiple of 16 that was
    /// compiled in, and for what the driver refuses.
    void run(CallTensors const& tensors, CUstream stream) const;

private:
    struct Pointer
    {
        uint32_t argument;
        TensorSlot slot;
        uint64_t zero_bits; // of the address
    };

    void add_pointer(uint32_t argument, Values const& values);
    [[noreturn]] void refuse_address(uint64_t const* arguments) const;

    EmbeddedKernel const* mKernel;
    CUfunction mFunction;
    Grid mGrid;
    std::vector<uint64_t> mArguments; // with 0 for each pointer
    std::vector<Pointer> mPointers;
};

using PreparedLaunches = std::vector<PreparedLaunch>;

/// One after the other.
void run(PreparedLaunches const& launches, CallTensors const& tensors, CUstream stream);

} // namespace dflash_trt
