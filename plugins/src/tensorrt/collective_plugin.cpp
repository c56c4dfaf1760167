#include "tensorrt/collective_plugin.h"

#include "tensorrt/tensor_types.h"

#include <utility>

namespace dflash_trt
{

CollectiveShape CollectivePlugin::shape_of(nvinfer1::PluginTensorDesc const& x) const
{
    return {float_type_of(x.type), num_ranks(), x.dims.d[0] * x.dims.d[1]};
}

void CollectivePlugin::check_build(nvinfer1::Dims const*, FloatType) const {}

size_t CollectivePlugin::workspace_bytes(nvinfer1::Dims const*, FloatType) const
{
    return 0;
}

PreparedLaunches CollectivePlugin::prepare(nvinfer1::Dims const*, FloatType, Device const&) const
{
    require_communicator(num_ranks());
    return {};
}

AllReducePlugin::AllReducePlugin(PluginFields fields, nvinfer1::TensorRTPhase phase)
    : CollectivePlugin(kAllReduce, std::move(fields), phase)
{
}

std::unique_ptr<StepPlugin> AllReducePlugin::copy() const
{
    return std::make_unique<AllReducePlugin>(*this);
}

void AllReducePlugin::set_output_shapes(
    nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs, nvinfer1::IExprBuilder&) const
{
    outputs[0] = inputs[0];
}

void AllReducePlugin::run_prepared(PreparedLaunches const&, nvinfer1::PluginTensorDesc const* inputs,
    CallTensors const& tensors, CUstream stream) const
{
    all_reduce(shape_of(inputs[0]), tensors.inputs[0], tensors.outputs[0], stream);
}

AllGatherPlugin::AllGatherPlugin(PluginFields fields, nvinfer1::TensorRTPhase phase)
    : CollectivePlugin(kAllGather, std::move(fields), phase)
{
}

std::unique_ptr<StepPlugin> AllGatherPlugin::copy() const
{
    return std::make_unique<AllGatherPlugin>(*this);
}

void AllGatherPlugin::set_output_shapes(
    nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs, nvinfer1::IExprBuilder& builder) const
{
    outputs[0] = inputs[0];
    outputs[0].d[0] = builder.operation(
        nvinfer1::DimensionOperation::kPROD, *inputs[0].d[0], *builder.constant(num_ranks()));
}

void AllGatherPlugin::run_prepared(PreparedLaunches const&, nvinfer1::PluginTensorDesc const* inputs,
    CallTensors const& tensors, CUstream stream) const
{
    all_gather(shape_of(inputs[0]), tensors.inputs[0], tensors.outputs[0], stream);
}

} // namespace dflash_trt
