// NCCL, found when a collective needs it. Declared here, so that the library builds without NCCL's headers.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

namespace dflash_trt
{

/// ncclDataType_t and ncclRedOp_t, of NCCL 2.10 and newer.
enum class NcclType : int32_t
{
    kFloat16 = 6,
    kFloat32 = 7,
    kBFloat16 = 9,
};
constexpr int32_t kNcclSum = 0;

class Nccl
{
public:
    /// Throws Problem when libnccl.so.2 cannot be loaded; the next call tries again.
    static Nccl const& get();

    /// Throws Problem unless `result` is success.
    void check(int32_t result, char const* call) const;

    int32_t (*comm_count)(void const* communicator, int32_t* count) = nullptr;
    int32_t (*all_reduce)(void const* send, void* receive, size_t count, NcclType type, int32_t op, void* communicator,
        CUstream stream) = nullptr;
    int32_t (*all_gather)(void const* send, void* receive, size_t send_count, NcclType type, void* communicator,
        CUstream stream) = nullptr;
    int32_t (*reduce_scatter)(void const* send, void* receive, size_t receive_count, NcclType type, int32_t op,
        void* communicator, CUstream stream) = nullptr;
    int32_t (*send)(void const* send, size_t count, NcclType type, int32_t peer, void* communicator, CUstream stream)
        = nullptr;
    int32_t (*receive)(void* receive, size_t count, NcclType type, int32_t peer, void* communicator, CUstream stream)
        = nullptr;
    int32_t (*group_start)() = nullptr;
    int32_t (*group_end)() = nullptr;

private:
    Nccl();

    template <typename Function>
    void find(void* library, char const* name, Function& function);

    char const* (*get_error_string)(int32_t result) = nullptr;
};

} // namespace dflash_trt
