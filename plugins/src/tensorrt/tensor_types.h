// TensorRT's data types and the contract's.
#pragma once

#include "program/program.h"
#include "runtime/float_type.h"

#include <NvInferRuntime.h>

namespace dflash_trt
{

/// Throws Problem when it is not one of F.
FloatType float_type_of(nvinfer1::DataType type);

/// `float_type` is what F is in this node.
bool has_type(TensorType rule, nvinfer1::DataType type, nvinfer1::DataType float_type) noexcept;

nvinfer1::DataType data_type(TensorType rule, nvinfer1::DataType float_type) noexcept;

/// Throws Problem when `has_type` is false.
void check_type(char const* tensor, TensorType rule, nvinfer1::DataType type, nvinfer1::DataType float_type);

} // namespace dflash_trt
