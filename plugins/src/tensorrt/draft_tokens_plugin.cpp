#include "tensorrt/draft_tokens_plugin.h"

#include "operations/sampling.h"
#include "runtime/problem.h"

#include <string>
#include <utility>

namespace dflash_trt
{
namespace
{

SamplingShape shape_of(nvinfer1::Dims const& logits, int64_t num_requests, FloatType type)
{
    if (num_requests < 1 || logits.d[0] % num_requests != 0)
    {
        throw Problem("logits", "the same number of rows for each of " + std::to_string(num_requests) + " requests",
            std::to_string(logits.d[0]) + " rows", "Logits are [R * K, vocabulary].");
    }
    return {type, num_requests, logits.d[0] / num_requests, logits.d[1]};
}

/// Of a profile: its most rows, in whatever requests.
SamplingShape largest_shape(nvinfer1::Dims const& logits, FloatType type)
{
    return {type, 1, logits.d[0], logits.d[1]};
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
    outputs[0].nbDims = 2;
    outputs[0].d[0] = &num_requests;
    outputs[0].d[1] = builder.operation(nvinfer1::DimensionOperation::kFLOOR_DIV, num_rows, num_requests);
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
    static_cast<void>(workspace_bytes(max, type)); // throws where there are no kernels
}

size_t DraftTokensPlugin::workspace_bytes(nvinfer1::Dims const* max, FloatType type) const
{
    return draft_workspace_bytes(largest_shape(max[input_index("logits")], type), has_map());
}

PreparedLaunches DraftTokensPlugin::prepare(nvinfer1::Dims const* inputs, FloatType type, Device const& device) const
{
    int64_t const num_requests = inputs[input_index("seed")].d[0];
    return prepare_drafts(shape_of(inputs[input_index("logits")], num_requests, type), has_map(), device);
}

bool DraftTokensPlugin::has_map() const
{
    return fields().integer("has_map") != 0;
}

} // namespace dflash_trt
