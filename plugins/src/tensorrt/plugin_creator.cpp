#include "tensorrt/plugin_creator.h"

#include "tensorrt/log.h"

namespace dflash_trt
{

PluginCreator::PluginCreator(Program const& program, Make make) : mProgram(&program), mMake(make)
{
    for (FieldRule const& rule : program.fields)
    {
        mFields.emplace_back(rule.name, nullptr, field_type(rule.type), 1);
    }
    mCollection = {static_cast<int32_t>(mFields.size()), mFields.data()};
}

nvinfer1::IPluginV3* PluginCreator::createPlugin(
    nvinfer1::AsciiChar const*, nvinfer1::PluginFieldCollection const* given, nvinfer1::TensorRTPhase phase) noexcept
{
    return logged<nvinfer1::IPluginV3*>(
        mProgram->name, nullptr, [&] { return mMake(*mProgram, PluginFields(*mProgram, given), phase).release(); });
}

nvinfer1::PluginFieldCollection const* PluginCreator::getFieldNames() noexcept
{
    return &mCollection;
}

nvinfer1::AsciiChar const* PluginCreator::getPluginName() const noexcept
{
    return mProgram->name;
}

nvinfer1::AsciiChar const* PluginCreator::getPluginVersion() const noexcept
{
    return kVersion;
}

nvinfer1::AsciiChar const* PluginCreator::getPluginNamespace() const noexcept
{
    return kNamespace;
}

} // namespace dflash_trt
