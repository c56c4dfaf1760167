// What the plugins that find K/V pages by address have in common.
#pragma once

#include "operations/page_geometry.h"
#include "operations/step_operations.h"
#include "tensorrt/step_plugin.h"

namespace dflash_trt
{

class PagePlugin : public StepPlugin
{
public:
    /// `stored` names the input of the rows that are written as K.
    PagePlugin(PluginContract const& contract, PluginFields fields, nvinfer1::TensorRTPhase phase, char const* stored);

protected:
    /// Of the stored rows and the fields. Throws Problem for what no kernel serves.
    [[nodiscard]] PageGeometry geometry(nvinfer1::Dims const* inputs, FloatType type) const;
    /// T, R and P; block_rows is left 0.
    [[nodiscard]] StepShape step_shape(nvinfer1::Dims const* inputs) const;
    /// Throws Problem unless rows are [any, heads, D], of the pages' kv_heads when `heads` is 0; returns the heads.
    int64_t check_rows(
        nvinfer1::Dims const* inputs, char const* name, PageGeometry const& geometry, int64_t heads) const;

private:
    char const* mStored;
};

} // namespace dflash_trt
