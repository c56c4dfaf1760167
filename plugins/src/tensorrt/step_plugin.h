// What all plugins of the library have in common: the contract as data, behind TensorRT's interfaces.
#pragma once

#include "program/run_program.h"
#include "runtime/device.h"
#include "runtime/prepared_launch.h"
#include "tensorrt/plugin_fields.h"

#include <NvInferRuntime.h>

#include <memory>
#include <optional>
#include <vector>

namespace dflash_trt
{

/// Types, formats, shapes and fields come from the program. A subclass knows what it runs; it may throw, and every
/// interface function turns that into a log line and TensorRT's own kind of failure.
///
/// A plugin made for building never launches anything. TensorRT may time it, with whatever the memory holds: page
/// numbers and lengths that lead anywhere.
class StepPlugin : public nvinfer1::IPluginV3,
                   public nvinfer1::IPluginV3OneCore,
                   public nvinfer1::IPluginV3OneBuild,
                   public nvinfer1::IPluginV3OneRuntime
{
public:
    StepPlugin(Program const& program, PluginFields fields, nvinfer1::TensorRTPhase phase);

    // IPluginV3
    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
    nvinfer1::IPluginV3* clone() noexcept override;

    // IPluginV3OneCore
    nvinfer1::AsciiChar const* getPluginName() const noexcept override;
    nvinfer1::AsciiChar const* getPluginVersion() const noexcept override;
    nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override;

    // IPluginV3OneBuild
    int32_t getNbOutputs() const noexcept override;
    int32_t getOutputDataTypes(nvinfer1::DataType* types, int32_t num_outputs, nvinfer1::DataType const* input_types,
        int32_t num_inputs) const noexcept override;
    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t num_inputs,
        nvinfer1::DimsExprs const* shape_inputs, int32_t num_shape_inputs, nvinfer1::DimsExprs* outputs,
        int32_t num_outputs, nvinfer1::IExprBuilder& builder) noexcept override;
    bool supportsFormatCombination(int32_t position, nvinfer1::DynamicPluginTensorDesc const* tensors,
        int32_t num_inputs, int32_t num_outputs) noexcept override;
    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t num_inputs,
        nvinfer1::DynamicPluginTensorDesc const* outputs, int32_t num_outputs) noexcept override;
    size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t num_inputs,
        nvinfer1::DynamicPluginTensorDesc const* outputs, int32_t num_outputs) const noexcept override;

    // IPluginV3OneRuntime
    int32_t onShapeChange(nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs,
        nvinfer1::PluginTensorDesc const* outputs, int32_t num_outputs) noexcept override;
    int32_t enqueue(nvinfer1::PluginTensorDesc const* input_descs, nvinfer1::PluginTensorDesc const* output_descs,
        void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept override;
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override;

protected:
    [[nodiscard]] virtual std::unique_ptr<StepPlugin> copy() const = 0;
    /// Throws Problem for sizes that contradict each other, or that no kernel serves.
    [[nodiscard]] virtual size_t workspace_of(Node const& max) const = 0;
    /// Once for a device, with the first shapes: what steps of any shapes may launch.
    virtual void load(Node const& node, Device const& device) const;
    /// All of enqueue for such a node; only addresses change from call to call.
    [[nodiscard]] virtual PreparedLaunches launches_of(Node const& node, Device const& device) const = 0;
    /// One call: the launches that were prepared for inputs of these shapes, or what a subclass does instead.
    virtual void run_prepared(PreparedLaunches const& launches, nvinfer1::PluginTensorDesc const* inputs,
        CallTensors const& tensors, CUstream stream) const;

    [[nodiscard]] PluginFields const& fields() const noexcept { return mFields; }
    [[nodiscard]] Program const& program() const noexcept { return *mProgram; }

private:
    /// The launches of a context's last shapes.
    struct Prepared
    {
        std::vector<nvinfer1::PluginTensorDesc> inputs;
        Device device;
        PreparedLaunches launches;

        [[nodiscard]] bool has_shapes_of(nvinfer1::PluginTensorDesc const* others) const noexcept;
    };

    void prepare_for(nvinfer1::PluginTensorDesc const* inputs);
    void check_counts(int32_t num_inputs, int32_t num_outputs) const;
    /// With the largest shapes of the inputs, after their types and ranks were checked.
    [[nodiscard]] Node max_node(
        nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t num_inputs, int32_t num_outputs) const;
    [[nodiscard]] nvinfer1::IDimensionExpr const* size_of(
        OutputAxis const& axis, nvinfer1::DimsExprs const* inputs, nvinfer1::IExprBuilder& builder) const;

    Program const* mProgram;
    PluginFields mFields;
    nvinfer1::TensorRTPhase mPhase;
    std::optional<Device> mLoaded; // whose kernels are
    std::optional<Prepared> mPrepared;
    std::vector<nvinfer1::PluginField> mSerialized; // what getFieldsToSerialize gave
    nvinfer1::PluginFieldCollection mCollection{};
};

} // namespace dflash_trt
