// What TensorRT would hand to a plugin, made here: a logger, dimension expressions, tensor descriptors.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

namespace host
{

/// Keeps what was logged.
class Logger final : public nvinfer1::ILogger
{
public:
    void log(Severity severity, nvinfer1::AsciiChar const* message) noexcept override
    {
        lines.push_back((severity == Severity::kERROR ? "error: " : "") + std::string(message));
    }

    std::vector<std::string> lines;
};

class LoggerFinder final : public nvinfer1::ILoggerFinder
{
public:
    explicit LoggerFinder(Logger& logger) : mLogger(logger) {}
    nvinfer1::ILogger* findLogger() override { return &mLogger; }

private:
    Logger& mLogger;
};

/// A dimension whose value is known.
class Expr final : public nvinfer1::IDimensionExpr, private nvinfer1::apiv::VDimensionExpr
{
public:
    explicit Expr(int64_t value) : mValue(value) { mImpl = this; }
    ~Expr() noexcept override = default;
    [[nodiscard]] int64_t value() const { return mValue; }

private:
    [[nodiscard]] bool isConstant() const override { return true; }
    [[nodiscard]] int64_t getConstantValue() const override { return mValue; }
    [[nodiscard]] bool isSizeTensor() const override { return false; }

    int64_t mValue;
};

/// Computes at once.
class ExprBuilder final : public nvinfer1::IExprBuilder, private nvinfer1::apiv::VExprBuilder
{
public:
    ExprBuilder() { mImpl = this; }
    ~ExprBuilder() noexcept override = default;

    nvinfer1::IDimensionExpr const* make(int64_t value) { return &mExprs.emplace_back(value); }

private:
    nvinfer1::IDimensionExpr const* constant(int64_t value) override { return make(value); }

    nvinfer1::IDimensionExpr const* operation(nvinfer1::DimensionOperation op, nvinfer1::IDimensionExpr const& first,
        nvinfer1::IDimensionExpr const& second) override
    {
        int64_t const a = static_cast<Expr const&>(first).value();
        int64_t const b = static_cast<Expr const&>(second).value();
        if (op == nvinfer1::DimensionOperation::kFLOOR_DIV)
        {
            return make(a / b);
        }
        return op == nvinfer1::DimensionOperation::kPROD ? make(a * b) : nullptr;
    }

    nvinfer1::IDimensionExpr const* declareSizeTensor(
        int32_t, nvinfer1::IDimensionExpr const&, nvinfer1::IDimensionExpr const&) override
    {
        return nullptr;
    }

    std::deque<Expr> mExprs; // addresses stay
};

inline nvinfer1::Dims dims_of(std::vector<int64_t> const& sizes)
{
    nvinfer1::Dims dims{};
    dims.nbDims = static_cast<int32_t>(sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i)
    {
        dims.d[i] = sizes[i];
    }
    return dims;
}

struct Tensor
{
    std::string name;
    std::vector<int64_t> sizes;
    nvinfer1::DataType type;

    [[nodiscard]] nvinfer1::PluginTensorDesc desc() const
    {
        nvinfer1::PluginTensorDesc result{};
        result.dims = dims_of(sizes);
        result.type = type;
        result.format = nvinfer1::TensorFormat::kLINEAR;
        return result;
    }

    [[nodiscard]] nvinfer1::DynamicPluginTensorDesc dynamic_desc() const
    {
        return {desc(), dims_of(sizes), dims_of(sizes), dims_of(sizes)};
    }
};

} // namespace host
