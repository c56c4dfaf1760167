#include "tensorrt/sample_and_accept_plugin.h"

#include "operations/sampling.h"
#include "runtime/problem.h"

#include <string>
#include <utility>

namespace dflash_trt
{
namespace
{

SamplingShape shape_of(nvinfer1::Dims const& logits, nvinfer1::Dims const& logit_rows, FloatType type)
{
    SamplingShape const shape{type, logit_rows.d[0], logit_rows.d[1], logits.d[1]};
    if (logits.d[0] != shape.num_rows())
    {
        throw Problem("logits", "a row for each of logit_rows, " + std::to_string(shape.num_rows()),
            std::to_string(logits.d[0]), "Logits are [R * S, vocabulary].");
    }
    return shape;
}

/// Of a profile: its largest R with its largest S.
SamplingShape largest_shape(nvinfer1::Dims const& logits, nvinfer1::Dims const& logit_rows, FloatType type)
{
    return {type, logit_rows.d[0], logit_rows.d[1], logits.d[1]};
}

} // namespace

SampleAndAcceptPlugin::SampleAndAcceptPlugin(PluginFields fields, nvinfer1::TensorRTPhase phase)
    : StepPlugin(kSampleAndAccept, std::move(fields), phase)
{
}

std::unique_ptr<StepPlugin> SampleAndAcceptPlugin::copy() const
{
    return std::make_unique<SampleAndAcceptPlugin>(*this);
}

void SampleAndAcceptPlugin::set_output_shapes(
    nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs, nvinfer1::IExprBuilder&) const
{
    outputs[0] = outputs[1] = inputs[input_index("logit_rows")];
    outputs[2] = outputs[3] = outputs[4] = inputs[input_index("num_candidates")];
}

void SampleAndAcceptPlugin::check_build(nvinfer1::Dims const* max, FloatType type) const
{
    static_cast<void>(workspace_bytes(max, type)); // throws where there are no kernels
}

size_t SampleAndAcceptPlugin::workspace_bytes(nvinfer1::Dims const* max, FloatType type) const
{
    return sampling_workspace_bytes(largest_shape(max[input_index("logits")], max[input_index("logit_rows")], type));
}

PreparedLaunches SampleAndAcceptPlugin::prepare(
    nvinfer1::Dims const* inputs, FloatType type, Device const& device) const
{
    return prepare_sampling(shape_of(inputs[input_index("logits")], inputs[input_index("logit_rows")], type), device);
}

} // namespace dflash_trt
