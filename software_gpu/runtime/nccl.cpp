// NCCL between processes of one machine: ranks meet in shared memory when their streams come to an exchange.
//
// Sums are made in the order of the ranks, in float32 for 16-bit types; NCCL documents neither.
#include "runtime.h"

#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

using namespace software_runtime;

namespace {

constexpr int kMaxRanks = 16;
constexpr size_t kPieceBytes = 1 << 20;  // of one rank, between two meetings
constexpr auto kPeerCheck = std::chrono::milliseconds(20);

// What the ranks share; zeros at first.
struct Meeting {
    std::atomic<int32_t> process_ids[kMaxRanks];
    std::atomic<uint64_t> num_arrived;  // over all meetings
    uint8_t pieces[kMaxRanks][kPieceBytes];
};

struct Communicator {
    int num_ranks, rank;
    Meeting* meeting = nullptr;  // null where nothing computes
    uint64_t num_meetings = 0;
    std::atomic<ncclResult_t> error = ncclSuccess;

    // Waits for all ranks; false where one has died.
    bool meet() {
        const uint64_t wanted = ++num_meetings * static_cast<uint64_t>(num_ranks);
        meeting->num_arrived.fetch_add(1);
        auto next_check = std::chrono::steady_clock::now() + kPeerCheck;
        while (meeting->num_arrived.load() < wanted) {
            std::this_thread::yield();
            if (std::chrono::steady_clock::now() < next_check) continue;
            next_check += kPeerCheck;
            for (int peer = 0; peer < num_ranks; ++peer) {
                const int process = meeting->process_ids[peer].load();
                if (process && kill(process, 0) != 0) error = ncclRemoteError;
            }
            if (error != ncclSuccess) return false;
        }
        return true;
    }
};

size_t size_of(ncclDataType_t type) {
    switch (type) {
        case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
        case ncclFloat16: case ncclBfloat16: return 2;
        case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
        default: return 4;
    }
}

float from_bfloat16(uint16_t bits) {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

uint16_t to_bfloat16(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    if (value != value) return 0x7fff;
    return static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);  // to nearest, ties to even
}

template <class T>
void reduce(void* out, const Meeting& meeting, int num_ranks, size_t bytes, ncclRedOp_t op) {
    for (size_t i = 0; i < bytes / sizeof(T); ++i) {
        T total = reinterpret_cast<const T*>(meeting.pieces[0])[i];
        for (int rank = 1; rank < num_ranks; ++rank) {
            const T value = reinterpret_cast<const T*>(meeting.pieces[rank])[i];
            total = op == ncclSum ? total + value : op == ncclMin ? std::min(total, value) : std::max(total, value);
        }
        static_cast<T*>(out)[i] = total;
    }
}

void reduce_bfloat16(void* out, const Meeting& meeting, int num_ranks, size_t bytes) {
    for (size_t i = 0; i < bytes / 2; ++i) {
        float total = 0;
        for (int rank = 0; rank < num_ranks; ++rank) total += from_bfloat16(reinterpret_cast<const uint16_t*>(meeting.pieces[rank])[i]);
        static_cast<uint16_t*>(out)[i] = to_bfloat16(total);
    }
}

void all_reduce(Communicator& own, const void* from, void* to, size_t bytes, ncclDataType_t type, ncclRedOp_t op) {
    for (size_t begin = 0; begin < bytes; begin += kPieceBytes) {
        const size_t size = std::min(kPieceBytes, bytes - begin);
        std::memcpy(own.meeting->pieces[own.rank], static_cast<const uint8_t*>(from) + begin, size);
        if (!own.meet()) return;
        void* out = static_cast<uint8_t*>(to) + begin;
        switch (type) {
            case ncclFloat32: reduce<float>(out, *own.meeting, own.num_ranks, size, op); break;
            case ncclFloat64: reduce<double>(out, *own.meeting, own.num_ranks, size, op); break;
            case ncclInt32: reduce<int32_t>(out, *own.meeting, own.num_ranks, size, op); break;
            case ncclInt64: reduce<int64_t>(out, *own.meeting, own.num_ranks, size, op); break;
            case ncclUint8: reduce<uint8_t>(out, *own.meeting, own.num_ranks, size, op); break;
            case ncclBfloat16: reduce_bfloat16(out, *own.meeting, own.num_ranks, size); break;
            default: problem("not imitated: ncclAllReduce of type " + std::to_string(type));
        }
        if (!own.meet()) return;
    }
}

void all_gather(Communicator& own, const void* from, void* to, size_t bytes) {
    for (size_t begin = 0; begin < bytes; begin += kPieceBytes) {
        const size_t size = std::min(kPieceBytes, bytes - begin);
        std::memcpy(own.meeting->pieces[own.rank], static_cast<const uint8_t*>(from) + begin, size);
        if (!own.meet()) return;
        for (int rank = 0; rank < own.num_ranks; ++rank) std::memcpy(static_cast<uint8_t*>(to) + static_cast<size_t>(rank) * bytes + begin, own.meeting->pieces[rank], size);
        if (!own.meet()) return;
    }
}

void reduce_scatter(Communicator& own, const void* from, void* to, size_t bytes, ncclDataType_t type, ncclRedOp_t op) {
    std::vector<uint8_t> whole(static_cast<size_t>(own.num_ranks) * bytes);
    all_reduce(own, from, whole.data(), whole.size(), type, op);
    std::memcpy(to, whole.data() + static_cast<size_t>(own.rank) * bytes, bytes);
}

// What a rank sends to a peer, or receives from it.
struct Message {
    const void* from;
    void* to;
    size_t bytes;
    int peer;
};

// The messages of a group; all ranks have some.
struct Group {
    int depth = 0;
    ncclComm_t communicator = nullptr;
    cudaStream_t stream = nullptr;
    std::vector<Message> messages;
};
thread_local Group group;

void send_and_receive(Communicator& own, const std::vector<Message>& messages) {
    Message sent[kMaxRanks] = {}, received[kMaxRanks] = {};
    size_t most = 0, sizes[kMaxRanks];
    for (const Message& message : messages) {
        (message.from ? sent : received)[message.peer] = message;
        most = std::max(most, message.bytes);
    }
    std::memcpy(own.meeting->pieces[own.rank], &most, sizeof most);
    if (!own.meet()) return;
    for (int rank = 0; rank < own.num_ranks; ++rank) std::memcpy(&sizes[rank], own.meeting->pieces[rank], sizeof most);
    most = *std::max_element(sizes, sizes + own.num_ranks);
    if (!own.meet()) return;
    for (int shift = 0; shift < own.num_ranks; ++shift) {
        const int source = (own.rank - shift + own.num_ranks) % own.num_ranks;
        const Message &to_peer = sent[(own.rank + shift) % own.num_ranks], &from_peer = received[source];
        for (size_t begin = 0; begin < most; begin += kPieceBytes) {
            if (begin < to_peer.bytes) std::memcpy(own.meeting->pieces[own.rank], static_cast<const uint8_t*>(to_peer.from) + begin, std::min(kPieceBytes, to_peer.bytes - begin));
            if (!own.meet()) return;
            if (begin < from_peer.bytes) std::memcpy(static_cast<uint8_t*>(from_peer.to) + begin, own.meeting->pieces[source], std::min(kPieceBytes, from_peer.bytes - begin));
            if (!own.meet()) return;
        }
    }
}

ncclResult_t add(const Message& message, ncclComm_t communicator, cudaStream_t stream) {
    if (!group.depth) problem("not imitated: ncclSend and ncclRecv outside of a group");
    group.communicator = communicator, group.stream = stream;
    group.messages.push_back(message);
    return ncclSuccess;
}

ncclResult_t join(ncclComm_t* out, int num_ranks, const ncclUniqueId& id, int rank) {
    Lock lock;
    if (num_ranks > kMaxRanks) return ncclInvalidArgument;
    auto* own = new Communicator{num_ranks, rank};
    *out = reinterpret_cast<ncclComm_t>(own);
    if (!executes()) return ncclSuccess;
    const int file = shm_open(id.internal, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(Meeting)) != 0) return ncclSystemError;
    own->meeting = static_cast<Meeting*>(mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    close(file);
    own->meeting->process_ids[rank] = getpid();
    const bool is_whole = own->meet();
    shm_unlink(id.internal);  // everybody has it
    return is_whole ? ncclSuccess : ncclRemoteError;
}

ncclResult_t enqueue(const char* name, ncclComm_t communicator, cudaStream_t stream, std::function<void(Communicator&)> run) {
    auto* own = reinterpret_cast<Communicator*>(communicator);
    submit(stream_of(stream), {name, [=] { if (own->meeting) run(*own); }});
    return ncclSuccess;
}

}  // namespace

