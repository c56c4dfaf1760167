// Stands in for libnccl.so.2 in tests: NCCL's own interface over shared memory of the host, for ranks that are threads
// or processes of one machine. Buffers are host memory; a call returns when all ranks have made it. Knows nothing of
// who calls.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

namespace
{

constexpr int kSuccess = 0;
constexpr int kSystemError = 2;
constexpr int kInvalidArgument = 4;
constexpr int kMaxRanks = 16;
constexpr size_t kSlotBytes = size_t{4} << 20; // a collective's largest tensor; the memory is sparse
constexpr auto kTimeout = std::chrono::seconds(60);

struct World
{
    std::atomic<int> num_joined;
    std::atomic<int> num_arrived;
    std::atomic<int> generation;
    std::atomic<int> num_collectives; // that were finished
    alignas(64) unsigned char slots[kMaxRanks][kSlotBytes];
};

struct Communicator
{
    World* world;
    int num_ranks;
    int rank;
};

struct Transfer
{
    void const* from;
    void* to;
    size_t num_bytes;
    int peer;
};

struct Group
{
    Communicator* communicator;
    std::vector<Transfer> sends;
    std::vector<Transfer> receives;
};

thread_local Group group;

template <typename Condition>
bool wait_until(Condition const& is_met)
{
    auto const end = std::chrono::steady_clock::now() + kTimeout;
    while (!is_met())
    {
        if (std::chrono::steady_clock::now() > end)
        {
            return false;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return true;
}

bool barrier(Communicator const& self)
{
    World& world = *self.world;
    int const generation = world.generation;
    if (++world.num_arrived == self.num_ranks)
    {
        world.num_arrived = 0;
        ++world.generation;
        return true;
    }
    return wait_until([&] { return world.generation != generation; });
}

size_t size_of(int type)
{
    switch (type)
    {
    case 6: return 2;
    case 7: return 4;
    case 9: return 2;
    default: return 0;
    }
}

float load(unsigned char const* from, int type)
{
    if (type == 7)
    {
        float value;
        std::memcpy(&value, from, 4);
        return value;
    }
    uint16_t half;
    std::memcpy(&half, from, 2);
    if (type == 9)
    {
        uint32_t const bits = uint32_t{half} << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }
    _Float16 value;
    std::memcpy(&value, &half, 2);
    return static_cast<float>(value);
}

void store(float value, unsigned char* to, int type)
{
    if (type == 7)
    {
        std::memcpy(to, &value, 4);
    }
    else if (type == 9)
    {
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        auto const rounded = static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
        std::memcpy(to, &rounded, 2);
    }
    else
    {
        auto const half = static_cast<_Float16>(value);
        std::memcpy(to, &half, 2);
    }
}

/// Every rank's tensor lies in its slot between the two barriers.
template <typename Read>
int exchange(Communicator const& self, void const* send, size_t num_bytes, Read const& read)
{
    if (num_bytes == 0 || num_bytes > kSlotBytes)
    {
        return kInvalidArgument;
    }
    std::memcpy(self.world->slots[self.rank], send, num_bytes);
    if (!barrier(self))
    {
        return kSystemError;
    }
    read();
    if (!barrier(self))
    {
        return kSystemError;
    }
    if (self.rank == 0)
    {
        ++self.world->num_collectives;
    }
    return kSuccess;
}

} // namespace

extern "C"
{

struct ncclUniqueId
{
    char internal[128];
};

int ncclGetUniqueId(ncclUniqueId* id)
{
    static std::atomic<int> num_made{0};
    std::memset(id, 0, sizeof *id);
    std::snprintf(id->internal, sizeof id->internal, "/dflash_trt_fake_nccl_%d_%d", getpid(), num_made++);
    return kSuccess;
}

int ncclCommInitRank(Communicator** communicator, int num_ranks, ncclUniqueId id, int rank)
{
    if (num_ranks < 1 || num_ranks > kMaxRanks || rank < 0 || rank >= num_ranks)
    {
        return kInvalidArgument;
    }
    int const file = shm_open(id.internal, O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, sizeof(World)) != 0)
    {
        return kSystemError;
    }
    void* const memory = mmap(nullptr, sizeof(World), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED)
    {
        return kSystemError;
    }
    auto* const world = static_cast<World*>(memory); // zeros
    ++world->num_joined;
    if (!wait_until([&] { return world->num_joined >= num_ranks; }))
    {
        return kSystemError;
    }
    shm_unlink(id.internal); // the mappings keep it
    *communicator = new Communicator{world, num_ranks, rank};
    return kSuccess;
}

int ncclCommDestroy(Communicator* communicator)
{
    munmap(communicator->world, sizeof(World));
    delete communicator;
    return kSuccess;
}

int ncclCommCount(Communicator const* communicator, int* count)
{
    *count = communicator->num_ranks;
    return kSuccess;
}

int ncclAllReduce(
    void const* send, void* receive, size_t count, int type, int op, Communicator* communicator, void* /*stream*/)
{
    size_t const size = size_of(type);
    if (op != 0)
    {
        return kInvalidArgument;
    }
    return exchange(*communicator, send, count * size,
        [&]
        {
            for (size_t i = 0; i < count; ++i)
            {
                float sum = 0;
                for (int rank = 0; rank < communicator->num_ranks; ++rank)
                {
                    sum += load(communicator->world->slots[rank] + i * size, type);
                }
                store(sum, static_cast<unsigned char*>(receive) + i * size, type);
            }
        });
}

int ncclAllGather(
    void const* send, void* receive, size_t count, int type, Communicator* communicator, void* /*stream*/)
{
    size_t const num_bytes = count * size_of(type);
    return exchange(*communicator, send, num_bytes,
        [&]
        {
            for (int rank = 0; rank < communicator->num_ranks; ++rank)
            {
                std::memcpy(static_cast<unsigned char*>(receive) + static_cast<size_t>(rank) * num_bytes,
                    communicator->world->slots[rank], num_bytes);
            }
        });
}

int ncclReduceScatter(void const* send, void* receive, size_t receive_count, int type, int op,
    Communicator* communicator, void* /*stream*/)
{
    size_t const size = size_of(type);
    size_t const num_bytes = receive_count * size;
    if (op != 0)
    {
        return kInvalidArgument;
    }
    return exchange(*communicator, send, static_cast<size_t>(communicator->num_ranks) * num_bytes,
        [&]
        {
            size_t const start = static_cast<size_t>(communicator->rank) * num_bytes;
            for (size_t i = 0; i < receive_count; ++i)
            {
                float sum = 0;
                for (int rank = 0; rank < communicator->num_ranks; ++rank)
                {
                    sum += load(communicator->world->slots[rank] + start + i * size, type);
                }
                store(sum, static_cast<unsigned char*>(receive) + i * size, type);
            }
        });
}

/// Calls of a group are made by its end, each rank's to all ranks in their order, of equal sizes.
int ncclGroupStart()
{
    group = {};
    return kSuccess;
}

int ncclSend(void const* send, size_t count, int type, int peer, Communicator* communicator, void* /*stream*/)
{
    group.sends.push_back({send, nullptr, count * size_of(type), peer});
    group.communicator = communicator;
    return kSuccess;
}

int ncclRecv(void* receive, size_t count, int type, int peer, Communicator* communicator, void* /*stream*/)
{
    group.receives.push_back({nullptr, receive, count * size_of(type), peer});
    group.communicator = communicator;
    return kSuccess;
}

int ncclGroupEnd()
{
    Communicator const& self = *group.communicator;
    std::vector<unsigned char> sent;
    for (Transfer const& transfer : group.sends)
    {
        bool const is_next = transfer.peer * transfer.num_bytes == sent.size();
        if (!is_next || transfer.num_bytes != group.sends[0].num_bytes)
        {
            return kInvalidArgument;
        }
        auto const* const from = static_cast<unsigned char const*>(transfer.from);
        sent.insert(sent.end(), from, from + transfer.num_bytes);
    }
    return exchange(self, sent.data(), sent.size(),
        [&]
        {
            for (Transfer const& transfer : group.receives)
            {
                size_t const start = static_cast<size_t>(self.rank) * transfer.num_bytes;
                std::memcpy(transfer.to, self.world->slots[transfer.peer] + start, transfer.num_bytes);
            }
        });
}

char const* ncclGetErrorString(int result)
{
    return result == kInvalidArgument ? "invalid argument" : "unhandled system error";
}

/// Of tests: collectives that all ranks have finished.
int fake_nccl_num_collectives(Communicator const* communicator)
{
    return communicator->world->num_collectives;
}

} // extern "C"
