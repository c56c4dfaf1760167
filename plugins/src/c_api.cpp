#include "dflash_trt_kernels.h"

#include "contract/contract.h"
#include "operations/collective.h"
#include "operations/experts.h"
#include "operations/gated_delta.h"
#include "operations/latents.h"
#include "operations/previous_rows.h"
#include "operations/sampling.h"
#include "operations/step_operations.h"
#include "runtime/embedded_kernel.h"
#include "runtime/problem.h"

#include <exception>
#include <string>

namespace dflash_trt
{
namespace
{

thread_local std::string last_error;

/// Runs `call`; an exception becomes the thread's last error.
template <typename Call>
int32_t guarded(Call const& call) noexcept
{
    try
    {
        call();
        return 0;
    }
    catch (std::exception const& error)
    {
        last_error = error.what();
    }
    return 1;
}

template <typename T>
T const& required(T const* argument)
{
    if (argument == nullptr)
    {
        throw Problem("argument", "an address", "null", "Pass shape and buffers.");
    }
    return *argument;
}

FloatType float_type(int32_t type)
{
    if (type < DFLASH_TRT_FLOAT32 || type > DFLASH_TRT_BFLOAT16)
    {
        throw Problem(
            "float_type", "0 (float32), 1 (float16) or 2 (bfloat16)", std::to_string(type), "Convert the tensors.");
    }
    return static_cast<FloatType>(type);
}

PageType page_type(int32_t type)
{
    if (type < DFLASH_TRT_PAGES_OF_F || type > DFLASH_TRT_PAGES_OF_FP8)
    {
        throw Problem("page_type", "0 (of F) or 1 (FP8)", std::to_string(type), "Convert the pages.");
    }
    return static_cast<PageType>(type);
}

PageGeometry geometry_of(dflash_trt_attention_shape const& shape)
{
    ElementTypes const types{float_type(shape.float_type), page_type(shape.page_type)};
    return {types, shape.kv_heads, shape.head_dim, shape.page_size, shape.k_scale, shape.v_scale, shape.state};
}

StepShape step_of(dflash_trt_attention_shape const& shape)
{
    return {shape.num_tokens, shape.num_requests, shape.block_rows, shape.pages_per_request};
}

AttentionOptions options_of(dflash_trt_attention_shape const& shape, AttentionMask const& mask)
{
    return {mask, shape.score_scale, shape.softcap, shape.has_sinks != 0, shape.shares_kv != 0};
}

AttentionOptions pages_options_of(dflash_trt_attention_shape const& shape)
{
    return options_of(shape, {shape.window, true, false, shape.chunk, 0});
}

AttentionOptions draft_options_of(dflash_trt_attention_shape const& shape)
{
    return options_of(shape, {shape.window, shape.is_causal != 0, shape.is_window_anchored != 0, 0, shape.first_key});
}

PreviousRows previous_rows_of(dflash_trt_previous_rows_shape const& shape)
{
    return {float_type(shape.float_type), shape.num_rows, shape.num_requests, shape.width, shape.page_size,
        shape.pages_per_request, shape.state};
}

SamplingShape sampling_of(dflash_trt_sampling_shape const& shape)
{
    return {float_type(shape.float_type), shape.num_requests, shape.width, shape.vocab_size, shape.num_choices};
}

SamplingShape drafts_of(dflash_trt_draft_tokens_shape const& shape)
{
    return {float_type(shape.float_type), shape.num_requests, shape.num_slots, shape.vocab_size, shape.num_choices};
}

ExpertsShape experts_of(dflash_trt_experts_shape const& shape)
{
    return {float_type(shape.float_type), shape.num_rows, shape.hidden_size, shape.ffn_size, shape.num_experts,
        shape.num_here};
}

ExpertMatrix matrix_of(dflash_trt_expert_matrix const& matrix)
{
    return {matrix.form, matrix.has_row_scale != 0, matrix.num_input_scales, matrix.has_bias != 0,
        matrix.num_block_rows};
}

ExpertsOptions experts_options_of(dflash_trt_experts_shape const& shape)
{
    return {shape.first_expert, shape.num_chosen, shape.routing, shape.normalizes != 0, shape.has_choice_bias != 0,
        shape.num_groups, shape.num_chosen_groups, shape.activation, shape.scales_inputs != 0, shape.routing_scale,
        shape.limit, shape.alpha, matrix_of(shape.gate_up), matrix_of(shape.down)};
}

DeltaShape delta_of(dflash_trt_gated_delta_shape const& shape)
{
    return {float_type(shape.float_type), shape.num_rows, shape.num_requests, shape.num_channels, shape.conv_size,
        shape.key_heads, shape.value_heads, shape.value_dim};
}

DeltaOptions delta_options_of(dflash_trt_gated_delta_shape const& shape)
{
    return {shape.state, shape.num_records, shape.eps};
}

LatentShape latents_of(dflash_trt_latents_shape const& shape)
{
    return {{float_type(shape.float_type), page_type(shape.page_type)}, shape.num_rows, shape.num_requests,
        shape.pages_per_request, shape.num_heads, shape.row_size, shape.nope_dim, shape.value_dim};
}

LatentOptions latent_options_of(dflash_trt_latents_shape const& shape)
{
    return {shape.state, shape.latent_dim, shape.page_size, shape.max_verify_rows, shape.k_scale, shape.score_scale};
}

CollectiveShape collective_of(dflash_trt_collective_shape const& shape)
{
    return {float_type(shape.float_type), shape.num_ranks, shape.num_elements};
}

} // namespace
} // namespace dflash_trt

