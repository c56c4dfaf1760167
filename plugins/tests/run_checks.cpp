// What TensorRT asks of a plugin when a context runs.
#include "checks.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace host
{
namespace
{

size_t num_launches = 0;

struct Execution
{
    Node node;
    std::vector<nvinfer1::PluginTensorDesc> inputs = concrete(node.inputs);
    std::vector<nvinfer1::PluginTensorDesc> outputs = concrete(node.outputs);
    alignas(256) unsigned char memory[32][256] = {};
    std::vector<void const*> input_addresses;
    std::vector<void*> output_addresses;

    explicit Execution(Node given) : node(std::move(given))
    {
        size_t next = 0;
        std::generate_n(std::back_inserter(input_addresses), node.inputs.size(), [&] { return memory[next++]; });
        std::generate_n(std::back_inserter(output_addresses), node.outputs.size(), [&] { return memory[next++]; });
    }

    int32_t prepare(Plugin const& plugin)
    {
        return runtime(plugin)->onShapeChange(inputs.data(), count(node.inputs), outputs.data(), count(node.outputs));
    }

    int32_t enqueue(Plugin const& plugin)
    {
        return runtime(plugin)->enqueue(
            inputs.data(), outputs.data(), input_addresses.data(), output_addresses.data(), memory[31], nullptr);
    }
};

} // namespace

void check_without_driver(Plugin const& plugin, Node const& node)
{
    Execution execution(node);
    expect(execution.prepare(plugin) != 0, node.name + ": onShapeChange fails without a driver");
    expect_logged("libcuda.so.1", node.name);
    expect(execution.enqueue(plugin) != 0, node.name + ": enqueue fails without a driver");
    expect_logged("libcuda.so.1", node.name);
}

void check_with_driver(Plugin const& plugin, Node const& node)
{
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
    auto* const num_loads = find<int()>(driver, "fake_num_loads");
    auto* const set_device = find<void(int, int, int)>(driver, "fake_set_device");
    auto* const set_callback = find<void(void (*)(void const*))>(driver, "fake_set_callback");
    set_callback([](void const*) { ++num_launches; });
    Execution execution(node);
    expect(execution.prepare(plugin) == 0, node.name + ": gets ready");
    int const loads_before = num_loads();
    num_launches = 0;
    expect(execution.enqueue(plugin) == 0, node.name + ": runs");
    expect(num_launches == node.num_launches, node.name + ": " + std::to_string(num_launches) + " launches");
    expect(num_loads() == loads_before, node.name + ": loads nothing while it runs");
    if (!logger.lines.empty())
    {
        expect(false, logger.lines.back());
    }
    execution.input_addresses[0] = execution.memory[0] + 2;
    expect(execution.enqueue(plugin) != 0, node.name + ": refuses an odd address");
    expect_logged("multiple of 16", node.name);
    set_device(7, 5, 68);
    expect(execution.prepare(plugin) != 0, node.name + ": refuses a GPU it has no kernels for");
    expect_logged("compute capability 7.5", node.name);
    set_device(9, 0, 132);
}

void check_while_building(Plugin const& plugin, Node const& node)
{
    num_launches = 0;
    Execution execution(node);
    // What TensorRT times a plugin with: memory that holds anything, here odd addresses as well.
    std::fill(execution.input_addresses.begin(), execution.input_addresses.end(), execution.memory[0] + 1);
    expect(execution.enqueue(plugin) == 0, node.name + ": succeeds while an engine is built");
    expect(num_launches == 0, node.name + ": launches nothing while an engine is built");
    logger.lines.clear();
}

} // namespace host
