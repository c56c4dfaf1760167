#include "runtime/kernel_library.h"

#include "runtime/problem.h"

namespace dflash_trt
{

KernelLibrary& KernelLibrary::get()
{
    static auto* const library = new KernelLibrary; // leaked on purpose, see mKernels
    return *library;
}

CUfunction KernelLibrary::function(EmbeddedKernel const& kernel, Device const& device)
{
    std::lock_guard<std::mutex> const lock(mMutex);
    auto const known = mFunctions.find({&kernel, device.handle});
    if (known != mFunctions.end())
    {
        return known->second;
    }
    CudaDriver const& driver = CudaDriver::get();
    CUkernel const loaded = load(kernel);
    driver.check(driver.kernel_set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                     static_cast<int>(kernel.shared_bytes), loaded, device.handle),
        "cuKernelSetAttribute");
    CUfunction function = nullptr;
    driver.check(driver.kernel_get_function(&function, loaded), "cuKernelGetFunction");
    driver.check(driver.func_load(function), "cuFuncLoad"); // now, and not at the first launch
    // A kernel is launched as a CUkernel: it then belongs to whichever context is current.
    auto const launchable = reinterpret_cast<CUfunction>(loaded);
    mFunctions.emplace(std::make_pair(&kernel, device.handle), launchable);
    return launchable;
}

CUkernel KernelLibrary::load(EmbeddedKernel const& kernel)
{
    auto const known = mKernels.find(&kernel);
    if (known != mKernels.end())
    {
        return known->second;
    }
    CudaDriver const& driver = CudaDriver::get();
    unsigned char const* image = embedded_kernels().bytes + kernel.offset;
    CUlibrary library = nullptr;
    driver.check(
        driver.library_load_data(&library, image, nullptr, nullptr, 0, nullptr, nullptr, 0), "cuLibraryLoadData");
    CUkernel loaded = nullptr;
    driver.check(driver.library_get_kernel(&loaded, library, kernel.entry), "cuLibraryGetKernel");
    mKernels.emplace(&kernel, loaded);
    return loaded;
}

} // namespace dflash_trt
