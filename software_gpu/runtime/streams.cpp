// Streams, events and captures. An operation runs when the host waits for it, which is the latest that CUDA allows; with
// SOFTWARE_GPU_EAGER=1 when it is submitted, which is the earliest.
#include "runtime.h"

#include <algorithm>
#include <chrono>

namespace software_runtime {

namespace {

constexpr size_t kMostPending = 200'000;

struct Event {
    bool has_timing;
    Stream* stream = nullptr;  // that it was recorded in
    uint64_t sequence = 0;
    double at_ms = 0;
    std::shared_ptr<Graph> graph;  // of the capture that it was recorded in
};

struct Device {
    Stream* legacy = nullptr;
};
Device devices[64];

std::vector<Stream*>& all_streams() {
    static auto* all = new std::vector<Stream*>;
    return *all;
}

// How many captures forbid unsafe calls: of every thread, and of this one.
int num_global_captures = 0;
thread_local int num_own_captures = 0;
thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;
uint64_t num_graphs = 0;

// Graphs launched since the counts began.
std::set<std::shared_ptr<Graph>>& launched_graphs() {
    static auto* all = new std::set<std::shared_ptr<Graph>>;
    return *all;
}

// Kernels and calls of libraries: what the host launches, and what the device runs, the nodes of graphs included.
long num_from_host = 0, num_on_device = 0;

bool is_kernel(const std::string& name) { return name.starts_with("kernel ") || name.starts_with("cublas") || name.starts_with("nccl"); }

double now_ms() {
    using namespace std::chrono;
    return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

Stream* new_stream() {
    Lock lock;
    all_streams().push_back(new Stream{current_device(), 0, 0, {}, nullptr});
    return all_streams().back();
}

cudaError_t record(Event& event, Stream* stream) {
    Lock lock;
    event.at_ms = now_ms();
    event.graph = stream->capture;
    if (stream->capture) return cudaSuccess;
    event.stream = stream;
    submit(stream, {"event", {}});
    event.sequence = stream->num_submitted;
    return cudaSuccess;
}

bool is_done(const Event& event) { return !event.stream || event.stream->num_completed >= event.sequence; }

// Queries and waits are errors for an event of a capture, and unsafe while one goes on.
cudaError_t checked(const Event& event, const std::string& call) {
    if (event.graph) {
        problem(call + " of an event that was recorded in a capture");
        return fail(cudaErrorCapturedEvent);
    }
    return is_unsafe_in_capture(call.c_str()) ? fail(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t begin_capture(Stream* stream, cudaStreamCaptureMode mode) {
    Lock lock;
    stream->capture = std::make_shared<Graph>(Graph{++num_graphs, mode, {}, {stream}, false});
    ++num_own_captures;
    num_global_captures += mode == cudaStreamCaptureModeGlobal;
    count("captures");
    return cudaSuccess;
}

struct GraphHandle {
    std::shared_ptr<Graph> graph;
};

}  // namespace

Stream* stream_of(void* handle) {
    if (reinterpret_cast<uintptr_t>(handle) > reinterpret_cast<uintptr_t>(cudaStreamPerThread)) return static_cast<Stream*>(handle);
    Lock lock;
    Stream*& legacy = devices[current_device()].legacy;
    if (!legacy) legacy = new_stream();
    return legacy;
}

void submit(Stream* stream, Operation operation) {
    static const bool is_eager = setting("SOFTWARE_GPU_EAGER", 0) != 0;
    Lock lock;
    count(operation.name);
    if (stream->capture) {
        stream->capture->operations.push_back(std::move(operation));
        return;
    }
    num_from_host += is_kernel(operation.name) || operation.name == "graph";
    num_on_device += is_kernel(operation.name);
    stream->pending.push_back(std::move(operation));
    ++stream->num_submitted;
    if (is_eager || stream->pending.size() > kMostPending) complete(stream, stream->num_submitted);
}

void complete(Stream* stream, uint64_t until) {
    while (stream->num_completed < until && !stream->pending.empty()) {
        const Operation operation = std::move(stream->pending.front());
        stream->pending.pop_front();
        if (operation.run) operation.run();
        ++stream->num_completed;
    }
}

void complete_all() {
    for (Stream* stream : all_streams()) complete(stream, stream->num_submitted);
}

// CUDA Runtime API, cudaThreadExchangeStreamCaptureMode.
bool is_unsafe_in_capture(const char* call) {
    Lock lock;
    const int forbidding = mode_of_thread == cudaStreamCaptureModeGlobal ? num_global_captures : mode_of_thread == cudaStreamCaptureModeThreadLocal ? num_own_captures : 0;
    if (forbidding) problem(std::string(call) + " during a capture");
    return forbidding != 0;
}

void each_in_graphs(const std::function<void(const std::string&, long)>& tell) {
    for (const auto& graph : launched_graphs()) {
        for (const Operation& operation : graph->operations) tell(operation.name, graph->num_launches);
    }
}

void forget_launches() {
    for (const auto& graph : launched_graphs()) graph->num_launches = 0;
    launched_graphs().clear();
    num_from_host = num_on_device = 0;
}

cudaError_t invalidate(Stream* stream, const std::string& why) {
    problem(why);
    stream->capture->is_invalid = true;
    return fail(cudaErrorStreamCaptureUnsupported);
}

}  // namespace software_runtime

using namespace software_runtime;

CUDA_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { *stream = reinterpret_cast<cudaStream_t>(new_stream()); return cudaSuccess; }
CUDA_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
CUDA_API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
CUDA_API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { *priority = 0; return cudaSuccess; }
CUDA_API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

CUDA_API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    Lock lock;
    Stream* stream = stream_of(handle);
    count("cudaStreamSynchronize");
    hold_up("cudaStreamSynchronize");
    if (stream->capture) return invalidate(stream, "cudaStreamSynchronize of a stream that is captured");
    complete(stream, stream->num_submitted);
    return cudaSuccess;
}

CUDA_API cudaError_t cudaStreamQuery(cudaStream_t handle) {
    Lock lock;
    Stream* stream = stream_of(handle);
    if (stream->capture) return invalidate(stream, "cudaStreamQuery of a stream that is captured");
    return stream->num_completed < stream->num_submitted ? cudaErrorNotReady : cudaSuccess;
}

CUDA_API cudaError_t cudaDeviceSynchronize() {
    Lock lock;
    count("cudaDeviceSynchronize");
    hold_up("cudaDeviceSynchronize");
    for (Stream* stream : all_streams()) {
        if (stream->capture) return invalidate(stream, "cudaDeviceSynchronize during a capture");
    }
    complete_all();
    return cudaSuccess;
}

CUDA_API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
    Lock lock;
    Stream* stream = stream_of(handle);
    const Event event = *reinterpret_cast<Event*>(event_handle);
    if (event.graph) {  // joins the capture
        stream->capture = event.graph;
        event.graph->streams.insert(stream);
        return cudaSuccess;
    }
    if (!event.stream) return cudaSuccess;
    if (stream->capture) return invalidate(stream, "a stream that is captured waits for an event from outside of the capture");
    submit(stream, {"wait for an event", [=] { if (event.stream != stream) complete(event.stream, event.sequence); }});
    return cudaSuccess;
}

CUDA_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    submit(stream_of(stream), {"host function", [=] { function(data); }});
    return cudaSuccess;
}

