// The GPU that is described: SOFTWARE_GPU names it, SOFTWARE_GPU_COUNT says how many there are.
#include "runtime.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace software_runtime {

namespace {

// Shared memory, registers and threads: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
constexpr int kSharedBytes = 48 << 10, kSharedBytesOptIn = 227 << 10, kSharedBytesOfMultiprocessor = 228 << 10;
constexpr int kRegisters = 65536, kThreadsOfBlock = 1024, kThreadsOfMultiprocessor = 2048, kBlocksOfMultiprocessor = 32;
constexpr int kMaxGridX = 2147483647, kMaxGridYz = 65535, kMaxBlockZ = 64, kL2Bytes = 50 << 20;

// Memory: NVIDIA's data sheets; of H100 and H200 what cudaMemGetInfo tells.
const std::map<std::string, Gpu> kGpus = {
    {"h100", {"NVIDIA H100 80GB HBM3", 9, 0, 132, 85029158912}},
    {"h200", {"NVIDIA H200", 9, 0, 132, 150754820096}},
    {"b200", {"NVIDIA B200", 10, 0, 148, 191000000000}},
    {"b300", {"NVIDIA B300 SXM6 AC", 10, 3, 148, 287000000000}},
};

}  // namespace

long setting(const char* name, long otherwise) {
    const char* value = std::getenv(name);
    return value ? std::atol(value) : otherwise;
}

const Gpu& gpu() {
    static const Gpu& found = [] () -> const Gpu& {
        const char* name = std::getenv("SOFTWARE_GPU");
        const auto known = kGpus.find(name ? name : "h200");
        if (known == kGpus.end()) {
            std::fprintf(stderr, "error: SOFTWARE_GPU: expected h100, h200, b200 or b300, found %s.\n", name);
            std::exit(2);
        }
        return known->second;
    }();
    return found;
}

int num_devices() {
    static const int count = static_cast<int>(setting("SOFTWARE_GPU_COUNT", 1));
    return count;
}

bool executes() {
    static const bool value = setting("SOFTWARE_GPU_EXECUTES", 0) != 0;
    return value;
}

int& current_device() {
    static thread_local int device = 0;
    return device;
}

// Both APIs number them alike: CUdevice_attribute and cudaDeviceAttr.
int attribute(int which) {
    switch (which) {
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return kThreadsOfBlock;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return kMaxBlockZ;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return kMaxGridX;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return kMaxGridYz;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return kSharedBytes;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return kSharedBytesOptIn;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return kSharedBytesOfMultiprocessor;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return kRegisters;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return gpu().num_multiprocessors;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return kThreadsOfMultiprocessor;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return kBlocksOfMultiprocessor;
        case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return kL2Bytes;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return gpu().major;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return gpu().minor;
        case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1980000;         // kHz
        case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 2619000;  // kHz
        case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 6144;
        case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: return 512;
        case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 3;
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
        case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
        case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
        case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: return 1;
        default: return 0;
    }
}

}  // namespace software_runtime

using namespace software_runtime;

CUDA_API cudaError_t cudaGetDeviceCount(int* count) { *count = num_devices(); return cudaSuccess; }
CUDA_API cudaError_t cudaGetDevice(int* device) { *device = current_device(); return cudaSuccess; }
CUDA_API cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= num_devices()) return fail(cudaErrorInvalidDevice);
    current_device() = device;
    return cudaSuccess;
}
CUDA_API cudaError_t cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
CUDA_API cudaError_t cudaRuntimeGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
CUDA_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) { *value = attribute(which); return cudaSuccess; }
CUDA_API cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) { std::snprintf(text, static_cast<size_t>(bytes), "0000:%02x:00.0", device + 1); return cudaSuccess; }
CUDA_API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return cudaSuccess; }
CUDA_API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
CUDA_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
CUDA_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    std::memset(p, 0, sizeof *p);
    std::strcpy(p->name, gpu().name);
    p->major = gpu().major;
    p->minor = gpu().minor;
    p->multiProcessorCount = gpu().num_multiprocessors;
    p->totalGlobalMem = gpu().memory_bytes;
    p->sharedMemPerBlock = kSharedBytes;
    p->sharedMemPerBlockOptin = kSharedBytesOptIn;
    p->sharedMemPerMultiprocessor = kSharedBytesOfMultiprocessor;
    p->regsPerBlock = p->regsPerMultiprocessor = kRegisters;
    p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = kThreadsOfBlock;
    p->maxThreadsDim[2] = kMaxBlockZ;
    p->maxThreadsPerMultiProcessor = kThreadsOfMultiprocessor;
    p->maxBlocksPerMultiProcessor = kBlocksOfMultiprocessor;
    p->maxGridSize[0] = kMaxGridX;
    p->maxGridSize[1] = p->maxGridSize[2] = kMaxGridYz;
    p->l2CacheSize = kL2Bytes;
    p->memoryBusWidth = attribute(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH);
    p->totalConstMem = 65536;
    p->textureAlignment = 512;
    p->memPitch = kMaxGridX;
    p->asyncEngineCount = 3;
    p->concurrentKernels = p->unifiedAddressing = p->canMapHostMemory = p->cooperativeLaunch = 1;
    return cudaSuccess;
}

CUDA_API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUDA_API CUresult cuDriverGetVersion(int* version) { *version = CUDART_VERSION; return CUDA_SUCCESS; }
CUDA_API CUresult cuDeviceGet(CUdevice* device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
CUDA_API CUresult cuDeviceGetCount(int* count) { *count = num_devices(); return CUDA_SUCCESS; }
CUDA_API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) { *value = attribute(which); return CUDA_SUCCESS; }
CUDA_API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) { *context = reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device) + 1); return CUDA_SUCCESS; }
CUDA_API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) { *flags = 0; *is_active = 1; return CUDA_SUCCESS; }
CUDA_API CUresult cuCtxGetCurrent(CUcontext* context) { return cuDevicePrimaryCtxRetain(context, current_device()); }
CUDA_API CUresult cuCtxSetCurrent(CUcontext context) {
    if (context) current_device() = static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1;
    return CUDA_SUCCESS;
}
CUDA_API CUresult cuCtxPushCurrent(CUcontext) { return CUDA_SUCCESS; }
CUDA_API CUresult cuCtxPopCurrent(CUcontext*) { return CUDA_SUCCESS; }
CUDA_API CUresult cuCtxGetLimit(size_t* value, CUlimit) { *value = 0; return CUDA_SUCCESS; }
CUDA_API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
