// The GPU of the calling thread's context.
#pragma once

#include "runtime/cuda_driver.h"

namespace dflash_trt
{

struct Device
{
    CUdevice handle;
    int major;
    int minor;
    int num_multiprocessors;

    /// Throws Problem without a driver or a current context.
    static Device current();

    [[nodiscard]] bool operator<(Device const& other) const noexcept;
    [[nodiscard]] bool operator==(Device const& other) const noexcept;
};

} // namespace dflash_trt
