// The shape of attention's output.
#pragma once

#include <NvInferRuntime.h>

namespace dflash_trt
{

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
