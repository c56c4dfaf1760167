// The checks of plugin_host, and what they share: a log, counts, and TensorRT's interfaces of a plugin.
#pragma once

#include "fakes.h"
#include "nodes.h"

#include <NvInferRuntime.h>

#include <dlfcn.h>

#include <memory>
#include <string>
#include <vector>

namespace host
{

using Plugin = std::unique_ptr<nvinfer1::IPluginV3>;

extern Logger logger;
extern int num_passed;
extern int num_failed;
extern int32_t (*set_communicator)(void*); // of the library

void expect(bool is_right, std::string const& what);

/// The last thing logged says so; the log is emptied.
void expect_logged(std::string const& part, std::string const& what);

template <typename Function>
Function* find(void* library, char const* name)
{
    auto* const function = reinterpret_cast<Function*>(dlsym(library, name));
    expect(function != nullptr, std::string("symbol ") + name);
    return function;
}

template <typename Capability>
Capability* capability(nvinfer1::IPluginV3& plugin, nvinfer1::PluginCapabilityType type)
{
    return static_cast<Capability*>(plugin.getCapabilityInterface(type));
}

inline auto* core(Plugin const& plugin)
{
    return capability<nvinfer1::IPluginV3OneCore>(*plugin, nvinfer1::PluginCapabilityType::kCORE);
}

inline auto* build(Plugin const& plugin)
{
    return capability<nvinfer1::IPluginV3OneBuild>(*plugin, nvinfer1::PluginCapabilityType::kBUILD);
}

inline auto* runtime(Plugin const& plugin)
{
    return capability<nvinfer1::IPluginV3OneRuntime>(*plugin, nvinfer1::PluginCapabilityType::kRUNTIME);
}

inline int32_t count(std::vector<Tensor> const& tensors)
{
    return static_cast<int32_t>(tensors.size());
}

inline std::vector<nvinfer1::DynamicPluginTensorDesc> dynamic(std::vector<Tensor> const& tensors)
{
    std::vector<nvinfer1::DynamicPluginTensorDesc> descs;
    for (Tensor const& tensor : tensors)
    {
        descs.push_back(tensor.dynamic_desc());
    }
    return descs;
}

inline std::vector<nvinfer1::PluginTensorDesc> concrete(std::vector<Tensor> const& tensors)
{
    std::vector<nvinfer1::PluginTensorDesc> descs;
    for (Tensor const& tensor : tensors)
    {
        descs.push_back(tensor.desc());
    }
    return descs;
}

// host.cpp

nvinfer1::IPluginCreatorV3One* find_creator(void* library, std::string const& name);

// build_checks.cpp

void check_fields(nvinfer1::IPluginCreatorV3One& creator, Node const& node);
Plugin made(nvinfer1::IPluginCreatorV3One& creator, Node const& node, nvinfer1::TensorRTPhase phase);
/// As an engine does: serialize, make again from that, attach a clone to a context, forget the original. Null after an
/// error.
Plugin travelled(nvinfer1::IPluginCreatorV3One& creator, Node const& node);
void check_interfaces(Plugin const& plugin, Node const& node);
void check_shapes(Plugin const& plugin, Node const& node);
void check_types(Plugin const& plugin, Node const& node);
/// Exactly the contract's combinations: each tensor with every type and every format there is.
void check_formats(Plugin const& plugin, Node const& node);
void check_configuration(Plugin const& plugin, Node node);
void check_scales(nvinfer1::IPluginCreatorV3One& creator, Node node);

// run_checks.cpp

/// `plugin` was made for building.
void check_while_building(Plugin const& plugin, Node const& node);
void check_without_driver(Plugin const& plugin, Node const& node);
void check_with_driver(Plugin const& plugin, Node const& node);
/// Needs the stand-ins for the driver and for NCCL.
void check_collective(nvinfer1::IPluginCreatorV3One& creator, Node node);

// launch_times.cpp

/// Prints "NODE us_of_enqueue us_of_onShapeChange".
void time_launches(void* library, nvinfer1::DataType type, int64_t head_dim);

} // namespace host
