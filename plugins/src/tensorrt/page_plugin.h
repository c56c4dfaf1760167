// What the plugins that hold K/V pages have in common.
#pragma once

#include "operations/page_geometry.h"
#include "operations/step_operations.h"
#include "tensorrt/step_plugin.h"

namespace dflash_trt
{

class PagePlugin : public StepPlugin
{
public:
    using StepPlugin::StepPlugin;

protected:
    /// Of the pages input. Throws Problem when pages contradict the page_size field.
    [[nodiscard]] PageGeometry geometry(nvinfer1::Dims const* inputs, ElementTypes types) const;
    /// T, R and P; block_rows is left 0.
    [[nodiscard]] StepShape step_shape(nvinfer1::Dims const* inputs) const;
    /// Throws Problem unless rows are [any, heads, D], of the pages' kv_heads when `heads` is 0; returns the heads.
    int64_t check_rows(
        nvinfer1::Dims const* inputs, char const* name, PageGeometry const& geometry, int64_t heads) const;
};

} // namespace dflash_trt
