// Host time of the plugins' launches. The driver's stand-in does nothing, so that what is timed is the library's work.
#include "checks.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>

namespace host
{
namespace
{

constexpr int64_t kPrefillTokens = 512; // with two requests: verify blocks and a chunk, each with launches of its own
constexpr int kNumBatches = 21;
constexpr int kCallsPerBatch = 200;

/// Of a call, in the median batch.
template <typename Call>
double microseconds(Call const& call)
{
    std::array<double, kNumBatches> batches{};
    for (double& batch : batches)
    {
        auto const start = std::chrono::steady_clock::now();
        for (int i = 0; i < kCallsPerBatch; ++i)
        {
            call(i);
        }
        std::chrono::duration<double, std::micro> const elapsed = std::chrono::steady_clock::now() - start;
        batch = elapsed.count() / kCallsPerBatch;
    }
    std::nth_element(batches.begin(), batches.begin() + kNumBatches / 2, batches.end());
    return batches[kNumBatches / 2];
}

/// `other` is the same node with other shapes.
void time_node(Plugin const& plugin, Node const& node, Node const& other, char const* label)
{
    alignas(256) static unsigned char memory[256];
    std::vector<void const*> const input_addresses(node.inputs.size(), memory);
    std::vector<void*> const output_addresses(node.outputs.size(), memory);
    auto const inputs = concrete(node.inputs);
    auto const other_inputs = concrete(other.inputs);
    auto const outputs = concrete(node.outputs);
    auto const change = [&](std::vector<nvinfer1::PluginTensorDesc> const& to)
    { return runtime(plugin)->onShapeChange(to.data(), count(node.inputs), outputs.data(), count(node.outputs)); };
    auto const enqueue = [&]
    {
        return runtime(plugin)->enqueue(
            inputs.data(), outputs.data(), input_addresses.data(), output_addresses.data(), memory, nullptr);
    };
    // Kernels are loaded here.
    expect(change(other_inputs) == 0 && change(inputs) == 0 && enqueue() == 0, std::string(label) + ": runs");
    double const enqueue_us = microseconds([&](int) { enqueue(); });
    double const change_us = microseconds([&](int i) { change(i % 2 == 0 ? other_inputs : inputs); });
    std::printf("%s %.2f %.2f\n", label, enqueue_us, change_us);
}

} // namespace

void time_launches(void* library, nvinfer1::DataType type, int64_t head_dim)
{
    std::vector<Node> const verify = make_nodes(type, false, head_dim);
    std::vector<Node> const prefill = make_nodes(type, false, head_dim, kPrefillTokens);
    for (size_t i = 0; i < verify.size(); ++i)
    {
        // NCCL's own time; experts and nodes of another library's sizes.
        bool const is_of_tests = verify[i].name == "Experts" || verify[i].is_deterministic();
        if (verify[i].is_collective() || (is_of_tests && type != nvinfer1::DataType::kFLOAT))
        {
            continue;
        }
        Plugin const plugin =
            made(*find_creator(library, verify[i].name), verify[i], nvinfer1::TensorRTPhase::kRUNTIME);
        time_node(plugin, verify[i], prefill[i], verify[i].name.c_str());
        if (i == 0)
        {
            time_node(plugin, prefill[i], verify[i], "AttendPages_with_a_prefill_chunk");
        }
    }
}

} // namespace host
