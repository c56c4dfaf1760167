// Device memory is reserved address space, so that models of any size fit; pinned blocks that a copy still reads or writes are
// protected by the host's own pages, so that a host access too early is caught where it happens.
#include "runtime.h"

#include <csignal>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

namespace software_runtime {

namespace {

constexpr size_t kAlignment = 512;  // of cudaMalloc: CUDA C++ Programming Guide, "Device Memory Accesses", at least 256
constexpr uintptr_t kPage = 4096;
constexpr unsigned kWriteFault = 2;  // of x86-64's page fault error code

size_t used_bytes[64], peak_bytes[64];

std::map<uintptr_t, Block>& blocks() {
    static auto* all = new std::map<uintptr_t, Block>;  // outlives every destructor
    return *all;
}

// The host's own memory that was page-locked, which kernels reach by its address.
std::map<uintptr_t, size_t>& registered() {
    static auto* all = new std::map<uintptr_t, size_t>;
    return *all;
}

size_t in_pages(size_t bytes) { return (bytes + kPage - 1) & ~(kPage - 1); }

void* reserve(size_t bytes) {
    void* address = mmap(nullptr, in_pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return address == MAP_FAILED ? nullptr : address;
}

// Of the driver and its context.
size_t reserved_bytes() {
    static const size_t bytes = static_cast<size_t>(setting("SOFTWARE_GPU_CONTEXT_MIB", 600)) << 20;
    return bytes;
}

void protect(uintptr_t begin, const Block& block) {
    const int allowed = block.num_writes ? PROT_NONE : block.num_reads ? PROT_READ : PROT_READ | PROT_WRITE;
    mprotect(reinterpret_cast<void*>(begin), in_pages(block.bytes), allowed);
}

struct sigaction previous;

using SetAction = int (*)(int, const struct sigaction*, struct sigaction*);

SetAction system_sigaction() {
    static const auto found = reinterpret_cast<SetAction>(dlsym(RTLD_NEXT, "sigaction"));
    return found;
}

void on_fault(int, siginfo_t* info, void* context) {
    uintptr_t begin;
    Block* block = block_at(info->si_addr, &begin);
    if (!block || !block->is_pinned || !(block->num_reads || block->num_writes)) {
        system_sigaction()(SIGSEGV, &previous, nullptr);  // and fault again
        return;
    }
    const bool is_write = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & kWriteFault;
    mprotect(reinterpret_cast<void*>(begin), in_pages(block->bytes), PROT_READ | PROT_WRITE);
    problem(std::string("the host ") + (is_write ? "writes" : "reads") + " a pinned block while a copy " + (block->num_writes ? "into" : "out of") + " it is in flight");
}

__attribute__((constructor)) void watch_faults() {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    system_sigaction()(SIGSEGV, &action, &previous);
}

cudaError_t copy(void* to, const void* from, size_t bytes, Stream* stream, bool waits) {
    Lock lock;
    Block *target = block_at(to), *source = block_at(from);
    const bool to_device = target && !target->is_pinned, from_device = source && !source->is_pinned;
    const std::string kind = to_device ? from_device ? "D2D" : "H2D" : from_device ? "D2H" : "H2H";
    const bool is_pageable = (kind == "H2D" && !source) || (kind == "D2H" && !target);
    if (stream->capture && is_pageable) return invalidate(stream, "a copy " + kind + " of pageable memory in a capture");
    if (!stream->capture) count("bytes " + kind + (is_pageable ? ", pageable" : ""), static_cast<long>(bytes));
    // Weights of a model that only takes address space are not copied.
    const bool moves = executes() || bytes <= size_t{1} << 20;
    if (is_pageable || waits) hold_up("a copy " + kind + (is_pageable ? " of pageable memory" : " that the host waits for"));
    if (kind == "H2D" && is_pageable) {  // staged before the call returns
        auto content = std::make_shared<std::vector<char>>(moves ? bytes : 0);
        if (moves) std::memcpy(content->data(), from, bytes);
        submit(stream, {"copy H2D, pageable", [=] { std::memcpy(to, content->data(), content->size()); }});
        return cudaSuccess;
    }
    uintptr_t begin = 0;
    int Block::*in_flight = nullptr;
    if (!stream->capture && !is_pageable && (kind == "H2D" || kind == "D2H")) {
        in_flight = kind == "H2D" ? &Block::num_reads : &Block::num_writes;
        Block* pinned = kind == "H2D" ? block_at(from, &begin) : block_at(to, &begin);
        ++(pinned->*in_flight);
        protect(begin, *pinned);
    }
    submit(stream, {"copy " + kind + (is_pageable ? ", pageable" : ""), [=] {
        if (in_flight) {
            Block* pinned = block_at(reinterpret_cast<void*>(begin));
            --(pinned->*in_flight);
            protect(begin, *pinned);
        }
        if (moves) std::memmove(to, from, bytes);
    }});
    if (waits || (kind == "D2H" && is_pageable)) complete(stream, stream->num_submitted);
    return cudaSuccess;
}

}  // namespace

Block* block_at(const void* address, uintptr_t* begin) {
    const auto wanted = reinterpret_cast<uintptr_t>(address);
    auto found = blocks().upper_bound(wanted);
    if (found == blocks().begin()) return nullptr;
    --found;
    if (wanted >= found->first + found->second.bytes) return nullptr;
    if (begin) *begin = found->first;
    return &found->second;
}

std::vector<uint64_t> device_ranges() {
    std::vector<uint64_t> ranges;
    for (const auto& [begin, block] : blocks()) {
        if (!block.is_pinned) ranges.insert(ranges.end(), {begin, begin + block.bytes});
    }
    for (const auto& [begin, bytes] : registered()) ranges.insert(ranges.end(), {begin, begin + bytes});
    return ranges;
}

}  // namespace software_runtime

using namespace software_runtime;

// Files of weights are mapped privately and larger than the host's memory; what is never written needs none.
CUDA_API void* mmap(void* address, size_t bytes, int protection, int flags, int file, off_t offset) noexcept {
    if (file >= 0 && flags & MAP_PRIVATE) flags |= MAP_NORESERVE;
    return reinterpret_cast<void*>(syscall(SYS_mmap, address, bytes, protection, flags, file, offset));
}
CUDA_API void* mmap64(void* address, size_t bytes, int protection, int flags, int file, off64_t offset) noexcept { return mmap(address, bytes, protection, flags, file, offset); }

// Who watches faults later (Python's faulthandler) gets those that are not of a copy.
CUDA_API int sigaction(int signal, const struct sigaction* action, struct sigaction* old) noexcept {
    if (signal != SIGSEGV) return system_sigaction()(signal, action, old);
    if (old) *old = previous;
    if (action) previous = *action;
    return 0;
}

CUDA_API cudaError_t cudaMalloc(void** address, size_t bytes) {
    Lock lock;
    if (is_unsafe_in_capture("cudaMalloc")) return fail(cudaErrorStreamCaptureUnsupported);
    bytes = (bytes + kAlignment - 1) & ~(kAlignment - 1);
    const int device = current_device();
    if (used_bytes[device] + bytes + reserved_bytes() > gpu().memory_bytes) {
        count("out of memory");
        return fail(cudaErrorMemoryAllocation);
    }
    *address = reserve(bytes);
    if (!*address) return fail(cudaErrorMemoryAllocation);
    blocks()[reinterpret_cast<uintptr_t>(*address)] = {bytes, false, device};
    used_bytes[device] += bytes;
    peak_bytes[device] = std::max(peak_bytes[device], used_bytes[device]);
    count("cudaMalloc");
    hold_up("cudaMalloc");
    return cudaSuccess;
}

// Waits for the device, as CUDA's does.
CUDA_API cudaError_t cudaFree(void* address) {
    Lock lock;
    if (!address) return cudaSuccess;
    if (is_unsafe_in_capture("cudaFree")) return fail(cudaErrorStreamCaptureUnsupported);
    const auto found = blocks().find(reinterpret_cast<uintptr_t>(address));
    if (found == blocks().end()) {
        problem("cudaFree of what cudaMalloc did not give");
        return fail(cudaErrorInvalidValue);
    }
    complete_all();
    used_bytes[found->second.device] -= found->second.bytes;
    munmap(address, in_pages(found->second.bytes));
    blocks().erase(found);
    count("cudaFree");
    hold_up("cudaFree");
    return cudaSuccess;
}

CUDA_API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    Lock lock;
    *total_bytes = gpu().memory_bytes;
    *free_bytes = gpu().memory_bytes - used_bytes[current_device()] - reserved_bytes();
    return cudaSuccess;
}

