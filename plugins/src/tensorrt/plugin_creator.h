// Makes plugins of one kind from fields.
#pragma once

#include "program/program.h"
#include "tensorrt/plugin_fields.h"
#include "tensorrt/step_plugin.h"

#include <NvInferRuntime.h>

#include <memory>
#include <vector>

namespace dflash_trt
{

class PluginCreator final : public nvinfer1::IPluginCreatorV3One
{
public:
    using Make = std::unique_ptr<StepPlugin> (*)(Program const&, PluginFields, nvinfer1::TensorRTPhase);

    PluginCreator(Program const& program, Make make);

    /// Null, with a line in the log, for fields that are not the contract's.
    nvinfer1::IPluginV3* createPlugin(nvinfer1::AsciiChar const* name, nvinfer1::PluginFieldCollection const* given,
        nvinfer1::TensorRTPhase phase) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override;
    nvinfer1::AsciiChar const* getPluginName() const noexcept override;
    nvinfer1::AsciiChar const* getPluginVersion() const noexcept override;
    nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override;

private:
    Program const* mProgram;
    Make mMake;
    std::vector<nvinfer1::PluginField> mFields;
    nvinfer1::PluginFieldCollection mCollection;
};

} // namespace dflash_trt
