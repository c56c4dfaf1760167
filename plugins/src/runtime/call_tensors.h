// Device addresses that change from call to call, and how a launch that was prepared before finds them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace dflash_trt
{

/// The tensors of one call of an operation, in the order of its contract.
struct CallTensors
{
    void const* const* inputs;
    void* const* outputs;
    void* workspace;
};

struct Shape
{
    int32_t rank;
    std::array<int64_t, 8> sizes; // 0 from rank on
};

enum class TensorSource : uint8_t
{
    kInput,
    kOutput,
    kWorkspace,
};

/// One of them, or a place in it.
struct TensorSlot
{
    TensorSource source;
    int32_t index;       // in the contract; 0 for the workspace
    size_t offset_bytes; // from the tensor's start
};

} // namespace dflash_trt