CUDA_API ncclResult_t ncclGetVersion(int* version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }
CUDA_API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    static std::atomic<int> number = 0;
    std::memset(id, 0, sizeof *id);
    std::snprintf(id->internal, sizeof id->internal, "/software-gpu-%d-%d", getpid(), number++);
    return ncclSuccess;
}
CUDA_API ncclResult_t ncclCommInitRank(ncclComm_t* out, int num_ranks, ncclUniqueId id, int rank) { return join(out, num_ranks, id, rank); }
CUDA_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int num_ranks, ncclUniqueId id, int rank, ncclConfig_t*) { return join(out, num_ranks, id, rank); }
CUDA_API ncclResult_t ncclCommInitRankScalable(ncclComm_t* out, int num_ranks, int rank, int, ncclUniqueId* ids, ncclConfig_t*) { return join(out, num_ranks, ids[0], rank); }
CUDA_API ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }
CUDA_API ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
CUDA_API ncclResult_t ncclCommAbort(ncclComm_t communicator) {
    if (communicator) reinterpret_cast<Communicator*>(communicator)->error = ncclInProgress;
    return ncclSuccess;
}
CUDA_API ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t* error) { *error = reinterpret_cast<Communicator*>(communicator)->error; return ncclSuccess; }
CUDA_API ncclResult_t ncclCommCount(ncclComm_t communicator, int* num_ranks) { *num_ranks = reinterpret_cast<Communicator*>(communicator)->num_ranks; return ncclSuccess; }
CUDA_API ncclResult_t ncclCommUserRank(ncclComm_t communicator, int* rank) { *rank = reinterpret_cast<Communicator*>(communicator)->rank; return ncclSuccess; }
CUDA_API ncclResult_t ncclGroupStart() {
    ++group.depth;
    return ncclSuccess;
}
CUDA_API ncclResult_t ncclGroupEnd() {
    if (--group.depth || group.messages.empty()) return ncclSuccess;
    const auto messages = std::move(group.messages);
    group.messages.clear();
    return enqueue("ncclSendRecv", group.communicator, group.stream, [=](Communicator& own) { send_and_receive(own, messages); });
}
CUDA_API ncclResult_t ncclSend(const void* from, size_t num, ncclDataType_t type, int peer, ncclComm_t communicator, cudaStream_t stream) {
    return add({from, nullptr, num * size_of(type), peer}, communicator, stream);
}
CUDA_API ncclResult_t ncclRecv(void* to, size_t num, ncclDataType_t type, int peer, ncclComm_t communicator, cudaStream_t stream) {
    return add({nullptr, to, num * size_of(type), peer}, communicator, stream);
}
CUDA_API const char* ncclGetErrorString(ncclResult_t) { return "an error of the software GPU"; }
CUDA_API const char* ncclGetLastError(ncclComm_t) { return ""; }
CUDA_API ncclResult_t ncclAllReduce(const void* from, void* to, size_t num, ncclDataType_t type, ncclRedOp_t op, ncclComm_t communicator, cudaStream_t stream) {
    return enqueue("ncclAllReduce", communicator, stream, [=](Communicator& own) { all_reduce(own, from, to, num * size_of(type), type, op); });
}
CUDA_API ncclResult_t ncclAllGather(const void* from, void* to, size_t num, ncclDataType_t type, ncclComm_t communicator, cudaStream_t stream) {
    return enqueue("ncclAllGather", communicator, stream, [=](Communicator& own) { all_gather(own, from, to, num * size_of(type)); });
}
CUDA_API ncclResult_t ncclReduceScatter(const void* from, void* to, size_t num, ncclDataType_t type, ncclRedOp_t op, ncclComm_t communicator, cudaStream_t stream) {
    return enqueue("ncclReduceScatter", communicator, stream, [=](Communicator& own) { reduce_scatter(own, from, to, num * size_of(type), type, op); });
}
CUDA_API ncclResult_t ncclAlltoAll(const void* from, void* to, size_t num, ncclDataType_t type, ncclComm_t communicator, cudaStream_t stream) {
    const size_t bytes = num * size_of(type);
    return enqueue("ncclAlltoAll", communicator, stream, [=](Communicator& own) {
        std::vector<Message> messages;
        for (int peer = 0; peer < own.num_ranks; ++peer) {
            messages.push_back({static_cast<const uint8_t*>(from) + static_cast<size_t>(peer) * bytes, nullptr, bytes, peer});
            messages.push_back({nullptr, static_cast<uint8_t*>(to) + static_cast<size_t>(peer) * bytes, bytes, peer});
        }
        send_and_receive(own, messages);
    });
}
