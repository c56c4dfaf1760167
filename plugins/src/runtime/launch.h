// One kernel on a stream.
#pragma once

#include "runtime/device.h"
#include "runtime/embedded_kernel.h"

namespace dflash_trt
{

class Values;

/// Passes the arguments that the kernel declares, by name. Neither allocates device memory nor synchronizes, once the
/// kernel has been made ready by KernelLibrary. Throws Problem for an argument that is missing, of another kind, or
/// not the multiple of 16 that was compiled in.
void launch(EmbeddedKernel const& kernel, Values const& values, Device const& device, CUstream stream);

} // namespace dflash_trt
