/* The operations of the plugin library without TensorRT: device addresses and sizes in, kernels on a stream.
 *
 * Arithmetic, shapes and types are those of the plugins, in plugins/README.md. Every function returns 0, or 1 after an
 * error that dflash_trt_last_error() tells. A call uses the GPU of the calling thread's current CUDA context, neither
 * allocates device memory nor synchronizes, and so can be captured in a CUDA graph; the first call of a shape loads
 * kernels, which a capture does not permit. Addresses are multiples of 16.
 */
#ifndef DFLASH_TRT_KERNELS_H
#define DFLASH_TRT_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C"
{
#endif

#if defined(__GNUC__)
#define DFLASH_TRT_API __attribute__((visibility("default")))
#else
#define DFLASH_TRT_API
#endif

    typedef struct CUstream_st* dflash_trt_stream;

    /* The float type F. */
    enum
    {
        DFLASH_TRT_FLOAT32 = 0,
        DFLASH_TRT_FLOAT16 = 1,
        DFLASH_TRT_BFLOAT16 = 2
    };

    /* A node of one of the plugins, which dflash_trt_contract() lists with their inputs, outputs and fields. Everything
     * comes in the order of that list. */
    typedef struct
    {
        char const* plugin;
        int32_t float_type;
        int64_t const* const* shapes; /* of each input, as many sizes as the contract's shape has */
        double const* fields;         /* the values, whatever their type */
    } dflash_trt_node;

    /* Device memory of at least so many bytes, for one call at a time; they serve smaller shapes, too. */
    DFLASH_TRT_API int32_t dflash_trt_workspace(dflash_trt_node const* node, size_t* num_bytes);

    /* Tensors are device addresses. */
    DFLASH_TRT_API int32_t dflash_trt_run(dflash_trt_node const* node, void const* const* inputs, void* const* outputs,
        void* workspace, dflash_trt_stream stream);

    typedef struct
    {
        int32_t float_type;
        int32_t num_ranks;
        int64_t num_elements; /* of this rank's tensor */
    } dflash_trt_collective_shape;

    /* The ncclComm_t of this process's world, which the next functions and the plugins of their names use; null:
     * none. libnccl.so.2 must be the one that made it. It has to outlive every graph that holds a collective. */
    DFLASH_TRT_API int32_t dflash_trt_set_communicator(void* communicator);

    /* `summed` has num_elements and may be `x`; `gathered` has num_ranks * num_elements, rank 0's first. */
    DFLASH_TRT_API int32_t dflash_trt_all_reduce(
        dflash_trt_collective_shape const* shape, void const* x, void* summed, dflash_trt_stream stream);
    DFLASH_TRT_API int32_t dflash_trt_all_gather(
        dflash_trt_collective_shape const* shape, void const* x, void* gathered, dflash_trt_stream stream);

    /* `x` has num_elements, a part for each rank, rank 0's first. `summed` is the sum of the parts for this rank;
     * `received` has each rank's part for this one, rank 0's first. */
    DFLASH_TRT_API int32_t dflash_trt_reduce_scatter(
        dflash_trt_collective_shape const* shape, void const* x, void* summed, dflash_trt_stream stream);
    DFLASH_TRT_API int32_t dflash_trt_all_to_all(
        dflash_trt_collective_shape const* shape, void const* x, void* received, dflash_trt_stream stream);

    /* What went wrong in this thread's last call that returned 1, and how to mend it. */
    DFLASH_TRT_API char const* dflash_trt_last_error(void);

    /* The architectures whose kernels are inside, "sm_90a, sm_100a", and the sha256 of their manifest. */
    DFLASH_TRT_API char const* dflash_trt_architectures(void);
    DFLASH_TRT_API char const* dflash_trt_manifest_sha256(void);

    /* The contract of plugins/README.md as the library knows it, in JSON: names, orders, types, shapes and fields. */
    DFLASH_TRT_API char const* dflash_trt_contract(void);

#ifdef __cplusplus
}
#endif

#endif
