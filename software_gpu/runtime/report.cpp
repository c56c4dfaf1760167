// What happened: counts by name, problems with the stack of Python, and the C interface for Python.
#include "runtime.h"

#include <cstdio>
#include <dlfcn.h>
#include <utility>

namespace software_runtime {

namespace {

std::recursive_mutex& mutex() {
    static auto* found = new std::recursive_mutex;
    return *found;
}

std::map<std::string, long>& counts() {
    static auto* all = new std::map<std::string, long>;
    return *all;
}

std::vector<std::string>& problems() {
    static auto* all = new std::vector<std::string>;
    return *all;
}

thread_local cudaError_t last_error = cudaSuccess;

void (*watcher)(const char*) = nullptr;

template <class F>
F of_python(const char* name) {
    return reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
}

bool holds_python() {
    static const auto check = of_python<int (*)()>("PyGILState_Check");
    static const auto is_running = of_python<int (*)()>("Py_IsInitialized");
    return check && is_running && is_running() && check();
}

}  // namespace

// A thread that has Python and waits for the lock would stop the thread that has the lock and runs a function of Python.
Lock::Lock() {
    if (mutex().try_lock()) return;
    if (!holds_python()) {
        mutex().lock();
        return;
    }
    void* thread = of_python<void* (*)()>("PyEval_SaveThread")();
    mutex().lock();
    of_python<void (*)(void*)>("PyEval_RestoreThread")(thread);
}

Lock::~Lock() { mutex().unlock(); }

void count(const std::string& what, long by) {
    Lock lock;
    counts()[what] += by;
}

void problem(const std::string& what) {
    Lock lock;
    for (const std::string& known : problems()) {
        if (known == what) return;
    }
    problems().push_back(what);
    if (watcher) watcher(("problem: " + what).c_str());
    std::fprintf(stderr, "software GPU: %s\n", what.c_str());
    std::fflush(stderr);
    static const auto is_running = of_python<int (*)()>("Py_IsInitialized");
    if (!is_running || !is_running()) return;
    const int state = of_python<int (*)()>("PyGILState_Ensure")();  // an operator has let go of it
    of_python<int (*)(const char*)>("PyRun_SimpleString")("import traceback; traceback.print_stack(limit=8)");
    of_python<void (*)(int)>("PyGILState_Release")(state);
}

void hold_up(const std::string& what) {
    Lock lock;
    if (watcher) watcher(what.c_str());
}

cudaError_t fail(cudaError_t error) {
    last_error = error;
    return error;
}

}  // namespace software_runtime

using namespace software_runtime;

CUDA_API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
CUDA_API cudaError_t cudaPeekAtLastError() { return last_error; }
CUDA_API const char* cudaGetErrorString(cudaError_t error) {
    static thread_local char words[64];
    std::snprintf(words, sizeof words, "error %d of the software GPU", static_cast<int>(error));
    return words;
}
CUDA_API const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

// Calls `function(number)` when the stream comes to it, every time that its graph is launched.
CUDA_API void software_gpu_submit(void* stream, const char* name, void (*function)(long), long number) {
    submit(stream_of(stream), {name, [=] { function(number); }});
}
CUDA_API void software_gpu_problem(const char* what) { problem(what); }
CUDA_API long software_gpu_num_problems() { Lock lock; return static_cast<long>(problems().size()); }
CUDA_API const char* software_gpu_problem_at(long index) { Lock lock; return problems()[static_cast<size_t>(index)].c_str(); }
CUDA_API void software_gpu_watch(void (*function)(const char*)) { Lock lock; watcher = function; }
CUDA_API void software_gpu_reset_counts() {
    Lock lock;
    counts().clear();
    forget_launches();
}
CUDA_API void software_gpu_each_count(void (*function)(const char*, long)) {
    Lock lock;
    for (const auto& [what, num] : counts()) function(what.c_str(), num);
    std::map<std::string, long> in_graphs;
    each_in_graphs([&](const std::string& name, long num) { in_graphs["in graphs: " + name] += num; });
    for (const auto& [what, num] : in_graphs) function(what.c_str(), num);
}
