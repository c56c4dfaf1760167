// Uses the plugin library as TensorRT would, without TensorRT: `plugin_host LIBRARY none|fake|times|small_times`.
// But for `none`, libcuda.so.1 must be the stand-in of fake_driver.cpp. Prints a line for each check that fails, and
// counts; for times (of bfloat16 and head_dim 128, or of what the library of the tests has) a line for each node.
#include "checks.h"

#include <cstdio>

namespace host
{

Logger logger;
int num_passed = 0;
int num_failed = 0;
int32_t (*set_communicator)(void*) = nullptr;

void expect(bool is_right, std::string const& what)
{
    ++(is_right ? num_passed : num_failed);
    if (!is_right)
    {
        std::printf("FAILED %s\n", what.c_str());
    }
}

void expect_logged(std::string const& part, std::string const& what)
{
    bool const is_there = !logger.lines.empty() && logger.lines.back().rfind("error: ", 0) == 0
        && logger.lines.back().find(part) != std::string::npos;
    expect(is_there,
        what + ": a log line with '" + part + "', found '" + (logger.lines.empty() ? "nothing" : logger.lines.back())
            + "'");
    logger.lines.clear();
}

nvinfer1::IPluginCreatorV3One* find_creator(void* library, std::string const& name)
{
    int32_t num_creators = 0;
    auto* const get = find<nvinfer1::IPluginCreatorInterface* const*(int32_t&)>(library, "getCreators");
    nvinfer1::IPluginCreatorInterface* const* creators = get(num_creators);
    auto const num_nodes = static_cast<int32_t>(make_nodes(nvinfer1::DataType::kFLOAT, false).size());
    expect(num_creators == num_nodes, "a creator of each node");
    for (int32_t i = 0; i < num_creators; ++i)
    {
        nvinfer1::InterfaceInfo const info = creators[i]->getInterfaceInfo();
        expect(std::string(info.kind) == "PLUGIN CREATOR_V3ONE" && info.major == 1, "a creator of interface V3ONE");
        auto* const creator = static_cast<nvinfer1::IPluginCreatorV3One*>(creators[i]);
        if (creator->getPluginName() == name)
        {
            expect(std::string(creator->getPluginNamespace()) == "dflash_trt", name + ": namespace");
            expect(std::string(creator->getPluginVersion()) == "3", name + ": version");
            return creator;
        }
    }
    expect(false, name + ": a creator");
    return nullptr;
}

namespace
{

constexpr int64_t kServedHeadDim = 128;

LoggerFinder logger_finder(logger);

void check_node(void* library, Node const& node, bool has_driver, bool has_kernels)
{
    nvinfer1::IPluginCreatorV3One* const creator = find_creator(library, node.name);
    if (creator == nullptr)
    {
        return;
    }
    check_fields(*creator, node);
    Plugin const plugin = travelled(*creator, node);
    if (plugin == nullptr)
    {
        return;
    }
    check_interfaces(plugin, node);
    check_shapes(plugin, node);
    check_types(plugin, node);
    check_formats(plugin, node);
    if (!has_kernels)
    {
        return;
    }
    check_configuration(plugin, node);
    check_scales(*creator, node);
    check_while_building(made(*creator, node, nvinfer1::TensorRTPhase::kBUILD), node);
    if (has_driver && node.is_collective())
    {
        check_collective(*creator, node);
        return;
    }
    (has_driver ? check_with_driver : check_without_driver)(plugin, node);
}

} // namespace

void check_library(void* library, bool has_driver)
{
    for (nvinfer1::DataType const type :
        {nvinfer1::DataType::kFLOAT, nvinfer1::DataType::kHALF, nvinfer1::DataType::kBF16})
    {
        for (bool const has_fp8_pages : {false, true})
        {
            for (Node const& node : make_nodes(type, has_fp8_pages))
            {
                // The library of the tests has kernels of float32 alone.
                check_node(library, node, has_driver, type == nvinfer1::DataType::kFLOAT);
            }
        }
    }
}

int use_library(char const* path, std::string const& use)
{
    void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
    {
        std::fprintf(stderr, "error: %s\n", dlerror());
        return 2;
    }
    find<void(nvinfer1::ILoggerFinder*)>(library, "setLoggerFinder")(&logger_finder);
    set_communicator = find<int32_t(void*)>(library, "dflash_trt_set_communicator");
    if (use == "times")
    {
        time_launches(library, nvinfer1::DataType::kBF16, kServedHeadDim);
    }
    else if (use == "small_times")
    {
        time_launches(library, nvinfer1::DataType::kFLOAT, kHeadDim);
    }
    else
    {
        check_library(library, use == "fake");
        std::printf("TensorRT headers %d.%d\n", NV_TENSORRT_MAJOR, NV_TENSORRT_MINOR);
        std::printf("%d passed, %d failed\n", num_passed, num_failed);
    }
    return num_failed == 0 ? 0 : 1;
}

} // namespace host

int main(int num_arguments, char** arguments)
{
    if (num_arguments != 3)
    {
        std::fprintf(stderr, "usage: plugin_host LIBRARY none|fake|times|small_times\n");
        return 2;
    }
    return host::use_library(arguments[1], arguments[2]);
}
