// cuBLAS: its calls are operations of a stream, which compute nothing; PyTorch's operators replace them (torch_ops.py).
#include "runtime.h"

#include <cublasLt.h>
#include <cublas_v2.h>

#include <cstring>

using namespace software_runtime;

namespace {

struct Handle {
    cudaStream_t stream;
};

struct Layout {
    cudaDataType type;
};

void enqueue(const std::string& name, cudaStream_t stream) {
    std::function<void()> run;
    if (executes()) run = [name] { problem("not executed, a call of a library: " + name); };
    submit(stream_of(stream), {name, std::move(run)});
}

// Descriptors hold nothing that is read.
template <class T>
cublasStatus_t make(T* out) {
    *out = reinterpret_cast<T>(std::calloc(1, 256));
    return CUBLAS_STATUS_SUCCESS;
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
