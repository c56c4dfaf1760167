// cuBLAS and NCCL: their calls are operations of a stream, which compute nothing.
#include "runtime.h"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <nccl.h>

#include <cstring>

using namespace software_runtime;

namespace {

struct Handle {
    cudaStream_t stream;
};

struct Layout {
    cudaDataType type;
};

struct Communicator {
    int num_ranks, rank;
};

void enqueue(const std::string& name, cudaStream_t stream) {
    std::function<void()> run;
    if (executes()) run = [name] { problem("not executed, a call of a library: " + name); };
    submit(stream_of(stream), {name, std::move(run)});
}

size_t size_of(ncclDataType_t type) {
    switch (type) {
        case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
        case ncclFloat16: case ncclBfloat16: return 2;
        case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
        default: return 4;
    }
}

// Descriptors hold nothing that is read.
template <class T>
cublasStatus_t make(T* out) {
    *out = reinterpret_cast<T>(std::calloc(1, 256));
    return CUBLAS_STATUS_SUCCESS;
}

ncclResult_t join(ncclComm_t* communicator, int num_ranks, int rank) {
    *communicator = reinterpret_cast<ncclComm_t>(new Communicator{num_ranks, rank});
    return ncclSuccess;
}

}  // namespace

CUDA_API cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) { *handle = reinterpret_cast<cublasHandle_t>(new Handle{}); return CUBLAS_STATUS_SUCCESS; }
CUDA_API cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) { delete reinterpret_cast<Handle*>(handle); return CUBLAS_STATUS_SUCCESS; }
CUDA_API cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) { reinterpret_cast<Handle*>(handle)->stream = stream; return CUBLAS_STATUS_SUCCESS; }
CUDA_API cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void*, size_t) { return CUBLAS_STATUS_SUCCESS; }
CUDA_API cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) { return CUBLAS_STATUS_SUCCESS; }
CUDA_API cublasStatus_t cublasGetMathMode(cublasHandle_t, cublasMath_t* mode) { *mode = CUBLAS_DEFAULT_MATH; return CUBLAS_STATUS_SUCCESS; }
CUDA_API cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t, cublasPointerMode_t) { return CUBLAS_STATUS_SUCCESS; }
CUDA_API cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t, cublasPointerMode_t* mode) { *mode = CUBLAS_POINTER_MODE_HOST; return CUBLAS_STATUS_SUCCESS; }
CUDA_API cublasStatus_t cublasSetSmCountTarget(cublasHandle_t, int) { return CUBLAS_STATUS_SUCCESS; }
CUDA_API cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int, int, int, const void*, const void*, cudaDataType, int, const void*, cudaDataType, int, const void*, void*, cudaDataType, int, cublasComputeType_t, cublasGemmAlgo_t) {
    enqueue("cublasGemmEx", reinterpret_cast<Handle*>(handle)->stream);
    return CUBLAS_STATUS_SUCCESS;
}
CUDA_API cublasStatus_t cublasSgemm_v2(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int, int, int, const float*, const float*, int, const float*, int, const float*, float*, int) {
    enqueue("cublasSgemm", reinterpret_cast<Handle*>(handle)->stream);
    return CUBLAS_STATUS_SUCCESS;
}
CUDA_API cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int, int, int, const float*, const float*, int, long long, const float*, int, long long, const float*, float*, int, long long, int) {
    enqueue("cublasSgemmStridedBatched", reinterpret_cast<Handle*>(handle)->stream);
    return CUBLAS_STATUS_SUCCESS;
}
CUDA_API cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int, int, int, const void*, const void*, cudaDataType, int, long long, const void*, cudaDataType, int, long long, const void*, void*, cudaDataType, int, long long, int, cublasComputeType_t, cublasGemmAlgo_t) {
    enqueue("cublasGemmStridedBatchedEx", reinterpret_cast<Handle*>(handle)->stream);
    return CUBLAS_STATUS_SUCCESS;
}

