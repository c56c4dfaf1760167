#include "tensorrt/collective_plugin.h"

#include "tensorrt/tensor_types.h"

namespace dflash_trt
{

std::unique_ptr<StepPlugin> CollectivePlugin::copy() const
{
    return std::make_unique<CollectivePlugin>(*this);
}

void CollectivePlugin::set_output_shapes(
    nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs, nvinfer1::IExprBuilder& builder) const
{
    outputs[0] = inputs[0];
    if (is_gather())
    {
        outputs[0].d[0] = builder.operation(
            nvinfer1::DimensionOperation::kPROD, *inputs[0].d[0], *builder.constant(num_ranks()));
    }
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

void CollectivePlugin::run_prepared(PreparedLaunches const&, nvinfer1::PluginTensorDesc const* inputs,
    CallTensors const& tensors, CUstream stream) const
{
    nvinfer1::Dims const& dims = inputs[0].dims; // of a matrix
    CollectiveShape const shape{float_type_of(inputs[0].type), num_ranks(), dims.d[0] * dims.d[1]};
    (is_gather() ? all_gather : all_reduce)(shape, tensors.inputs[0], tensors.outputs[0], stream);
}

} // namespace dflash_trt
