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

    /* What K/V pages hold. */
    enum
    {
        DFLASH_TRT_PAGES_OF_F = 0,
        DFLASH_TRT_PAGES_OF_FP8 = 1 /* float8_e4m3fn of K / k_scale and V / v_scale */
    };

    typedef struct
    {
        int32_t float_type;
        int32_t page_type;
        float k_scale; /* 1 for pages of F */
        float v_scale;
        float softcap;     /* c: scores become c * tanh(s / c); 0: none */
        float score_scale; /* usually head_dim^-0.5; like softcap not read by dflash_trt_write_draft_context */
        int32_t heads; /* not read by dflash_trt_write_draft_context */
        int32_t kv_heads;
        int32_t head_dim;
        int32_t page_size;
        int32_t window;             /* 0: none */
        int32_t chunk;              /* of dflash_trt_attend_pages; 0: none */
        int32_t is_causal;          /* of dflash_trt_attend_draft; 0 or 1 */
        int32_t is_window_anchored; /* of dflash_trt_attend_draft; 0 or 1 */
        int32_t has_sinks;          /* of dflash_trt_attend_pages; 0 or 1 */
        int32_t shares_kv;          /* 1 does not read k and v, or context_k and context_v, and writes no page */
        int32_t num_tokens;
        int32_t num_requests;
        int32_t block_rows;        /* S, of dflash_trt_attend_draft */
        int32_t pages_per_request; /* P */
        int32_t state;             /* index in state_pools */
        int32_t first_key;         /* of dflash_trt_attend_draft; 0 or 1 */
    } dflash_trt_attention_shape;

    typedef struct
    {
        void const* q;
        void const* k;
        void const* v;
        int64_t const* state_pools; /* device addresses of pages, of which the shape's `state` is used */
        int32_t const* positions;
        int32_t const* token_offsets;
        int32_t const* context_lens;
        int32_t const* page_table;
        float const* sinks; /* of each query head; not read without has_sinks */
        void* attended;
    } dflash_trt_attend_pages_buffers;

    typedef struct
    {
        void const* context_k;
        void const* context_v;
        void const* q; /* this, the block and attended are not read by dflash_trt_write_draft_context */
        void const* block_k;
        void const* block_v;
        int64_t const* state_pools; /* device addresses of pages, of which the shape's `state` is used */
        int32_t const* positions;
        int32_t const* token_offsets;
        int32_t const* page_table;
        int32_t const* next_context_lens;
        void* attended;
    } dflash_trt_draft_buffers;

    typedef struct
    {
        int32_t float_type;
        int32_t num_rows; /* of the step, those of no request included */
        int32_t num_requests;
        int32_t width; /* of a row */
        int32_t page_size;
        int32_t pages_per_request;
        int32_t state; /* index in state_pools */
    } dflash_trt_previous_rows_shape;

    /* Device addresses in the order of PreviousRows' inputs, which dflash_trt_contract() lists. */
    typedef struct
    {
        void const* const* inputs;
        void* before;
    } dflash_trt_previous_rows_buffers;

    typedef struct
    {
        int32_t float_type;
        int32_t num_requests;
        int32_t width; /* S = K + 1 */
        int32_t vocab_size;
        int32_t num_choices; /* C, of a draft; 0: no drafts are tested, and choices and chances are not read */
    } dflash_trt_sampling_shape;

    /* Device addresses in the order of the inputs and outputs of SampleAndAccept or DraftTokens, which
     * dflash_trt_contract() lists. */
    typedef struct
    {
        void const* const* inputs;
        void* const* outputs;
    } dflash_trt_sampling_buffers;

    typedef struct
    {
        int32_t float_type;
        int32_t num_requests;
        int32_t num_slots; /* K */
        int32_t vocab_size;
        int32_t has_map; /* of a draft vocabulary; else draft_to_target is not read */
        int32_t num_choices; /* C, from 1 to vocab_size */
    } dflash_trt_draft_tokens_shape;

    /* One weight of all experts; words as the fields of Experts. */
    typedef struct
    {
        int32_t form;
        int32_t has_row_scale;
        int32_t num_input_scales; /* of each expert; 0: activations are not quantized */
        int32_t has_bias;
        int32_t num_block_rows; /* rows of block_scale */
    } dflash_trt_expert_matrix;

    typedef struct
    {
        int32_t float_type;
        int32_t num_rows;
        int32_t hidden_size;
        int32_t ffn_size;
        int32_t num_experts; /* that the router knows */
        int32_t num_here;    /* whose weights are given, from first_expert on */
        int32_t first_expert;
        int32_t num_chosen;
        int32_t routing;
        int32_t normalizes;
        int32_t has_choice_bias; /* else choice_bias is not read */
        int32_t num_groups;
        int32_t num_chosen_groups;
        int32_t activation;
        int32_t scales_inputs; /* 0 or 1 */
        float routing_scale;
        float limit;
        float alpha;
        dflash_trt_expert_matrix gate_up;
        dflash_trt_expert_matrix down;
    } dflash_trt_experts_shape;

    /* Device addresses in the order of Experts' inputs, which dflash_trt_contract() lists. */
    typedef struct
    {
        void const* const* inputs;
        void* out;
    } dflash_trt_experts_buffers;

    typedef struct
    {
        int32_t float_type;
        int32_t num_rows; /* of the step, those of no request included */
        int32_t num_requests;
        int32_t num_channels; /* q, k and v of all heads */
        int32_t conv_size;
        int32_t key_heads;
        int32_t value_heads;
        int32_t value_dim;
        int32_t num_records;
        int32_t state; /* index in state_pools of the first of six */
        float eps;
    } dflash_trt_gated_delta_shape;

    /* Device addresses in the order of GatedDelta's inputs, which dflash_trt_contract() lists. */
    typedef struct
    {
        void const* const* inputs;
        void* out;
    } dflash_trt_gated_delta_buffers;

    typedef struct
    {
        int32_t float_type;
        int32_t page_type;
        int32_t num_rows; /* of the step, those of no request included */
        int32_t num_requests;
        int32_t pages_per_request;
        int32_t num_heads;
        int32_t row_size; /* of a latent and the rotated key behind it */
        int32_t nope_dim; /* of a head's keys that are not rotated */
        int32_t value_dim;
        int32_t latent_dim;
        int32_t page_size;
        int32_t max_verify_rows; /* of a request that is not a prompt */
        int32_t state;           /* index in state_pools */
        float k_scale;
        float score_scale;
    } dflash_trt_latents_shape;

    /* Device addresses in the order of AttendLatents' inputs and outputs, which dflash_trt_contract() lists. */
    typedef struct
    {
        void const* const* inputs;
        void* const* outputs;
    } dflash_trt_latents_buffers;

    /* Workspace: device memory of at least so many bytes, for one call at a time. */
    DFLASH_TRT_API int32_t dflash_trt_attend_pages_workspace(
        dflash_trt_attention_shape const* shape, size_t* num_bytes);
    DFLASH_TRT_API int32_t dflash_trt_attend_draft_workspace(
        dflash_trt_attention_shape const* shape, size_t* num_bytes);
    DFLASH_TRT_API int32_t dflash_trt_sample_and_accept_workspace(
        dflash_trt_sampling_shape const* shape, size_t* num_bytes);

    DFLASH_TRT_API int32_t dflash_trt_draft_tokens_workspace(
        dflash_trt_draft_tokens_shape const* shape, size_t* num_bytes);
    DFLASH_TRT_API int32_t dflash_trt_experts_workspace(dflash_trt_experts_shape const* shape, size_t* num_bytes);
    DFLASH_TRT_API int32_t dflash_trt_gated_delta_workspace(
        dflash_trt_gated_delta_shape const* shape, size_t* num_bytes);
    DFLASH_TRT_API int32_t dflash_trt_attend_latents_workspace(
        dflash_trt_latents_shape const* shape, size_t* num_bytes);

    DFLASH_TRT_API int32_t dflash_trt_attend_pages(dflash_trt_attention_shape const* shape,
        dflash_trt_attend_pages_buffers const* buffers, void* workspace, dflash_trt_stream stream);

    DFLASH_TRT_API int32_t dflash_trt_attend_draft(dflash_trt_attention_shape const* shape,
        dflash_trt_draft_buffers const* buffers, void* workspace, dflash_trt_stream stream);

    DFLASH_TRT_API int32_t dflash_trt_write_draft_context(
        dflash_trt_attention_shape const* shape, dflash_trt_draft_buffers const* buffers, dflash_trt_stream stream);

    DFLASH_TRT_API int32_t dflash_trt_previous_rows(dflash_trt_previous_rows_shape const* shape,
        dflash_trt_previous_rows_buffers const* buffers, dflash_trt_stream stream);

    DFLASH_TRT_API int32_t dflash_trt_sample_and_accept(dflash_trt_sampling_shape const* shape,
        dflash_trt_sampling_buffers const* buffers, void* workspace, dflash_trt_stream stream);

    DFLASH_TRT_API int32_t dflash_trt_draft_tokens(dflash_trt_draft_tokens_shape const* shape,
        dflash_trt_sampling_buffers const* buffers, void* workspace, dflash_trt_stream stream);

    DFLASH_TRT_API int32_t dflash_trt_experts(dflash_trt_experts_shape const* shape,
        dflash_trt_experts_buffers const* buffers, void* workspace, dflash_trt_stream stream);

    DFLASH_TRT_API int32_t dflash_trt_gated_delta(dflash_trt_gated_delta_shape const* shape,
        dflash_trt_gated_delta_buffers const* buffers, void* workspace, dflash_trt_stream stream);

    DFLASH_TRT_API int32_t dflash_trt_attend_latents(dflash_trt_latents_shape const* shape,
        dflash_trt_latents_buffers const* buffers, void* workspace, dflash_trt_stream stream);

    typedef struct
    {
        int32_t float_type;
        int32_t num_ranks;
        int64_t num_elements; /* of this rank's tensor */
    } dflash_trt_collective_shape;

    /* The ncclComm_t of this process's world, which the next two and the plugins AllReduce and AllGather use; null:
     * none. libnccl.so.2 must be the one that made it. It has to outlive every graph that holds a collective. */
    DFLASH_TRT_API int32_t dflash_trt_set_communicator(void* communicator);

    /* `summed` has num_elements and may be `x`; `gathered` has num_ranks * num_elements, rank 0's first. */
    DFLASH_TRT_API int32_t dflash_trt_all_reduce(
        dflash_trt_collective_shape const* shape, void const* x, void* summed, dflash_trt_stream stream);
    DFLASH_TRT_API int32_t dflash_trt_all_gather(
        dflash_trt_collective_shape const* shape, void const* x, void* gathered, dflash_trt_stream stream);

    /* What went wrong in this thread's last call that returned 1, and how to mend it. */
    DFLASH_TRT_API char const* dflash_trt_last_error(void);

    /* The architectures whose kernels are inside, "sm_90a, sm_100a", and the sha256 of their manifest. */
    DFLASH_TRT_API char const* dflash_trt_architectures(void);
    DFLASH_TRT_API char const* dflash_trt_manifest_sha256(void);

    /* The contract of plugins/README.md as the library knows it, in JSON: names, orders, types and fields. */
    DFLASH_TRT_API char const* dflash_trt_contract(void);

#ifdef __cplusplus
}
#endif

#endif