using namespace dflash_trt; // the functions of this file have C names

int32_t dflash_trt_attend_pages_workspace(dflash_trt_attention_shape const* shape, size_t* num_bytes)
{
    return guarded(
        [&]
        { *num_bytes = attention_workspace_bytes(geometry_of(required(shape)), pages_options_of(*shape).kind(false)); });
}

int32_t dflash_trt_attend_draft_workspace(dflash_trt_attention_shape const* shape, size_t* num_bytes)
{
    return guarded(
        [&]
        { *num_bytes = attention_workspace_bytes(geometry_of(required(shape)), draft_options_of(*shape).kind(true)); });
}

int32_t dflash_trt_sample_and_accept_workspace(dflash_trt_sampling_shape const* shape, size_t* num_bytes)
{
    return guarded([&] { *num_bytes = sampling_workspace_bytes(sampling_of(required(shape))); });
}

int32_t dflash_trt_draft_tokens_workspace(dflash_trt_draft_tokens_shape const* shape, size_t* num_bytes)
{
    return guarded([&] { *num_bytes = draft_workspace_bytes(drafts_of(required(shape)), shape->has_map != 0); });
}

int32_t dflash_trt_experts_workspace(dflash_trt_experts_shape const* shape, size_t* num_bytes)
{
    return guarded(
        [&] { *num_bytes = experts_workspace_bytes(experts_of(required(shape)), experts_options_of(*shape)); });
}

int32_t dflash_trt_attend_latents_workspace(dflash_trt_latents_shape const* shape, size_t* num_bytes)
{
    return guarded(
        [&] { *num_bytes = latents_workspace_bytes(latents_of(required(shape)), latent_options_of(*shape)); });
}

int32_t dflash_trt_gated_delta_workspace(dflash_trt_gated_delta_shape const* shape, size_t* num_bytes)
{
    return guarded(
        [&] { *num_bytes = gated_delta_workspace_bytes(delta_of(required(shape)), delta_options_of(*shape)); });
}

int32_t dflash_trt_attend_pages(dflash_trt_attention_shape const* shape, dflash_trt_attend_pages_buffers const* buffers,
    void* workspace, dflash_trt_stream stream)
{
    return guarded(
        [&]
        {
            auto const& sizes = required(shape);
            auto const& b = required(buffers);
            auto const launches = prepare_attend_pages(
                geometry_of(sizes), sizes.heads, pages_options_of(sizes), step_of(sizes), Device::current());
            void const* const inputs[] = {
                b.q, b.k, b.v, b.state_pools, b.positions, b.token_offsets, b.context_lens, b.page_table, b.sinks};
            void* const outputs[] = {b.attended};
            run(launches, {inputs, outputs, workspace}, stream);
        });
}

int32_t dflash_trt_attend_draft(dflash_trt_attention_shape const* shape, dflash_trt_draft_buffers const* buffers,
    void* workspace, dflash_trt_stream stream)
{
    return guarded(
        [&]
        {
            auto const& sizes = required(shape);
            auto const& b = required(buffers);
            auto const launches = prepare_attend_draft(
                geometry_of(sizes), sizes.heads, draft_options_of(sizes), step_of(sizes), Device::current());
            void const* const inputs[] = {b.context_k, b.context_v, b.q, b.block_k, b.block_v, b.state_pools,
                b.positions, b.token_offsets, b.page_table, b.next_context_lens};
            void* const outputs[] = {b.attended};
            run(launches, {inputs, outputs, workspace}, stream);
        });
}

