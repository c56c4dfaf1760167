// Shapes of a call's inputs, and shapes that several plugins give.
#pragma once

#include "contract/contract.h"

#include <NvInferRuntime.h>

#include <vector>

namespace dflash_trt
{

class InputDims
{
public:
    InputDims(PluginContract const& contract, nvinfer1::PluginTensorDesc const* descs)
    {
        for (int32_t i = 0; i < contract.inputs.count; ++i)
        {
            mDims.push_back(descs[i].dims);
        }
    }

    [[nodiscard]] nvinfer1::Dims const* data() const noexcept { return mDims.data(); }

private:
    std::vector<nvinfer1::Dims> mDims;
};

/// [rows, heads, D] -> [rows, heads * D]
inline nvinfer1::DimsExprs attended_shape(nvinfer1::DimsExprs const& q, nvinfer1::IExprBuilder& builder)
{
    nvinfer1::DimsExprs attended{};
    attended.nbDims = 2;
    attended.d[0] = q.d[0];
    attended.d[1] = builder.operation(nvinfer1::DimensionOperation::kPROD, *q.d[1], *q.d[2]);
    return attended;
}

} // namespace dflash_trt
