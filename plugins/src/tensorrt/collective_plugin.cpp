#include "tensorrt/collective_plugin.h"

#include "tensorrt/tensor_types.h"

namespace dflash_trt
{

PreparedLaunches CollectivePlugin::launches_of(Node const&, Device const&) const
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