int32_t dflash_trt_write_draft_context(
    dflash_trt_attention_shape const* shape, dflash_trt_draft_buffers const* buffers, dflash_trt_stream stream)
{
    return guarded(
        [&]
        {
            auto const& sizes = required(shape);
            auto const& b = required(buffers);
            auto const launches = prepare_write_draft_context(geometry_of(sizes), step_of(sizes), Device::current());
            void const* const inputs[] = {b.context_k, b.context_v, b.state_pools, b.positions, b.token_offsets,
                b.page_table, b.next_context_lens};
            run(launches, {inputs, nullptr, nullptr}, stream);
        });
}

int32_t dflash_trt_previous_rows(dflash_trt_previous_rows_shape const* shape,
    dflash_trt_previous_rows_buffers const* buffers, dflash_trt_stream stream)
{
    return guarded(
        [&]
        {
            auto const& given = required(buffers);
            void* const outputs[] = {given.before};
            auto const launches = prepare_previous_rows(previous_rows_of(required(shape)), Device::current());
            run(launches, {&required(given.inputs), outputs, nullptr}, stream);
        });
}

int32_t dflash_trt_sample_and_accept(dflash_trt_sampling_shape const* shape, dflash_trt_sampling_buffers const* buffers,
    void* workspace, dflash_trt_stream stream)
{
    return guarded(
        [&]
        {
            auto const& given = required(buffers);
            CallTensors const tensors{&required(given.inputs), &required(given.outputs), workspace};
            run(prepare_sampling(sampling_of(required(shape)), Device::current()), tensors, stream);
        });
}

int32_t dflash_trt_draft_tokens(dflash_trt_draft_tokens_shape const* shape, dflash_trt_sampling_buffers const* buffers,
    void* workspace, dflash_trt_stream stream)
{
    return guarded(
        [&]
        {
            auto const& given = required(buffers);
            CallTensors const tensors{&required(given.inputs), &required(given.outputs), workspace};
            auto const drafts = drafts_of(required(shape));
            run(prepare_drafts(drafts, shape->has_map != 0, Device::current()), tensors, stream);
        });
}

int32_t dflash_trt_experts(dflash_trt_experts_shape const* shape, dflash_trt_experts_buffers const* buffers,
    void* workspace, dflash_trt_stream stream)
{
    return guarded(
        [&]
        {
            auto const& given = required(buffers);
            void* const outputs[] = {given.out};
            CallTensors const tensors{&required(given.inputs), outputs, workspace};
            auto const launches =
                prepare_experts(experts_of(required(shape)), experts_options_of(*shape), Device::current());
            run(launches, tensors, stream);
        });
}

int32_t dflash_trt_gated_delta(dflash_trt_gated_delta_shape const* shape, dflash_trt_gated_delta_buffers const* buffers,
    void* workspace, dflash_trt_stream stream)
{
    return guarded(
        [&]
        {
            auto const& given = required(buffers);
            void* const outputs[] = {given.out};
            CallTensors const tensors{&required(given.inputs), outputs, workspace};
            auto const launches =
                prepare_gated_delta(delta_of(required(shape)), delta_options_of(*shape), Device::current());
            run(launches, tensors, stream);
        });
}

int32_t dflash_trt_attend_latents(dflash_trt_latents_shape const* shape, dflash_trt_latents_buffers const* buffers,
    void* workspace, dflash_trt_stream stream)
{
    return guarded(
        [&]
        {
            auto const& given = required(buffers);
            CallTensors const tensors{&required(given.inputs), &required(given.outputs), workspace};
            auto const launches =
                prepare_latents(latents_of(required(shape)), latent_options_of(*shape), Device::current());
            run(launches, tensors, stream);
        });
}

int32_t dflash_trt_set_communicator(void* communicator)
{
    return guarded([&] { set_communicator(communicator); });
}

int32_t dflash_trt_all_reduce(
    dflash_trt_collective_shape const* shape, void const* x, void* summed, dflash_trt_stream stream)
{
    return guarded([&] { all_reduce(collective_of(required(shape)), x, summed, stream); });
}

int32_t dflash_trt_all_gather(
    dflash_trt_collective_shape const* shape, void const* x, void* gathered, dflash_trt_stream stream)
{
    return guarded([&] { all_gather(collective_of(required(shape)), x, gathered, stream); });
}

char const* dflash_trt_last_error()
{
    return last_error.c_str();
}

char const* dflash_trt_architectures()
{
    static std::string const listed = embedded_kernels().architectures();
    return listed.c_str();
}

char const* dflash_trt_manifest_sha256()
{
    return embedded_kernels().manifest_sha256;
}

char const* dflash_trt_contract()
{
    static std::string const described = describe_contract();
    return described.c_str();
}
