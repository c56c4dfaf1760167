// CUDA's runtime and driver without a GPU: device memory is the process's own, streams are queues of operations that run when
// somebody waits for them, and what CUDA forbids is recorded with a stack of Python.
//
// Rules and names: the CUDA Runtime API (streams, events, "Stream Capture") and the Driver API (modules, launches).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#define CUDA_API extern "C" __attribute__((visibility("default")))

namespace software_runtime {

// ---- the GPU that is described

struct Gpu {
    const char* name;
    int major, minor, num_multiprocessors;
    size_t memory_bytes;
};

const Gpu& gpu();
int num_devices();
int& current_device();           // of the thread
bool executes();                 // kernels and library calls compute; else they are counted
long setting(const char* name, long otherwise);  // of the environment
int attribute(int device_attribute);

// ---- what is told

void count(const std::string& what, long by = 1);
void problem(const std::string& what);  // told once, with the stack of Python
void hold_up(const std::string& what);   // the host waits, or the device must: told to who watches
void each_in_graphs(const std::function<void(const std::string& name, long count)>& tell);
void forget_launches();
cudaError_t fail(cudaError_t error);

// Everything below belongs to whoever holds this. Who waits for it lets other threads run Python meanwhile.
class Lock {
public:
    Lock();
    ~Lock();
    Lock(const Lock&) = delete;
};

// ---- memory

struct Block {
    size_t bytes;
    bool is_pinned;  // else on a device
    int device;
    int num_reads = 0, num_writes = 0;  // copies in flight
};

Block* block_at(const void* address, uintptr_t* begin = nullptr);
std::vector<uint64_t> device_ranges();  // begin and end of each allocation

// ---- streams

struct Operation {
    std::string name;
    std::function<void()> run;  // may be empty
};

struct Graph {
    uint64_t id;
    cudaStreamCaptureMode mode;
    std::vector<Operation> operations;  // in the order in which they were captured
    std::set<struct Stream*> streams;
    bool is_invalid = false;
    long num_kernels = 0;
    long num_launches = 0;  // since the counts began
};

struct Stream {
    int device;
    uint64_t num_submitted = 0, num_completed = 0;
    std::deque<Operation> pending;
    std::shared_ptr<Graph> capture;  // that it takes part in
};

Stream* stream_of(void* handle);  // nullptr and the small numbers: the legacy stream of the current device
void submit(Stream* stream, Operation operation);
void complete(Stream* stream, uint64_t until);
void complete_all();
bool is_unsafe_in_capture(const char* call);  // such as cudaMalloc; told
cudaError_t invalidate(Stream* stream, const std::string& why);

}  // namespace software_runtime
