#include "tensorrt/tensor_types.h"

#include "runtime/problem.h"

#include <string>

namespace dflash_trt
{
namespace
{

std::string name_of(nvinfer1::DataType type)
{
    switch (type)
    {
    case nvinfer1::DataType::kFLOAT: return "float32";
    case nvinfer1::DataType::kHALF: return "float16";
    case nvinfer1::DataType::kBF16: return "bfloat16";
    case nvinfer1::DataType::kINT32: return "int32";
    case nvinfer1::DataType::kINT64: return "int64";
    case nvinfer1::DataType::kINT8: return "int8";
    default: return "data type " + std::to_string(static_cast<int32_t>(type));
    }
}

bool is_float(nvinfer1::DataType type) noexcept
{
    return type == nvinfer1::DataType::kFLOAT || type == nvinfer1::DataType::kHALF || type == nvinfer1::DataType::kBF16;
}

} // namespace

FloatType float_type_of(nvinfer1::DataType type)
{
    switch (type)
    {
    case nvinfer1::DataType::kFLOAT: return FloatType::kFloat32;
    case nvinfer1::DataType::kHALF: return FloatType::kFloat16;
    case nvinfer1::DataType::kBF16: return FloatType::kBFloat16;
    default: break;
    }
    throw Problem("network type", "float32, float16 or bfloat16", name_of(type), "Build the engine in one of these.");
}

bool has_type(TensorType rule, nvinfer1::DataType type, nvinfer1::DataType float_type) noexcept
{
    return type == data_type(rule, float_type) && (rule != TensorType::kFloat || is_float(type));
}

nvinfer1::DataType data_type(TensorType rule, nvinfer1::DataType float_type) noexcept
{
    switch (rule)
    {
    case TensorType::kFloat: return float_type;
    case TensorType::kInt32: return nvinfer1::DataType::kINT32;
    case TensorType::kInt64: return nvinfer1::DataType::kINT64;
    case TensorType::kFloat32: return nvinfer1::DataType::kFLOAT;
    case TensorType::kInt8: return nvinfer1::DataType::kINT8;
    }
    return float_type;
}

void check_type(char const* tensor, TensorType rule, nvinfer1::DataType type, nvinfer1::DataType float_type)
{
    if (!has_type(rule, type, float_type))
    {
        std::string expected = name_of(data_type(rule, float_type));
        if (rule == TensorType::kFloat)
        {
            expected = "float32, float16 or bfloat16, as the first input";
        }
        throw Problem(tensor, expected, name_of(type), "Types stand in plugins/README.md.");
    }
}

} // namespace dflash_trt
