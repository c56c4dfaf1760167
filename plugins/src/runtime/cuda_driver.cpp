#include "runtime/cuda_driver.h"

#include "runtime/problem.h"

#include <dlfcn.h>

namespace dflash_trt
{
namespace
{
constexpr char kDriverLibrary[] = "libcuda.so.1";
constexpr char kMend[] = "Install the NVIDIA driver of TensorRT 11 (CUDA 13), on a machine with a GPU.";
} // namespace

CudaDriver const& CudaDriver::get()
{
    // A failure throws out of the initialization, so that the next call tries again.
    static CudaDriver const driver;
    return driver;
}

CudaDriver::CudaDriver()
{
    // Never closed: kernels and contexts live as long as the process.
    void* library = dlopen(kDriverLibrary, RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr)
    {
        char const* error = dlerror();
        throw Problem("CUDA driver", kDriverLibrary, error != nullptr ? error : "no such library", kMend);
    }
    find(library, "cuInit", init);
    find(library, "cuGetErrorName", get_error_name);
    find(library, "cuGetErrorString", get_error_string);
    find(library, "cuCtxGetDevice", ctx_get_device);
    find(library, "cuDeviceGetAttribute", device_get_attribute);
    find(library, "cuLibraryLoadData", library_load_data);
    find(library, "cuLibraryGetKernel", library_get_kernel);
    find(library, "cuKernelSetAttribute", kernel_set_attribute);
    find(library, "cuKernelGetFunction", kernel_get_function);
    find(library, "cuFuncLoad", func_load);
    find(library, "cuLaunchKernel", launch_kernel);
    check(init(0), "cuInit");
}

template <typename Function>
void CudaDriver::find(void* library, char const* name, Function& function)
{
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr)
    {
        throw Problem(
            "CUDA driver", std::string("the function ") + name, "none in " + std::string(kDriverLibrary), kMend);
    }
}

void CudaDriver::check(CUresult result, char const* call) const
{
    if (result == CUDA_SUCCESS)
    {
        return;
    }
    char const* name = nullptr;
    char const* text = nullptr;
    get_error_name(result, &name);
    get_error_string(result, &text);
    throw Problem(std::string("CUDA driver, ") + call, "success",
        (name != nullptr ? std::string(name) : std::to_string(result))
            + (text != nullptr ? std::string(" (") + text + ")" : ""),
        "An error of an earlier kernel can appear here; run with CUDA_LAUNCH_BLOCKING=1 to find its place.");
}

} // namespace dflash_trt
