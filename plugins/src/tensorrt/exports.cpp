// What TensorRT asks a plugin library for. With getCreators alone it loads nothing, without a word.
#include "tensorrt/collective_plugin.h"
#include "tensorrt/log.h"
#include "tensorrt/plugin_creator.h"
#include "tensorrt/program_plugin.h"

#include <NvInferRuntime.h>

#include <deque>
#include <utility>
#include <vector>

namespace dflash_trt
{
namespace
{

template <typename Plugin>
std::unique_ptr<StepPlugin> make(Program const& program, PluginFields fields, nvinfer1::TensorRTPhase phase)
{
    return std::make_unique<Plugin>(program, std::move(fields), phase);
}

std::deque<PluginCreator> make_creators()
{
    std::deque<PluginCreator> creators; // addresses stay
    for (Program const* program : kPrograms)
    {
        bool const is_collective = collective_named(program->name) != nullptr;
        creators.emplace_back(*program, is_collective ? make<CollectivePlugin> : make<ProgramPlugin>);
    }
    return creators;
}

} // namespace
} // namespace dflash_trt

extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface* const* getCreators(
    int32_t& num_creators) noexcept
{
    static std::deque<dflash_trt::PluginCreator> creators = dflash_trt::make_creators();
    static std::vector<nvinfer1::IPluginCreatorInterface*> const addresses = []
    {
        std::vector<nvinfer1::IPluginCreatorInterface*> found;
        for (dflash_trt::PluginCreator& creator : creators)
        {
            found.push_back(&creator);
        }
        return found;
    }();
    num_creators = static_cast<int32_t>(addresses.size());
    return addresses.data();
}

extern "C" __attribute__((visibility("default"))) void setLoggerFinder(nvinfer1::ILoggerFinder* finder) noexcept
{
    dflash_trt::set_logger_finder(finder);
}
