#include "runtime/nccl.h"

#include "runtime/problem.h"

#include <dlfcn.h>

#include <string>

namespace dflash_trt
{
namespace
{
constexpr char kLibrary[] = "libnccl.so.2";
constexpr char kHint[] = "Load the NCCL that made the communicator, with RTLD_GLOBAL, before this library needs it.";
} // namespace

Nccl const& Nccl::get()
{
    static Nccl const nccl;
    return nccl;
}

Nccl::Nccl()
{
    // By its soname: a library that the process has loaded already, as PyTorch's, is the one that is found. Never
    // closed: communicators live as long as the process.
    void* library = dlopen(kLibrary, RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr)
    {
        char const* error = dlerror();
        throw Problem("NCCL", kLibrary, error != nullptr ? error : "no such library", kHint);
    }
    find(library, "ncclCommCount", comm_count);
    find(library, "ncclAllReduce", all_reduce);
    find(library, "ncclAllGather", all_gather);
    find(library, "ncclReduceScatter", reduce_scatter);
    find(library, "ncclSend", send);
    find(library, "ncclRecv", receive);
    find(library, "ncclGroupStart", group_start);
    find(library, "ncclGroupEnd", group_end);
    find(library, "ncclGetErrorString", get_error_string);
}

template <typename Function>
void Nccl::find(void* library, char const* name, Function& function)
{
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr)
    {
        throw Problem("NCCL", std::string("the function ") + name, std::string("none in ") + kLibrary, kHint);
    }
}

void Nccl::check(int32_t result, char const* call) const
{
    if (result != 0)
    {
        throw Problem(std::string("NCCL, ") + call, "success", get_error_string(result),
            "Run with NCCL_DEBUG=INFO to see which rank failed, and why.");
    }
}

} // namespace dflash_trt
