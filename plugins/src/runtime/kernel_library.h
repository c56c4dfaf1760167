// Cubins as functions of the driver: loaded once in a process, made ready once for each device.
#pragma once

#include "runtime/device.h"
#include "runtime/embedded_kernel.h"

#include <map>
#include <mutex>
#include <utility>

namespace dflash_trt
{

class KernelLibrary
{
public:
    static KernelLibrary& get();

    /// Loading takes memory and may synchronize: a call that is captured into a graph must find the kernel loaded.
    /// Throws Problem when the driver refuses it.
    CUfunction function(EmbeddedKernel const& kernel, Device const& device);

private:
    CUkernel load(EmbeddedKernel const& kernel);

    // Never unloaded: at the end of a process the driver is gone before this object is.
    std::mutex mMutex;
    std::map<EmbeddedKernel const*, CUkernel> mKernels;
    std::map<std::pair<EmbeddedKernel const*, CUdevice>, CUfunction> mFunctions;
};

} // namespace dflash_trt
