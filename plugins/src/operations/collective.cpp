#include "operations/collective.h"

#include "runtime/problem.h"

#include <atomic>
#include <cstddef>
#include <string>

namespace dflash_trt
{
namespace
{

struct World
{
    std::atomic<void*> communicator{nullptr};
    std::atomic<int64_t> num_ranks{0};
};

World world;

NcclType type_of(FloatType type)
{
    switch (type)
    {
    case FloatType::kFloat32: return NcclType::kFloat32;
    case FloatType::kFloat16: return NcclType::kFloat16;
    case FloatType::kBFloat16: return NcclType::kBFloat16;
    }
    throw Problem("collective", "float32, float16 or bfloat16", "another type", "Cast the tensor.");
}

/// Elements of a rank's part. Throws Problem where ranks do not share them evenly, or have no communicator.
size_t part_of(CollectiveShape const& shape)
{
    require_communicator(shape.num_ranks);
    if (shape.num_elements % shape.num_ranks != 0)
    {
        throw Problem("tensor of a collective",
            "as many elements for each of " + std::to_string(shape.num_ranks) + " ranks",
            std::to_string(shape.num_elements), "Pad its rows.");
    }
    return static_cast<size_t>(shape.num_elements / shape.num_ranks);
}

} // namespace

void set_communicator(void* communicator)
{
    int32_t num_ranks = 0;
    if (communicator != nullptr)
    {
        Nccl const& nccl = Nccl::get();
        nccl.check(nccl.comm_count(communicator, &num_ranks), "ncclCommCount");
    }
    world.num_ranks = num_ranks;
    world.communicator = communicator;
}

void require_communicator(int64_t num_ranks)
{
    int64_t const found = world.num_ranks;
    if (found != num_ranks)
    {
        throw Problem("communicator", "one of " + std::to_string(num_ranks) + " ranks",
            found == 0 ? "none" : "one of " + std::to_string(found),
            "Call dflash_trt_set_communicator before a context of the engine is made.");
    }
}

void all_reduce(CollectiveShape const& shape, void const* x, void* summed, CUstream stream)
{
    require_communicator(shape.num_ranks);
    Nccl const& nccl = Nccl::get();
    nccl.check(nccl.all_reduce(x, summed, static_cast<size_t>(shape.num_elements), type_of(shape.type), kNcclSum,
                   world.communicator, stream),
        "ncclAllReduce");
}

void all_gather(CollectiveShape const& shape, void const* x, void* gathered, CUstream stream)
{
    require_communicator(shape.num_ranks);
    Nccl const& nccl = Nccl::get();
    nccl.check(nccl.all_gather(x, gathered, static_cast<size_t>(shape.num_elements), type_of(shape.type),
                   world.communicator, stream),
        "ncclAllGather");
}

void reduce_scatter(CollectiveShape const& shape, void const* x, void* summed, CUstream stream)
{
    size_t const num_elements = part_of(shape);
    Nccl const& nccl = Nccl::get();
    nccl.check(nccl.reduce_scatter(x, summed, num_elements, type_of(shape.type), kNcclSum, world.communicator, stream),
        "ncclReduceScatter");
}

void all_to_all(CollectiveShape const& shape, void const* x, void* received, CUstream stream)
{
    size_t const num_elements = part_of(shape);
    size_t const num_bytes = num_elements * element_bytes(shape.type);
    Nccl const& nccl = Nccl::get();
    nccl.check(nccl.group_start(), "ncclGroupStart");
    for (int32_t rank = 0; rank < shape.num_ranks; ++rank)
    {
        size_t const start = static_cast<size_t>(rank) * num_bytes;
        nccl.check(nccl.send(static_cast<std::byte const*>(x) + start, num_elements, type_of(shape.type), rank,
                       world.communicator, stream),
            "ncclSend");
        nccl.check(nccl.receive(static_cast<std::byte*>(received) + start, num_elements, type_of(shape.type), rank,
                       world.communicator, stream),
            "ncclRecv");
    }
    nccl.check(nccl.group_end(), "ncclGroupEnd");
}

} // namespace dflash_trt