CUDA_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) { *event = reinterpret_cast<cudaEvent_t>(new Event{!(flags & cudaEventDisableTiming), nullptr, 0, 0, nullptr}); return cudaSuccess; }
CUDA_API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
CUDA_API cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
CUDA_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return record(*reinterpret_cast<Event*>(event), stream_of(stream)); }
CUDA_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }

CUDA_API cudaError_t cudaEventQuery(cudaEvent_t handle) {
    Lock lock;
    const Event& event = *reinterpret_cast<Event*>(handle);
    if (const cudaError_t error = checked(event, "cudaEventQuery")) return error;
    return is_done(event) ? cudaSuccess : cudaErrorNotReady;
}

CUDA_API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    Lock lock;
    const Event& event = *reinterpret_cast<Event*>(handle);
    count("cudaEventSynchronize");
    if (const cudaError_t error = checked(event, "cudaEventSynchronize")) return error;
    if (event.stream) complete(event.stream, event.sequence);
    return cudaSuccess;
}

CUDA_API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
    Lock lock;
    const Event &begin = *reinterpret_cast<Event*>(from), &end = *reinterpret_cast<Event*>(to);
    if (!begin.has_timing || !end.has_timing || !begin.stream || !end.stream) {
        problem("cudaEventElapsedTime of events without a time");
        return fail(cudaErrorInvalidResourceHandle);
    }
    if (!is_done(begin) || !is_done(end)) return fail(cudaErrorNotReady);
    *ms = static_cast<float>(std::max(end.at_ms - begin.at_ms, 0.001));
    return cudaSuccess;
}