CUDA_API size_t cublasLtGetVersion() { return 130100; }
CUDA_API cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return make(handle); }
CUDA_API cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* out, cublasComputeType_t, cudaDataType_t) { return make(out); }
CUDA_API cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t out) { std::free(out); return CUBLAS_STATUS_SUCCESS; }
CUDA_API cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void*, size_t) { return CUBLAS_STATUS_SUCCESS; }
CUDA_API cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* out) { return make(out); }
CUDA_API cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t out) { std::free(out); return CUBLAS_STATUS_SUCCESS; }
CUDA_API cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, const void*, size_t) { return CUBLAS_STATUS_SUCCESS; }
CUDA_API cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* out, cudaDataType type, uint64_t, uint64_t, int64_t) {
    make(out);
    reinterpret_cast<Layout*>(*out)->type = type;
    return CUBLAS_STATUS_SUCCESS;
}
CUDA_API cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t out) { std::free(out); return CUBLAS_STATUS_SUCCESS; }
CUDA_API cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t, const void*, size_t) { return CUBLAS_STATUS_SUCCESS; }
CUDA_API cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t results[], int* num) {
    std::memset(results, 0, sizeof *results);
    *num = 1;
    return CUBLAS_STATUS_SUCCESS;
}
CUDA_API cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*, cublasLtMatrixLayout_t a, const void*, cublasLtMatrixLayout_t, const void*, const void*, cublasLtMatrixLayout_t, void*, cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t stream) {
    enqueue("cublasLtMatmul of type " + std::to_string(reinterpret_cast<Layout*>(a)->type), stream);
    return CUBLAS_STATUS_SUCCESS;
}

CUDA_API ncclResult_t ncclGetVersion(int* version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }
CUDA_API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) { std::memset(id, 7, sizeof *id); return ncclSuccess; }
CUDA_API ncclResult_t ncclCommInitRank(ncclComm_t* out, int num_ranks, ncclUniqueId, int rank) { return join(out, num_ranks, rank); }
CUDA_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int num_ranks, ncclUniqueId, int rank, ncclConfig_t*) { return join(out, num_ranks, rank); }
CUDA_API ncclResult_t ncclCommInitRankScalable(ncclComm_t* out, int num_ranks, int rank, int, ncclUniqueId*, ncclConfig_t*) { return join(out, num_ranks, rank); }
CUDA_API ncclResult_t ncclCommDestroy(ncclComm_t out) { delete reinterpret_cast<Communicator*>(out); return ncclSuccess; }
CUDA_API ncclResult_t ncclCommAbort(ncclComm_t) { return ncclSuccess; }
CUDA_API ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) { *error = ncclSuccess; return ncclSuccess; }
CUDA_API ncclResult_t ncclCommCount(ncclComm_t communicator, int* num_ranks) { *num_ranks = reinterpret_cast<Communicator*>(communicator)->num_ranks; return ncclSuccess; }
CUDA_API ncclResult_t ncclCommUserRank(ncclComm_t communicator, int* rank) { *rank = reinterpret_cast<Communicator*>(communicator)->rank; return ncclSuccess; }
CUDA_API ncclResult_t ncclGroupStart() { return ncclSuccess; }
CUDA_API ncclResult_t ncclGroupEnd() { return ncclSuccess; }
CUDA_API const char* ncclGetErrorString(ncclResult_t) { return "an error of the software GPU"; }
CUDA_API const char* ncclGetLastError(ncclComm_t) { return ""; }
CUDA_API ncclResult_t ncclAllReduce(const void* from, void* to, size_t num, ncclDataType_t type, ncclRedOp_t, ncclComm_t, cudaStream_t stream) {
    if (from != to) cudaMemcpyAsync(to, from, num * size_of(type), cudaMemcpyDefault, stream);
    enqueue("ncclAllReduce", stream);
    return ncclSuccess;
}
CUDA_API ncclResult_t ncclAllGather(const void*, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t stream) { enqueue("ncclAllGather", stream); return ncclSuccess; }
CUDA_API ncclResult_t ncclBroadcast(const void*, void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t stream) { enqueue("ncclBroadcast", stream); return ncclSuccess; }