CUDA_API cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
    Lock lock;
    if (is_unsafe_in_capture("cudaHostAlloc")) return fail(cudaErrorStreamCaptureUnsupported);
    *address = reserve(bytes);
    if (!*address) return fail(cudaErrorMemoryAllocation);
    blocks()[reinterpret_cast<uintptr_t>(*address)] = {bytes, true, current_device()};
    count("cudaHostAlloc");
    hold_up("cudaHostAlloc");
    return cudaSuccess;
}

CUDA_API cudaError_t cudaFreeHost(void* address) {
    Lock lock;
    const auto found = blocks().find(reinterpret_cast<uintptr_t>(address));
    if (found == blocks().end()) return fail(cudaErrorInvalidValue);
    complete_all();
    munmap(address, in_pages(found->second.bytes));
    blocks().erase(found);
    return cudaSuccess;
}

CUDA_API cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
    Lock lock;
    const bool is_new = registered().emplace(reinterpret_cast<uintptr_t>(address), bytes).second;
    return is_new ? cudaSuccess : fail(cudaErrorHostMemoryAlreadyRegistered);
}

CUDA_API cudaError_t cudaHostUnregister(void* address) {
    Lock lock;
    complete_all();
    return registered().erase(reinterpret_cast<uintptr_t>(address)) ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}

