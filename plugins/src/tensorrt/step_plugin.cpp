#include "tensorrt/step_plugin.h"

#include "runtime/problem.h"
#include "tensorrt/log.h"
#include "tensorrt/tensor_types.h"

#include <algorithm>
#include <atomic>
#include <cassert>
#include <string>
#include <string_view>
#include <utility>

namespace dflash_trt
{
namespace
{

constexpr int32_t kSuccess = 0;
constexpr int32_t kFailure = 1;

template <typename T>
int32_t index_in(Rules<T> const& rules, char const* name)
{
    for (int32_t i = 0; i < rules.count; ++i)
    {
        if (std::string_view(rules[i].name) == name)
        {
            return i;
        }
    }
    assert(false && "a tensor outside the contract");
    return 0;
}

void check_rank(InputRule const& rule, int32_t rank)
{
    if (rank != rule.rank)
    {
        throw Problem(rule.name, std::to_string(rule.rank) + " dimensions", std::to_string(rank),
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

StepPlugin::StepPlugin(PluginContract const& contract, PluginFields fields, nvinfer1::TensorRTPhase phase)
    : mContract(&contract), mFields(std::move(fields)), mPhase(phase)
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
    return logged<nvinfer1::IPluginV3*>(mContract->name, nullptr, [&] { return copy().release(); });
}

nvinfer1::AsciiChar const* StepPlugin::getPluginName() const noexcept
{
    return mContract->name;
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
    return mContract->outputs.count;
}

int32_t StepPlugin::getOutputDataTypes(nvinfer1::DataType* types, int32_t num_outputs,
    nvinfer1::DataType const* input_types, int32_t num_inputs) const noexcept
{
    return logged(mContract->name, kFailure,
        [&]
        {
            check_counts(num_inputs, num_outputs);
            nvinfer1::DataType const float_type = input_types[0]; // by contract the first input is of F
            for (int32_t i = 0; i < num_inputs; ++i)
            {
                check_type(mContract->inputs[i].name, mContract->inputs[i].type, input_types[i], float_type);
            }
            for (int32_t i = 0; i < num_outputs; ++i)
            {
                types[i] = data_type(mContract->outputs[i].type, float_type);
            }
            return kSuccess;
        });
}

int32_t StepPlugin::getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t num_inputs, nvinfer1::DimsExprs const*,
    int32_t, nvinfer1::DimsExprs* outputs, int32_t num_outputs, nvinfer1::IExprBuilder& builder) noexcept
{
    return logged(mContract->name, kFailure,
        [&]
        {
            check_counts(num_inputs, num_outputs);
            for (int32_t i = 0; i < num_inputs; ++i)
            {
                check_rank(mContract->inputs[i], inputs[i].nbDims);
            }
            set_output_shapes(inputs, outputs, builder);
            return kSuccess;
        });
}

bool StepPlugin::supportsFormatCombination(int32_t position, nvinfer1::DynamicPluginTensorDesc const* tensors,
    int32_t num_inputs, int32_t num_outputs) noexcept
{
    if (num_inputs != mContract->inputs.count || num_outputs != mContract->outputs.count || position < 0
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
        position < num_inputs ? mContract->inputs[position].type : mContract->outputs[position - num_inputs].type;
    return has_type(rule, tensor.type, tensors[0].desc.type);
}

int32_t StepPlugin::configurePlugin(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t num_inputs,
    nvinfer1::DynamicPluginTensorDesc const*, int32_t num_outputs) noexcept
{
    return logged(mContract->name, kFailure,
        [&]
        {
            auto const dims = max_dims(inputs, num_inputs, num_outputs);
            check_build(dims.data(), float_type_of(inputs[0].desc.type));
            return kSuccess;
        });
}

size_t StepPlugin::getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t num_inputs,
    nvinfer1::DynamicPluginTensorDesc const*, int32_t num_outputs) const noexcept
{
    // TensorRT cannot be told of an error here; configurePlugin has refused what would be one.
    return logged(mContract->name, size_t{0},
        [&]
        {
            auto const dims = max_dims(inputs, num_inputs, num_outputs);
            return workspace_bytes(dims.data(), float_type_of(inputs[0].desc.type));
        });
}

int32_t StepPlugin::onShapeChange(nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs,
    nvinfer1::PluginTensorDesc const*, int32_t num_outputs) noexcept
{
    return logged(mContract->name, kFailure,
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
    return logged(mContract->name, kFailure,
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
    return logged<nvinfer1::PluginFieldCollection const*>(mContract->name, nullptr,
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
    std::vector<nvinfer1::PluginTensorDesc> const descs(inputs, inputs + mContract->inputs.count);
    std::vector<nvinfer1::Dims> dims;
    for (nvinfer1::PluginTensorDesc const& desc : descs)
    {
        dims.push_back(desc.dims);
    }
    mPrepared = Prepared{descs, device, prepare(dims.data(), float_type_of(inputs[0].type), device)};
}

int32_t StepPlugin::input_index(char const* name) const
{
    return index_in(mContract->inputs, name);
}

void StepPlugin::check_counts(int32_t num_inputs, int32_t num_outputs) const
{
    if (num_inputs != mContract->inputs.count || num_outputs != mContract->outputs.count)
    {
        throw Problem("tensors",
            std::to_string(mContract->inputs.count) + " inputs and " + std::to_string(mContract->outputs.count)
                + " outputs",
            std::to_string(num_inputs) + " and " + std::to_string(num_outputs), "They stand in plugins/README.md.");
    }
}

std::vector<nvinfer1::Dims> StepPlugin::max_dims(
    nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t num_inputs, int32_t num_outputs) const
{
    check_counts(num_inputs, num_outputs);
    std::vector<nvinfer1::Dims> dims;
    for (int32_t i = 0; i < num_inputs; ++i)
    {
        check_rank(mContract->inputs[i], inputs[i].max.nbDims);
        check_type(mContract->inputs[i].name, mContract->inputs[i].type, inputs[i].desc.type, inputs[0].desc.type);
        dims.push_back(inputs[i].max);
    }
    return dims;
}

} // namespace dflash_trt
