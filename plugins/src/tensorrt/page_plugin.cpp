#include "tensorrt/page_plugin.h"

#include "runtime/problem.h"

#include <string>
#include <utility>

namespace dflash_trt
{
namespace
{

std::string shape_of(nvinfer1::Dims const& dims)
{
    std::string shape = "[";
    for (int32_t i = 0; i < dims.nbDims; ++i)
    {
        shape += (i > 0 ? ", " : "") + std::to_string(dims.d[i]);
    }
    return shape + "]";
}

} // namespace

PagePlugin::PagePlugin(
    PluginContract const& contract, PluginFields fields, nvinfer1::TensorRTPhase phase, char const* stored)
    : StepPlugin(contract, std::move(fields), phase), mStored(stored)
{
}

PageGeometry PagePlugin::geometry(nvinfer1::Dims const* inputs, FloatType type) const
{
    nvinfer1::Dims const& rows = inputs[input_index(mStored)];
    ElementTypes const types{type, static_cast<PageType>(fields().integer("page_type"))};
    PageGeometry const found{types, rows.d[1], rows.d[2], fields().integer("page_size"), fields().real("k_scale"),
        fields().real("v_scale"), fields().integer("state")};
    found.check();
    return found;
}

StepShape PagePlugin::step_shape(nvinfer1::Dims const* inputs) const
{
    nvinfer1::Dims const& page_table = inputs[input_index("page_table")];
    return {inputs[input_index("positions")].d[0], page_table.d[0], 0, page_table.d[1]};
}

int64_t PagePlugin::check_rows(
    nvinfer1::Dims const* inputs, char const* name, PageGeometry const& geometry, int64_t heads) const
{
    nvinfer1::Dims const& rows = inputs[input_index(name)];
    bool const is_multiple = rows.nbDims == 3 && rows.d[1] > 0 && rows.d[1] % geometry.kv_heads == 0;
    if (!is_multiple || rows.d[2] != geometry.head_dim || (heads != 0 && rows.d[1] != heads))
    {
        std::string const wanted =
            heads != 0 ? std::to_string(heads) : "a multiple of " + std::to_string(geometry.kv_heads);
        throw Problem(name, "[rows, " + wanted + ", " + std::to_string(geometry.head_dim) + "]", shape_of(rows),
            "Rows and pages must be of the same heads.");
    }
    return rows.d[1];
}

} // namespace dflash_trt
