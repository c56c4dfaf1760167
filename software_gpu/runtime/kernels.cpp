// Kernels: those of libtorch are registered by name and only counted; those of modules that the driver loads (Triton's, the plugin
// library's) are executed from their PTX, when it was given beforehand.
#include "runtime.h"

#include <cstdio>
#include <cstring>
#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <unordered_map>

namespace software_runtime {

namespace {

constexpr int kErrorBytes = 4096, kMostParameters = 256;
constexpr uint64_t kMostInstructions = 2'000'000'000;

// software_gpu/ptx/api.cpp; null until software_gpu_use_executor was called.
struct Executor {
    void* (*load)(const char* ptx, const char* entry, char* error, int error_bytes) = nullptr;
    int (*parameters)(const void* kernel, int* offsets, int* sizes, int capacity) = nullptr;
    int (*launch)(const void* kernel, const uint32_t* grid, int num_threads, int shared_bytes, const uint8_t* parameters, const uint64_t* ranges, int num_ranges, int is_late,
                  int finds_races, uint64_t max_instructions, uint64_t* num_instructions, char* error, int error_bytes) = nullptr;
} executor;

std::unordered_map<std::string, std::string>& ptx_of_cubin() {
    static auto* all = new std::unordered_map<std::string, std::string>;
    return *all;
}

std::unordered_map<const void*, std::string>& names_of_libtorch() {
    static auto* all = new std::unordered_map<const void*, std::string>;
    return *all;
}

struct Module {
    std::string cubin;
};

struct Function {
    std::string name;
    const void* kernel = nullptr;  // of the executor; null: it is counted
    std::vector<int> offsets, sizes;  // of parameters
};

std::string readable(const char* name) {
    int status = 0;
    char* text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
    const std::string found = status == 0 ? text : name;
    std::free(text);
    return found;
}

// An ELF file ends with its section headers or its program headers.
std::string whole_cubin(const void* image) {
    Elf64_Ehdr header;
    std::memcpy(&header, image, sizeof header);
    if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) return {};
    const size_t sections = header.e_shoff + size_t{header.e_shnum} * header.e_shentsize;
    const size_t programs = header.e_phoff + size_t{header.e_phnum} * header.e_phentsize;
    return {static_cast<const char*>(image), std::max(sections, programs)};
}

// CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
bool fits(dim3 grid, dim3 block, size_t shared_bytes) {
    return grid.x && grid.y && grid.z && grid.x <= 2147483647u && grid.y <= 65535 && grid.z <= 65535 && block.x * block.y * block.z <= 1024 && shared_bytes <= 227 << 10;
}

cudaError_t launch(const std::string& name, dim3 grid, dim3 block, size_t shared_bytes, Stream* stream, std::function<void()> run) {
    if (!fits(grid, block, shared_bytes)) {
        char text[160];
        std::snprintf(text, sizeof text, ": grid %u %u %u, block %u %u %u, %zu bytes of shared memory", grid.x, grid.y, grid.z, block.x, block.y, block.z, shared_bytes);
        problem("an invalid launch of " + name + text);
        return fail(cudaErrorInvalidConfiguration);
    }
    submit(stream, {"kernel " + name, std::move(run)});
    return cudaSuccess;
}

// What runs it later, with its parameters as they are now.
std::function<void()> execution(const Function& function, dim3 grid, dim3 block, unsigned shared_bytes, void** given) {
    if (!function.kernel) {
        if (!executes()) return {};
        return [name = function.name] { problem("not executed, as it has no PTX: " + name); };
    }
    const size_t bytes = function.sizes.empty() ? 0 : static_cast<size_t>(function.offsets.back() + function.sizes.back());
    std::vector<uint8_t> parameters(bytes);
    for (size_t i = 0; i < function.sizes.size(); ++i) std::memcpy(&parameters[static_cast<size_t>(function.offsets[i])], given[i], static_cast<size_t>(function.sizes[i]));
    return [=, &function] {
        const bool finds_races = setting("SOFTWARE_GPU_RACES", 0) != 0, is_late = setting("SOFTWARE_GPU_LATE", 1) != 0;
        const uint32_t blocks[3] = {grid.x, grid.y, grid.z};
        const std::vector<uint64_t> ranges = device_ranges();
        char error[kErrorBytes];
        uint64_t num_instructions = 0;
        const int failed = executor.launch(function.kernel, blocks, static_cast<int>(block.x * block.y * block.z), static_cast<int>(shared_bytes), parameters.data(), ranges.data(),
                                           static_cast<int>(ranges.size() / 2), is_late, finds_races, kMostInstructions, &num_instructions, error, kErrorBytes);
        if (failed) problem(function.name + ": " + error);
    };
}

}  // namespace

}  // namespace software_runtime

using namespace software_runtime;

CUDA_API void software_gpu_use_executor(void* load, void* parameters, void* launch_function) {
    executor.load = reinterpret_cast<decltype(executor.load)>(load);
    executor.parameters = reinterpret_cast<decltype(executor.parameters)>(parameters);
    executor.launch = reinterpret_cast<decltype(executor.launch)>(launch_function);
}

// The PTX that a cubin was assembled from.
CUDA_API void software_gpu_add_ptx(const char* cubin, size_t bytes, const char* ptx) {
    Lock lock;
    ptx_of_cubin()[std::string(cubin, bytes)] = ptx;
}