CUDA_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
    Lock lock;
    const Block* block = block_at(address);
    std::memset(attributes, 0, sizeof *attributes);
    attributes->type = !block ? cudaMemoryTypeUnregistered : block->is_pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = block ? block->device : 0;
    attributes->devicePointer = const_cast<void*>(address);
    attributes->hostPointer = block && !block->is_pinned ? nullptr : const_cast<void*>(address);
    return cudaSuccess;
}

CUDA_API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute which, CUdeviceptr address) {
    Lock lock;
    const Block* block = block_at(reinterpret_cast<void*>(address));
    if (!block) return CUDA_ERROR_INVALID_VALUE;
    switch (which) {
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<CUdeviceptr*>(value) = address; break;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *static_cast<unsigned*>(value) = block->is_pinned ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE; break;
        default: *static_cast<unsigned*>(value) = 0;
    }
    return CUDA_SUCCESS;
}

CUDA_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) { return copy(to, from, bytes, stream_of(stream), false); }
CUDA_API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) { return copy(to, from, bytes, stream_of(stream), false); }
CUDA_API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    if (is_unsafe_in_capture("cudaMemcpy")) return fail(cudaErrorStreamCaptureImplicit);
    return copy(to, from, bytes, stream_of(nullptr), true);
}
CUDA_API cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
    const bool sets = executes() || bytes <= size_t{1} << 20;
    submit(stream_of(stream), {"memset", [=] { if (sets) std::memset(to, value, bytes); }});
    return cudaSuccess;
}
CUDA_API cudaError_t cudaMemset(void* to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }
CUDA_API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
CUDA_API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* address) { std::memcpy(handle, &address, sizeof address); return cudaSuccess; }

CUDA_API size_t software_gpu_used_bytes(int device) { Lock lock; return used_bytes[device]; }
CUDA_API size_t software_gpu_peak_bytes(int device) { Lock lock; return peak_bytes[device]; }
