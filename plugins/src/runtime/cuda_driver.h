// The CUDA driver, found when it is first needed: the library itself loads on a machine without a GPU.
#pragma once

#include <cuda.h>

#include <string>

namespace dflash_trt
{

/// The functions of libcuda.so.1 that this library calls. Types and names are cuda.h's.
class CudaDriver
{
public:
    /// Loads and initializes the driver on the first call. Throws Problem when there is none.
    static CudaDriver const& get();

    /// Throws Problem, naming the call, when `result` is an error.
    void check(CUresult result, char const* call) const;

    decltype(&cuInit) init = nullptr;
    decltype(&cuGetErrorName) get_error_name = nullptr;
    decltype(&cuGetErrorString) get_error_string = nullptr;
    decltype(&cuCtxGetDevice) ctx_get_device = nullptr;
    decltype(&cuDeviceGetAttribute) device_get_attribute = nullptr;
    decltype(&cuLibraryLoadData) library_load_data = nullptr;
    decltype(&cuLibraryGetKernel) library_get_kernel = nullptr;
    decltype(&cuKernelSetAttribute) kernel_set_attribute = nullptr;
    decltype(&cuKernelGetFunction) kernel_get_function = nullptr;
    decltype(&cuFuncLoad) func_load = nullptr;
    decltype(&cuLaunchKernel) launch_kernel = nullptr;

private:
    CudaDriver();

    template <typename Function>
    void find(void* library, char const* name, Function& function);
};

} // namespace dflash_trt