CUDA_API CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    Lock lock;
    if (is_unsafe_in_capture("cuModuleLoadData (a kernel is loaded)")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    count("cuModuleLoadData");
    *module = reinterpret_cast<CUmodule>(new Module{whole_cubin(image)});
    return CUDA_SUCCESS;
}
CUDA_API CUresult cuModuleUnload(CUmodule module) { delete reinterpret_cast<Module*>(module); return CUDA_SUCCESS; }

CUDA_API CUresult cuModuleGetFunction(CUfunction* handle, CUmodule module, const char* name) {
    Lock lock;
    auto* function = new Function{name, nullptr, {}, {}};
    *handle = reinterpret_cast<CUfunction>(function);
    const auto ptx = ptx_of_cubin().find(reinterpret_cast<Module*>(module)->cubin);
    if (!executes() || ptx == ptx_of_cubin().end()) return CUDA_SUCCESS;
    char error[kErrorBytes];
    function->kernel = executor.load(ptx->second.c_str(), name, error, kErrorBytes);
    if (!function->kernel) {
        problem(std::string(name) + ": " + error);
        return CUDA_ERROR_INVALID_PTX;
    }
    function->offsets.resize(kMostParameters);
    function->sizes.resize(kMostParameters);
    const auto num = static_cast<size_t>(executor.parameters(function->kernel, function->offsets.data(), function->sizes.data(), kMostParameters));
    function->offsets.resize(num);
    function->sizes.resize(num);
    return CUDA_SUCCESS;
}

CUDA_API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction) {
    *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
    return CUDA_SUCCESS;
}
CUDA_API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUDA_API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
CUDA_API CUresult cuOccupancyMaxActiveClusters(int* num, CUfunction, const CUlaunchConfig*) { *num = 1; return CUDA_SUCCESS; }

CUDA_API CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction handle, void** parameters, void**) {
    Lock lock;
    const Function& function = *reinterpret_cast<Function*>(handle);
    const dim3 grid(config->gridDimX, config->gridDimY, config->gridDimZ), block(config->blockDimX, config->blockDimY, config->blockDimZ);
    return static_cast<CUresult>(launch(function.name, grid, block, config->sharedMemBytes, stream_of(config->hStream), execution(function, grid, block, config->sharedMemBytes, parameters)));
}
CUDA_API CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void** parameters, void** extra) {
    CUlaunchConfig config = {};
    config.gridDimX = grid_x, config.gridDimY = grid_y, config.gridDimZ = grid_z;
    config.blockDimX = block_x, config.blockDimY = block_y, config.blockDimZ = block_z;
    config.sharedMemBytes = shared_bytes;
    config.hStream = stream;
    return cuLaunchKernelEx(&config, function, parameters, extra);
}
CUDA_API CUresult cuGetErrorString(CUresult result, const char** text) {
    static thread_local char words[64];
    std::snprintf(words, sizeof words, "error %d of the software GPU", static_cast<int>(result));
    *text = words;
    return CUDA_SUCCESS;
}

// ---- the kernels inside of libtorch

CUDA_API void** __cudaRegisterFatBinary(void*) { static void* handle; return &handle; }
CUDA_API void __cudaRegisterFatBinaryEnd(void**) {}
CUDA_API void __cudaUnregisterFatBinary(void**) {}
CUDA_API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
CUDA_API cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
    constexpr size_t kMostBytes = 4096;  // libtorch's are numbers
    static auto* memory = new std::map<const void*, std::vector<char>>;
    Lock lock;
    *address = memory->try_emplace(symbol, kMostBytes).first->second.data();
    return cudaSuccess;
}
CUDA_API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
    Lock lock;
    names_of_libtorch()[host] = name;
}

namespace {
thread_local struct {
    dim3 grid, block;
    size_t shared_bytes;
    void* stream;
} configuration;
}  // namespace

CUDA_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) { configuration = {grid, block, shared_bytes, stream}; return 0; }
CUDA_API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared_bytes = configuration.shared_bytes;
    *static_cast<void**>(stream) = configuration.stream;
    return cudaSuccess;
}

CUDA_API cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t shared_bytes, cudaStream_t stream) {
    Lock lock;
    const auto found = names_of_libtorch().find(function);
    const std::string name = found == names_of_libtorch().end() ? "of nobody" : readable(found->second.c_str());
    std::function<void()> run;
    const bool takes_time_alone = name.find("spin_kernel") != std::string::npos;  // torch.cuda._sleep
    if (executes() && !takes_time_alone) run = [name] { problem("not executed, a kernel of libtorch: " + name.substr(0, 300)); };
    return launch(name, grid, block, shared_bytes, stream_of(stream), std::move(run));
}
CUDA_API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) { *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function)); return cudaSuccess; }
CUDA_API cudaError_t __cudaLaunchKernel(cudaKernel_t function, dim3 grid, dim3 block, void** parameters, size_t shared_bytes, cudaStream_t stream) { return cudaLaunchKernel(function, grid, block, parameters, shared_bytes, stream); }
CUDA_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** parameters) { return cudaLaunchKernel(function, config->gridDim, config->blockDim, parameters, config->dynamicSmemBytes, config->stream); }
CUDA_API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
CUDA_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    std::memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->binaryVersion = attributes->ptxVersion = gpu().major * 10;  // PyTorch is built for sm_90 and sm_100, and none of sm_103
    attributes->maxDynamicSharedSizeBytes = 48 << 10;
    return cudaSuccess;
}
CUDA_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* num, const void*, int, size_t, unsigned) { *num = 4; return cudaSuccess; }
CUDA_API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
