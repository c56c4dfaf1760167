// A plugin's fields: int32 and float32 scalars, checked against its contract.
#pragma once

#include "contract/contract.h"

#include <NvInferRuntime.h>

#include <cstdint>
#include <string_view>
#include <vector>

namespace dflash_trt
{

nvinfer1::PluginFieldType field_type(FieldType type) noexcept;

class PluginFields
{
public:
    /// Throws Problem for a field that is unknown, missing, given twice, of another type or length, or out of range.
    PluginFields(PluginContract const& contract, nvinfer1::PluginFieldCollection const* given);

    [[nodiscard]] int32_t integer(std::string_view name) const;
    [[nodiscard]] float real(std::string_view name) const;

    /// For serialization; points into this object.
    [[nodiscard]] std::vector<nvinfer1::PluginField> serialized() const;

private:
    union Value
    {
        int32_t integer;
        float real;
    };

    static Value value_of(FieldRule const& rule, nvinfer1::PluginField const& field);
    [[nodiscard]] Value const& find(std::string_view name, FieldType type) const;

    Rules<FieldRule> mRules;
    std::vector<Value> mValues; // in the order of mRules
};

} // namespace dflash_trt
