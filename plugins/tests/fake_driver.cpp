// A stand-in for libcuda.so.1 on a machine without a GPU. It has one device of a chosen compute capability, checks that
// it is used as the real driver must be, and hands every launch to a callback, which may do what the kernel would.
#include <cuda.h>

#include <cstddef>
#include <cstring>
#include <map>
#include <set>
#include <string>

extern "C"
{

    struct FakeLaunch
    {
        void const* image; // of the cubin
        char const* entry;
        unsigned int grid[3];
        unsigned int block[3];
        unsigned int shared_bytes;
        void* stream;
        void** arguments;
    };

    void fake_set_device(int major, int minor, int num_multiprocessors);
    void fake_set_callback(void (*callback)(FakeLaunch const*));
    /// The named function answers CUDA_ERROR_UNKNOWN from now on; "" ends it.
    void fake_set_failing(char const* function);
    /// How often cuLibraryLoadData was called.
    int fake_num_loads();
}

namespace
{

struct Kernel
{
    void const* image;
    std::string entry;
    unsigned int shared_bytes = 0;
    bool is_loaded = false;
};

int device_major = 9;
int device_minor = 0;
int device_multiprocessors = 132;
int num_loads = 0;
void (*launch_callback)(FakeLaunch const*) = nullptr;
std::string failing;
std::map<std::string, Kernel> kernels; // by image and entry

bool fails(char const* function)
{
    return failing == function;
}

} // namespace

extern "C"
{

    void fake_set_device(int major, int minor, int num_multiprocessors)
    {
        device_major = major;
        device_minor = minor;
        device_multiprocessors = num_multiprocessors;
    }

    void fake_set_callback(void (*callback)(FakeLaunch const*))
    {
        launch_callback = callback;
    }

    void fake_set_failing(char const* function)
    {
        failing = function;
    }

    int fake_num_loads()
    {
        return num_loads;
    }

    CUresult cuInit(unsigned int)
    {
        return fails("cuInit") ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
    }

    CUresult cuGetErrorName(CUresult, char const** name)
    {
        *name = "CUDA_ERROR_UNKNOWN";
        return CUDA_SUCCESS;
    }

    CUresult cuGetErrorString(CUresult, char const** text)
    {
        *text = "a failure on purpose";
        return CUDA_SUCCESS;
    }

    CUresult cuCtxGetDevice(CUdevice* device)
    {
        *device = 0;
        return fails("cuCtxGetDevice") ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
    }

    CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice)
    {
        switch (attribute)
        {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = device_major; return CUDA_SUCCESS;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = device_minor; return CUDA_SUCCESS;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = device_multiprocessors; return CUDA_SUCCESS;
        default: return CUDA_ERROR_INVALID_VALUE;
        }
    }

    CUresult cuLibraryLoadData(CUlibrary* library, void const* code, CUjit_option*, void**, unsigned int,
        CUlibraryOption*, void**, unsigned int)
    {
        ++num_loads;
        if (fails("cuLibraryLoadData")
            || std::memcmp(code,
                   "\x7f"
                   "ELF",
                   4)
                != 0)
        {
            return CUDA_ERROR_UNKNOWN;
        }
        *library = reinterpret_cast<CUlibrary>(const_cast<void*>(code));
        return CUDA_SUCCESS;
    }

    CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, char const* name)
    {
        void const* const image = library;
        Kernel& known = kernels[std::to_string(reinterpret_cast<std::size_t>(image)) + name];
        known.image = image;
        known.entry = name;
        *kernel = reinterpret_cast<CUkernel>(&known);
        return CUDA_SUCCESS;
    }

    CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice)
    {
        if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
        {
            return CUDA_ERROR_INVALID_VALUE;
        }
        reinterpret_cast<Kernel*>(kernel)->shared_bytes = static_cast<unsigned int>(value);
        return CUDA_SUCCESS;
    }

    CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel)
    {
        *function = reinterpret_cast<CUfunction>(kernel);
        return CUDA_SUCCESS;
    }

    CUresult cuFuncLoad(CUfunction function)
    {
        reinterpret_cast<Kernel*>(function)->is_loaded = true;
        return CUDA_SUCCESS;
    }

    CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
        unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes, CUstream stream,
        void** arguments, void** extra)
    {
        auto const& kernel = *reinterpret_cast<Kernel const*>(function);
        if (fails("cuLaunchKernel") || !kernel.is_loaded || shared_bytes > kernel.shared_bytes || extra != nullptr)
        {
            return CUDA_ERROR_UNKNOWN;
        }
        if (launch_callback != nullptr)
        {
            FakeLaunch const launch{kernel.image, kernel.entry.c_str(), {grid_x, grid_y, grid_z},
                {block_x, block_y, block_z}, shared_bytes, stream, arguments};
            launch_callback(&launch);
        }
        return CUDA_SUCCESS;
    }
}
