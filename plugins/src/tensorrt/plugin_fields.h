// A plugin's fields: int32 scalars, checked against its contract.
#pragma once

#include "contract/contract.h"

#include <NvInferRuntime.h>

#include <cstdint>
#include <string_view>
#include <vector>

namespace dflash_trt
{

class PluginFields
{
public:
    /// Throws Problem for a field that is unknown, missing, given twice, of another type or length, or out of range.
    PluginFields(PluginContract const& contract, nvinfer1::PluginFieldCollection const* given);

    [[nodiscard]] int32_t operator[](std::string_view name) const;

    /// For serialization; points into this object.
    [[nodiscard]] std::vector<nvinfer1::PluginField> serialized() const;

private:
    Rules<FieldRule> mRules;
    std::vector<int32_t> mValues; // in the order of mRules
};

} // namespace dflash_trt
