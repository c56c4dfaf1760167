#include "dflash_trt_kernels.h"

#include "operations/collective.h"
#include "program/run_program.h"
#include "runtime/embedded_kernel.h"
#include "runtime/problem.h"

#include <algorithm>
#include <exception>
#include <string>

namespace dflash_trt
{
namespace
{

thread_local std::string last_error;

/// Runs `call`; an exception becomes the thread's last error.
template <typename Call>
int32_t guarded(Call const& call) noexcept
{
    try
    {
        call();
        return 0;
    }
    catch (std::exception const& error)
    {
        last_error = error.what();
    }
    return 1;
}

template <typename T>
T const& required(T const* argument)
{
    if (argument == nullptr)
    {
        throw Problem("argument", "an address", "null", "Pass shape and buffers.");
    }
    return *argument;
}

FloatType float_type(int32_t type)
{
    if (type < DFLASH_TRT_FLOAT32 || type > DFLASH_TRT_BFLOAT16)
    {
        throw Problem(
            "float_type", "0 (float32), 1 (float16) or 2 (bfloat16)", std::to_string(type), "Convert the tensors.");
    }
    return static_cast<FloatType>(type);
}

Program const& program_of(char const* name)
{
    std::string const wanted = name == nullptr ? "" : name;
    for (Program const* program : kPrograms)
    {
        if (program->name == wanted)
        {
            return *program;
        }
    }
    throw Problem("plugin", "a name that dflash_trt_contract() lists", wanted, "Names are those of plugins/README.md.");
}

Node node_of(Program const& program, dflash_trt_node const& given)
{
    Node node{float_type(given.float_type), {}, {}};
    for (int32_t i = 0; i < program.inputs.count; ++i)
    {
        Shape shape{program.inputs[i].axes.count, {}};
        std::copy_n(&required(required(given.shapes + i)), shape.rank, shape.sizes.begin());
        node.shapes.push_back(shape);
    }
    node.fields.assign(given.fields, given.fields + program.fields.count);
    return node;
}

CollectiveShape collective_of(dflash_trt_collective_shape const& shape)
{
    return {float_type(shape.float_type), shape.num_ranks, shape.num_elements};
}

} // namespace
} // namespace dflash_trt

using namespace dflash_trt; // the functions of this file have C names

int32_t dflash_trt_workspace(dflash_trt_node const* node, size_t* num_bytes)
{
    return guarded(
        [&]
        {
            Program const& program = program_of(required(node).plugin);
            *num_bytes = workspace_bytes(program, node_of(program, *node));
        });
}

int32_t dflash_trt_run(dflash_trt_node const* node, void const* const* inputs, void* const* outputs, void* workspace,
    dflash_trt_stream stream)
{
    return guarded(
        [&]
        {
            Program const& program = program_of(required(node).plugin);
            run(prepare(program, node_of(program, *node), Device::current()), {inputs, outputs, workspace}, stream);
        });
}

int32_t dflash_trt_set_communicator(void* communicator)
{
    return guarded([&] { set_communicator(communicator); });
}

int32_t dflash_trt_all_reduce(
    dflash_trt_collective_shape const* shape, void const* x, void* summed, dflash_trt_stream stream)
{
    return guarded([&] { all_reduce(collective_of(required(shape)), x, summed, stream); });
}

int32_t dflash_trt_all_gather(
    dflash_trt_collective_shape const* shape, void const* x, void* gathered, dflash_trt_stream stream)
{
    return guarded([&] { all_gather(collective_of(required(shape)), x, gathered, stream); });
}

int32_t dflash_trt_reduce_scatter(
    dflash_trt_collective_shape const* shape, void const* x, void* summed, dflash_trt_stream stream)
{
    return guarded([&] { reduce_scatter(collective_of(required(shape)), x, summed, stream); });
}

int32_t dflash_trt_all_to_all(
    dflash_trt_collective_shape const* shape, void const* x, void* received, dflash_trt_stream stream)
{
    return guarded([&] { all_to_all(collective_of(required(shape)), x, received, stream); });
}

char const* dflash_trt_last_error()
{
    return last_error.c_str();
}

char const* dflash_trt_architectures()
{
    static std::string const listed = embedded_kernels().architectures();
    return listed.c_str();
}

char const* dflash_trt_manifest_sha256()
{
    return embedded_kernels().manifest_sha256;
}

char const* dflash_trt_contract()
{
    return kContract;
}
