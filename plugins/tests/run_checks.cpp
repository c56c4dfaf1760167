// What TensorRT asks of a plugin when a context runs.
#include "checks.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <new>
#include <utility>

namespace
{
size_t num_allocations = 0;
} // namespace

// Those of the library as well: it has no operator of its own.
void* operator new(size_t num_bytes)
{
    ++num_allocations;
    if (void* const memory = std::malloc(num_bytes))
    {
        return memory;
    }
    throw std::bad_alloc();
}

void operator delete(void* memory) noexcept
{
    std::free(memory);
}

void operator delete(void* memory, size_t) noexcept
{
    std::free(memory);
}

namespace host
{
namespace
{

/// As in fake_driver.cpp, up to what is read here.
struct FakeLaunch
{
    void const* image;
    char const* entry;
    unsigned int grid[3];
};

size_t num_launches = 0;
unsigned int first_grid_x = 0;
unsigned int last_grid_x = 0;

void count_launch(void const* launch)
{
    last_grid_x = static_cast<FakeLaunch const*>(launch)->grid[0];
    if (num_launches++ == 0)
    {
        first_grid_x = last_grid_x;
    }
}

struct Execution
{
    Node node;
    std::vector<nvinfer1::PluginTensorDesc> inputs = concrete(node.inputs);
    std::vector<nvinfer1::PluginTensorDesc> outputs = concrete(node.outputs);
    alignas(256) unsigned char memory[32][512] = {};
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

/// Launches are kept for the last shapes: others must not run with them, even if onShapeChange was not called.
void check_other_shapes(Plugin const& plugin, Node const& node)
{
    for (int64_t const num_tokens : {kTokens + 1, kTokens})
    {
        for (Node const& other : make_nodes(node.inputs.front().type, false, kHeadDim, num_tokens))
        {
            bool const is_sampling = node.name == "SampleAndAccept" || node.name == "ScoreRows" || node.name == "DraftTokens";
            if (other.name != node.name || is_sampling || node.is_tiled()) // where T launches nothing of its own
            {
                continue;
            }
            num_launches = 0;
            expect(Execution(other).enqueue(plugin) == 0, node.name + ": runs with other shapes");
            unsigned int const grid_x = node.name == "Experts" ? last_grid_x : first_grid_x; // of a program per row
            expect(grid_x == num_tokens, node.name + ": launches for the shapes of the call");
        }
    }
}

struct UniqueId
{
    char internal[128];
};

/// A communicator of a single rank, never destroyed.
void* world_of_one()
{
    void* const nccl = dlopen("libnccl.so.2", RTLD_NOW);
    UniqueId id{};
    void* communicator = nullptr;
    expect(find<int(UniqueId*)>(nccl, "ncclGetUniqueId")(&id) == 0, "a unique id");
    expect(find<int(void**, int, UniqueId, int)>(nccl, "ncclCommInitRank")(&communicator, 1, id, 0) == 0, "a world");
    return communicator;
}

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
    set_callback(count_launch);
    Execution execution(node);
    size_t allocations = num_allocations;
    bool const is_ready = execution.prepare(plugin) == 0;
    bool const are_counted = num_allocations > allocations;
    expect(is_ready, node.name + ": gets ready");
    expect(are_counted, node.name + ": allocations of the library are counted");
    int const loads_before = num_loads();
    num_launches = 0;
    allocations = num_allocations;
    int32_t const result = execution.enqueue(plugin);
    bool const has_allocated = num_allocations > allocations;
    expect(!has_allocated, node.name + ": searches and makes nothing while it runs");
    expect(result == 0, node.name + ": runs");
    expect(num_launches == node.num_launches, node.name + ": " + std::to_string(num_launches) + " launches");
    expect(num_loads() == loads_before, node.name + ": loads nothing while it runs");
    check_other_shapes(plugin, node);
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

void check_collective(nvinfer1::IPluginCreatorV3One& creator, Node node)
{
    Plugin const of_three = made(creator, node, nvinfer1::TensorRTPhase::kRUNTIME);
    Execution refused(node);
    expect(refused.prepare(of_three) != 0, node.name + ": refuses to be without a communicator");
    expect_logged("communicator: expected one of 3 ranks, found none", node.name);
    expect(refused.enqueue(of_three) != 0, node.name + ": does not run without a communicator");
    expect_logged("communicator", node.name);

    node.fields = {{"num_ranks", 1}};
    if (node.inputs[0].sizes.size() == 3)
    {
        node.inputs[0].sizes[0] = 1; // a part for each rank
    }
    Plugin const alone = made(creator, node, nvinfer1::TensorRTPhase::kRUNTIME);
    void* const communicator = world_of_one();
    expect(set_communicator(communicator) == 0, node.name + ": takes a communicator");
    expect(refused.prepare(of_three) != 0, node.name + ": refuses a communicator of another world");
    expect_logged("found one of 1", node.name);
    Execution execution(node);
    expect(execution.prepare(alone) == 0, node.name + ": gets ready");
    auto* const given = static_cast<float*>(static_cast<void*>(execution.memory[0]));
    size_t const num_floats = static_cast<size_t>(kTokens * kHeadDim);
    for (size_t i = 0; i < num_floats; ++i)
    {
        given[i] = static_cast<float>(i) + 0.5F;
    }
    expect(execution.enqueue(alone) == 0, node.name + ": runs");
    auto const* const found = static_cast<float const*>(execution.output_addresses[0]);
    expect(std::equal(given, given + num_floats, found), node.name + ": of one rank gives what it got");
    expect(set_communicator(nullptr) == 0, node.name + ": forgets the communicator");
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