CUDA_API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    if (!handle) {
        problem("a capture of the legacy stream");
        return fail(cudaErrorStreamCaptureUnsupported);
    }
    return begin_capture(stream_of(handle), mode);
}
CUDA_API cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*, size_t, cudaStreamCaptureMode mode) { return cudaStreamBeginCapture(stream, mode); }

CUDA_API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph_handle) {
    Lock lock;
    const std::shared_ptr<Graph> graph = stream_of(handle)->capture;
    *graph_handle = nullptr;
    if (!graph) return fail(cudaErrorIllegalState);
    --num_own_captures;
    num_global_captures -= graph->mode == cudaStreamCaptureModeGlobal;
    for (Stream* stream : graph->streams) stream->capture = nullptr;
    if (graph->is_invalid) return fail(cudaErrorStreamCaptureInvalidated);
    *graph_handle = reinterpret_cast<cudaGraph_t>(new GraphHandle{graph});
    return cudaSuccess;
}

CUDA_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* num_nodes) {
    Lock lock;
    const std::shared_ptr<Graph>& capture = stream_of(handle)->capture;
    *status = !capture ? cudaStreamCaptureStatusNone : capture->is_invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
    if (id) *id = capture ? capture->id : 0;
    if (graph) *graph = nullptr;
    if (nodes) *nodes = nullptr;
    if (edges) *edges = nullptr;
    if (num_nodes) *num_nodes = 0;
    return cudaSuccess;
}
CUDA_API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) { return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr); }
CUDA_API CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) { return static_cast<CUresult>(cudaStreamIsCapturing(reinterpret_cast<cudaStream_t>(stream), reinterpret_cast<cudaStreamCaptureStatus*>(status))); }
CUDA_API cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t, unsigned) { return cudaSuccess; }
CUDA_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) { std::swap(*mode, mode_of_thread); return cudaSuccess; }

CUDA_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t handle, unsigned long long) {
    Lock lock;
    const auto* graph = reinterpret_cast<GraphHandle*>(handle);
    count("graphs");
    count("graph nodes", static_cast<long>(graph->graph->operations.size()));
    graph->graph->num_kernels = std::ranges::count_if(graph->graph->operations, is_kernel, &Operation::name);
    *executable = reinterpret_cast<cudaGraphExec_t>(new GraphHandle{*graph});
    return cudaSuccess;
}

CUDA_API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    Lock lock;
    if (!executable) return fail(cudaErrorInvalidValue);
    const std::shared_ptr<Graph> graph = reinterpret_cast<GraphHandle*>(executable)->graph;
    ++graph->num_launches;
    launched_graphs().insert(graph);
    num_on_device += graph->num_kernels;
    submit(stream_of(stream), {"graph", [graph] {
        for (const Operation& operation : graph->operations) {
            if (operation.run) operation.run();
        }
    }});
    return cudaSuccess;
}

CUDA_API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* num_nodes) {
    if (!nodes) *num_nodes = reinterpret_cast<GraphHandle*>(graph)->graph->operations.size();
    return cudaSuccess;
}
CUDA_API cudaError_t cudaGraphDestroy(cudaGraph_t graph) { delete reinterpret_cast<GraphHandle*>(graph); return cudaSuccess; }
CUDA_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { delete reinterpret_cast<GraphHandle*>(executable); return cudaSuccess; }

CUDA_API void software_gpu_num_launches(long* from_host, long* on_device) {
    Lock lock;
    *from_host = num_from_host;
    *on_device = num_on_device;
}
