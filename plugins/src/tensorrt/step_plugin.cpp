#include "tensorrt/step_plugin.h"

#include "runtime/problem.h"
#include "tensorrt/log.h"
#include "tensorrt/tensor_types.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

namespace dflash_trt
{
namespace
{

constexpr int32_t kSuccess = 0;
constexpr int32_t kFailure = 1;

Shape shape_of(nvinfer1::Dims const& dims)
{
    Shape shape{dims.nbDims, {}};
    std::copy_n(dims.d, dims.nbDims, shape.sizes.begin());
    return shape;
}

void check_rank(InputRule const& rule, int32_t rank)
{
    if (rank != rule.axes.count)
    {
        throw Problem(rule.name, std::to_string(rule.axes.count) + " dimensions", std::to_string(rank),
            "Shapes stand in plugins/README.md.");
    }
}

/// Said, because an engine that was never serialized would give nothing but garbage.
void warn_once_that_building_does_not_run() noexcept
{
    static std::atomic<bool> is_said{false};
    if (!is_said.exchange(true))
    {
        log_warning(
            "dflash_trt: plugins do nothing while an engine is built. Serialize the engine and deserialize it.");
    }
}

} // namespace

StepPlugin::StepPlugin(Program const& program, PluginFields fields, nvinfer1::TensorRTPhase phase)
    : mProgram(&program), mFields(std::move(fields)), mPhase(phase)
{
}

nvinfer1::IPluginCapability* StepPlugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept
{
    switch (type)
    {
    case nvinfer1::PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
    case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

nvinfer1::IPluginV3* StepPlugin::clone() noexcept
{
    return logged<nvinfer1::IPluginV3*>(mProgram->name, nullptr, [&] { return copy().release(); });
}

nvinfer1::AsciiChar const* StepPlugin::getPluginName() const noexcept
{
    return mProgram->name;
}

nvinfer1::AsciiChar const* StepPlugin::getPluginVersion() const noexcept
{
    return kVersion;
}

nvinfer1::AsciiChar const* StepPlugin::getPluginNamespace() const noexcept
{
    return kNamespace;
}

int32_t StepPlugin::getNbOutputs() const noexcept
{
    return mProgram->outputs.count;
}

int32_t StepPlugin::getOutputDataTypes(nvinfer1::DataType* types, int32_t num_outputs,
    nvinfer1::DataType const* input_types, int32_t num_inputs) const noexcept
{
    return logged(mProgram->name, kFailure,
        [&]
        {
            check_counts(num_inputs, num_outputs);
            nvinfer1::DataType const float_type = input_types[0]; // by contract the first input is of F
            for (int32_t i = 0; i < num_inputs; ++i)
            {
                check_type(mProgram->inputs[i].name, mProgram->inputs[i].type, input_types[i], float_type);
            }
            for (int32_t i = 0; i < num_outputs; ++i)
            {
                types[i] = data_type(mProgram->outputs[i].type, float_type);
            }
            return kSuccess;
        });
}

int32_t StepPlugin::getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t num_inputs, nvinfer1::DimsExprs const*,
    int32_t, nvinfer1::DimsExprs* outputs, int32_t num_outputs, nvinfer1::IExprBuilder& builder) noexcept
{
    return logged(mProgram->name, kFailure,
        [&]
        {
            check_counts(num_inputs, num_outputs);
            for (int32_t i = 0; i < num_inputs; ++i)
            {
                check_rank(mProgram->inputs[i], inputs[i].nbDims);
            }
            for (int32_t i = 0; i < num_outputs; ++i)
            {
                Rules<OutputAxis> const& axes = mProgram->outputs[i].axes;
                outputs[i].nbDims = axes.count;
                for (int32_t axis = 0; axis < axes.count; ++axis)
                {
                    outputs[i].d[axis] = size_of(axes[axis], inputs, builder);
                }
            }
            return kSuccess;
        });
}

bool StepPlugin::supportsFormatCombination(int32_t position, nvinfer1::DynamicPluginTensorDesc const* tensors,
    int32_t num_inputs, int32_t num_outputs) noexcept
{
    if (num_inputs != mProgram->inputs.count || num_outputs != mProgram->outputs.count || position < 0
        || position >= num_inputs + num_outputs)
    {
        return false;
    }
    nvinfer1::PluginTensorDesc const& tensor = tensors[position].desc;
    if (tensor.format != nvinfer1::TensorFormat::kLINEAR)
    {
        return false;
    }
    TensorType const rule =
        position < num_inputs ? mProgram->inputs[position].type : mProgram->outputs[position - num_inputs].type;
    return has_type(rule, tensor.type, tensors[0].desc.type);
}

int32_t StepPlugin::configurePlugin(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t num_inputs,
    nvinfer1::DynamicPluginTensorDesc const*, int32_t num_outputs) noexcept
{
    return logged(mProgram->name, kFailure,
        [&]
        {
            static_cast<void>(workspace_of(max_node(inputs, num_inputs, num_outputs)));
            return kSuccess;
        });
}

size_t StepPlugin::getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t num_inputs,
    nvinfer1::DynamicPluginTensorDesc const*, int32_t num_outputs) const noexcept
{
    // TensorRT cannot be told of an error here; configurePlugin has refused what would be one.
    return logged(
        mProgram->name, size_t{0}, [&] { return workspace_of(max_node(inputs, num_inputs, num_outputs)); });
}

int32_t StepPlugin::onShapeChange(nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs,
    nvinfer1::PluginTensorDesc const*, int32_t num_outputs) noexcept
{
    return logged(mProgram->name, kFailure,
        [&]
        {
            check_counts(num_inputs, num_outputs);
            prepare_for(inputs);
            return kSuccess;
        });
}

int32_t StepPlugin::enqueue(nvinfer1::PluginTensorDesc const* input_descs, nvinfer1::PluginTensorDesc const*,
    void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept
{
    if (mPhase == nvinfer1::TensorRTPhase::kBUILD)
    {
        warn_once_that_building_does_not_run();
        return kSuccess;
    }
    return logged(mProgram->name, kFailure,
        [&]
        {
            if (!mPrepared || !mPrepared->has_shapes_of(input_descs))
            {
                prepare_for(input_descs);
            }
            run_prepared(mPrepared->launches, input_descs, {inputs, outputs, workspace}, stream);
            return kSuccess;
        });
}

void StepPlugin::load(Node const&, Device const&) const {}

void StepPlugin::run_prepared(PreparedLaunches const& launches, nvinfer1::PluginTensorDesc const*,
    CallTensors const& tensors, CUstream stream) const
{
    run(launches, tensors, stream);
}

nvinfer1::IPluginV3* StepPlugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept
{
    return clone();
}

nvinfer1::PluginFieldCollection const* StepPlugin::getFieldsToSerialize() noexcept
{
    return logged<nvinfer1::PluginFieldCollection const*>(mProgram->name, nullptr,
        [&]
        {
            mSerialized = mFields.serialized();
            mCollection = {static_cast<int32_t>(mSerialized.size()), mSerialized.data()};
            return &mCollection;
        });
}

bool StepPlugin::Prepared::has_shapes_of(nvinfer1::PluginTensorDesc const* others) const noexcept
{
    return std::equal(inputs.begin(), inputs.end(), others,
        [](nvinfer1::PluginTensorDesc const& a, nvinfer1::PluginTensorDesc const& b)
        {
            return a.type == b.type && a.dims.nbDims == b.dims.nbDims
                && std::equal(a.dims.d, a.dims.d + a.dims.nbDims, b.dims.d);
        });
}

void StepPlugin::prepare_for(nvinfer1::PluginTensorDesc const* inputs)
{
    Device const device = Device::current();
    if (mPrepared && mPrepared->device == device && mPrepared->has_shapes_of(inputs))
    {
        return; // another input of the engine has changed
    }
    mPrepared.reset(); // nothing runs with what an error leaves
    std::vector<nvinfer1::PluginTensorDesc> const descs(inputs, inputs + mProgram->inputs.count);
    Node node{float_type_of(inputs[0].type), {}, mFields.numbers()};
    for (nvinfer1::PluginTensorDesc const& desc : descs)
    {
        node.shapes.push_back(shape_of(desc.dims));
    }
    if (!mLoaded || !(*mLoaded == device))
    {
        load(node, device);
        mLoaded = device;
    }
    mPrepared = Prepared{descs, device, launches_of(node, device)};
}

nvinfer1::IDimensionExpr const* StepPlugin::size_of(
    OutputAxis const& axis, nvinfer1::DimsExprs const* inputs, nvinfer1::IExprBuilder& builder) const
{
    using Operation = nvinfer1::DimensionOperation;
    auto const at = [&](AxisPlace const& place) { return inputs[place.input].d[place.axis]; };
    nvinfer1::IDimensionExpr const* product = nullptr;
    for (auto const& [constant, field, size, divisor] : axis)
    {
        nvinfer1::IDimensionExpr const* factor = field != nullptr ? builder.constant(mFields.integer(field))
            : size.input >= 0                                    ? at(size)
                                                                 : builder.constant(constant);
        if (divisor.input >= 0)
        {
            factor = builder.operation(Operation::kFLOOR_DIV, *factor, *at(divisor));
        }
        product = product == nullptr ? factor : builder.operation(Operation::kPROD, *product, *factor);
    }
    return product;
}

void StepPlugin::check_counts(int32_t num_inputs, int32_t num_outputs) const
{
    if (num_inputs != mProgram->inputs.count || num_outputs != mProgram->outputs.count)
    {
        throw Problem("tensors",
            std::to_string(mProgram->inputs.count) + " inputs and " + std::to_string(mProgram->outputs.count)
                + " outputs",
            std::to_string(num_inputs) + " and " + std::to_string(num_outputs), "They stand in plugins/README.md.");
    }
}

Node StepPlugin::max_node(
    nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t num_inputs, int32_t num_outputs) const
{
    check_counts(num_inputs, num_outputs);
    Node node{float_type_of(inputs[0].desc.type), {}, mFields.numbers()};
    for (int32_t i = 0; i < num_inputs; ++i)
    {
        check_rank(mProgram->inputs[i], inputs[i].max.nbDims);
        check_type(mProgram->inputs[i].name, mProgram->inputs[i].type, inputs[i].desc.type, inputs[0].desc.type);
        node.shapes.push_back(shape_of(inputs[i].max));
    }
    return node;
}

} // namespace dflash_trt
