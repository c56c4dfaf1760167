#include "tensorrt/plugin_creator.h"

#include "tensorrt/log.h"

namespace dflash_trt
{

PluginCreator::PluginCreator(PluginContract const& contract, Make make) : mContract(&contract), mMake(make)
{
    for (FieldRule const& rule : contract.fields)
    {
        mFields.emplace_back(rule.name, nullptr, field_type(rule.type), 1);
    }
    mCollection = {static_cast<int32_t>(mFields.size()), mFields.data()};
}

nvinfer1::IPluginV3* PluginCreator::createPlugin(
    nvinfer1::AsciiChar const*, nvinfer1::PluginFieldCollection const* given, nvinfer1::TensorRTPhase phase) noexcept
{
    return logged<nvinfer1::IPluginV3*>(
        mContract->name, nullptr, [&] { return mMake(PluginFields(*mContract, given), phase).release(); });
}

nvinfer1::PluginFieldCollection const* PluginCreator::getFieldNames() noexcept
{
    return &mCollection;
}

nvinfer1::AsciiChar const* PluginCreator::getPluginName() const noexcept
{
    return mContract->name;
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
