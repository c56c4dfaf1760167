// NCCL's collectives over all ranks, as alternatives to TensorRT's own layer.
#pragma once

#include "operations/collective.h"
#include "tensorrt/step_plugin.h"

#include <string_view>

namespace dflash_trt
{

using Collective = void (*)(CollectiveShape const& shape, void const* given, void* made, CUstream stream);

/// That of a program's name; null for programs that are no collectives.
[[nodiscard]] Collective collective_named(std::string_view program) noexcept;

/// Its program is one of a collective.
class CollectivePlugin final : public StepPlugin
{
public:
    using StepPlugin::StepPlugin;

private:
    [[nodiscard]] int64_t num_ranks() const { return fields().integer("num_ranks"); }

    [[nodiscard]] std::unique_ptr<StepPlugin> copy() const override { return std::make_unique<CollectivePlugin>(*this); }
    [[nodiscard]] size_t workspace_of(Node const&) const override { return 0; }
    /// No launches: NCCL makes its own.
    [[nodiscard]] PreparedLaunches launches_of(Node const& node, Device const& device) const override;
    void run_prepared(PreparedLaunches const& launches, nvinfer1::PluginTensorDesc const* inputs,
        CallTensors const& tensors, CUstream stream) const override;
};

} // namespace dflash_trt
