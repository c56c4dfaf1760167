#include "tensorrt/draft_tokens_plugin.h"

#include "operations/sampling.h"
#include "runtime/problem.h"

#include <string>
#include <utility>

namespace dflash_trt
{
namespace
{

SamplingShape shape_of(nvinfer1::Dims const& logits, int64_t num_requests, FloatType type, int64_t num_choices)
{
    if (num_requests < 1 || logits.d[0] % num_requests != 0)
    {
        throw Problem("logits", "the same number of rows for each of " + std::to_string(num_requests) + " requests",
            std::to_string(logits.d[0]) + " rows", "Logits are [R * K, vocabulary].");
    }
    return {type, num_requests, logits.d[0] / num_requests, logits.d[1], num_choices};
}

/// Of a profile: its most rows, in whatever requests.
SamplingShape largest_shape(nvinfer1::Dims const& logits, FloatType type, int64_t num_choices)
{
    return {type, 1, logits.d[0], logits.d[1], num_choices};
}

} // namespace

DraftTokensPlugin::DraftTokensPlugin(PluginFields fields, nvinfer1::TensorRTPhase phase)
    : StepPlugin(kDraftTokens, std::move(fields), phase)
{
}

std::unique_ptr<StepPlugin> DraftTokensPlugin::copy() const
{
    return std::make_unique<DraftTokensPlugin>(*this);
}

void DraftTokensPlugin::set_output_shapes(
    nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs, nvinfer1::IExprBuilder& builder) const
{
    nvinfer1::IDimensionExpr const& num_rows = *inputs[input_index("logits")].d[0];
    nvinfer1::IDimensionExpr const& num_requests = *inputs[input_index("seed")].d[0];
    nvinfer1::IDimensionExpr const* const num_slots =
        builder.operation(nvinfer1::DimensionOperation::kFLOOR_DIV, num_rows, num_requests);
    nvinfer1::IDimensionExpr const* const num_columns =
        builder.operation(nvinfer1::DimensionOperation::kPROD, *num_slots, *builder.constant(num_choices()));
    for (int32_t i = 0; i < 3; ++i)
    {
        outputs[i].nbDims = 2;
        outputs[i].d[0] = &num_requests;
        outputs[i].d[1] = i == 0 ? num_slots : num_columns;
    }
}

void DraftTokensPlugin::check_build(nvinfer1::Dims const* max, FloatType type) const
{
    int64_t const vocab_size = max[input_index("logits")].d[1];
    int64_t const num_mapped = max[input_index("draft_to_target")].d[0];
    if (has_map() && num_mapped != vocab_size)
    {
        throw Problem("draft_to_target", "[" + std::to_string(vocab_size) + "]", "[" + std::to_string(num_mapped) + "]",
            "Every token of the draft vocabulary is one of the target's.");
    }
    if (num_choices() > vocab_size)
    {
        throw Problem("num_choices", "at most the vocabulary, " + std::to_string(vocab_size),
            std::to_string(num_choices()), "A draft is drawn from distinct tokens.");
    }
    static_cast<void>(workspace_bytes(max, type)); // throws where there are no kernels
}

size_t DraftTokensPlugin::workspace_bytes(nvinfer1::Dims const* max, FloatType type) const
{
    return draft_workspace_bytes(largest_shape(max[input_index("logits")], type, num_choices()), has_map());
}

PreparedLaunches DraftTokensPlugin::prepare(nvinfer1::Dims const* inputs, FloatType type, Device const& device) const
{
    int64_t const num_requests = inputs[input_index("seed")].d[0];
    SamplingShape const shape = shape_of(inputs[input_index("logits")], num_requests, type, num_choices());
    return prepare_drafts(shape, has_map(), device);
}

int64_t DraftTokensPlugin::num_choices() const
{
    return fields().integer("num_choices");
}

bool DraftTokensPlugin::has_map() const
{
    return fields().integer("has_map") != 0;
}

} // namespace dflash_trt
