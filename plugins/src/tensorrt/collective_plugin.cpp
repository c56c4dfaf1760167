#include "tensorrt/collective_plugin.h"

#include "tensorrt/tensor_types.h"

#include <functional>
#include <numeric>

namespace dflash_trt
{

Collective collective_named(std::string_view program) noexcept
{
    return program == "AllReduce"    ? all_reduce
        : program == "AllGather"     ? all_gather
        : program == "ReduceScatter" ? reduce_scatter
        : program == "AllToAll"      ? all_to_all
                                     : nullptr;
}

PreparedLaunches CollectivePlugin::launches_of(Node const&, Device const&) const
{
    require_communicator(num_ranks());
    return {};
}

void CollectivePlugin::run_prepared(PreparedLaunches const&, nvinfer1::PluginTensorDesc const* inputs,
    CallTensors const& tensors, CUstream stream) const
{
    nvinfer1::Dims const& dims = inputs[0].dims;
    int64_t const num_elements = std::accumulate(dims.d, dims.d + dims.nbDims, int64_t{1}, std::multiplies<>());
    CollectiveShape const shape{float_type_of(inputs[0].type), num_ranks(), num_elements};
    collective_named(program().name)(shape, tensors.inputs[0], tensors.outputs[0], stream);
}

} // namespace dflash_trt
