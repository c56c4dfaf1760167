#include "tensorrt/sample_and_accept_plugin.h"

#include "operations/sampling.h"
#include "runtime/problem.h"

#include <string>
#include <utility>

namespace dflash_trt
{
namespace
{

SamplingShape shape_of(
    nvinfer1::Dims const& logits, nvinfer1::Dims const& logit_rows, FloatType type, int64_t num_choices)
{
    SamplingShape const shape{type, logit_rows.d[0], logit_rows.d[1], logits.d[1], num_choices};
    if (logits.d[0] != shape.num_rows())
    {
        throw Problem("logits", "a row for each of logit_rows, " + std::to_string(shape.num_rows()),
            std::to_string(logits.d[0]), "Logits are [R * S, vocabulary].");
    }
    return shape;
}

/// Of a profile: its largest R with its largest S.
SamplingShape largest_shape(
    nvinfer1::Dims const& logits, nvinfer1::Dims const& logit_rows, FloatType type, int64_t num_choices)
{
    return {type, logit_rows.d[0], logit_rows.d[1], logits.d[1], num_choices};
}

/// [R, (S - 1) * C], where they are read.
void check_choices(char const* name, nvinfer1::Dims const& dims, SamplingShape const& shape)
{
    int64_t const num_columns = (shape.width - 1) * shape.num_choices;
    if (shape.num_choices > 0 && (dims.d[0] != shape.num_requests || dims.d[1] != num_columns))
    {
        throw Problem(name, "[" + std::to_string(shape.num_requests) + ", " + std::to_string(num_columns) + "]",
            "[" + std::to_string(dims.d[0]) + ", " + std::to_string(dims.d[1]) + "]",
            "Every draft has num_choices of them, " + std::to_string(shape.num_choices) + ".");
    }
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
    return sampling_workspace_bytes(
        largest_shape(max[input_index("logits")], max[input_index("logit_rows")], type, num_choices()));
}

PreparedLaunches SampleAndAcceptPlugin::prepare(
    nvinfer1::Dims const* inputs, FloatType type, Device const& device) const
{
    SamplingShape const shape =
        shape_of(inputs[input_index("logits")], inputs[input_index("logit_rows")], type, num_choices());
    check_choices("choices", inputs[input_index("choices")], shape);
    check_choices("chances", inputs[input_index("chances")], shape);
    return prepare_sampling(shape, device);
}

int64_t SampleAndAcceptPlugin::num_choices() const
{
    return fields().integer("num_choices");
}

} // namespace dflash_trt
