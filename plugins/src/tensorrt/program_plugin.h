// A plugin whose program has launches.
#pragma once

#include "tensorrt/step_plugin.h"

namespace dflash_trt
{

class ProgramPlugin final : public StepPlugin
{
public:
    using StepPlugin::StepPlugin;

private:
    [[nodiscard]] std::unique_ptr<StepPlugin> copy() const override { return std::make_unique<ProgramPlugin>(*this); }
    [[nodiscard]] size_t workspace_of(Node const& max) const override { return workspace_bytes(program(), max); }
    void load(Node const& node, Device const& device) const override { load_kernels(program(), node, device); }
    [[nodiscard]] PreparedLaunches launches_of(Node const& node, Device const& device) const override
    {
        return prepare(program(), node, device);
    }
};

} // namespace dflash_trt
