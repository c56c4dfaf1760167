// A plugin's fields: int32 and float32 scalars, checked against its program.
#pragma once

#include "program/run_program.h"

#include <NvInferRuntime.h>

#include <cstdint>
#include <vector>

namespace dflash_trt
{

nvinfer1::PluginFieldType field_type(FieldType type) noexcept;

class PluginFields
{
public:
    /// Throws Problem for a field that is unknown, missing, given twice, of another type or length, or out of range.
    PluginFields(Program const& program, nvinfer1::PluginFieldCollection const* given);

    [[nodiscard]] int32_t integer(char const* name) const;

    /// In the program's order.
    [[nodiscard]] std::vector<double> numbers() const;

    /// For serialization; points into this object.
    [[nodiscard]] std::vector<nvinfer1::PluginField> serialized() const;

private:
    union Value
    {
        int32_t integer;
        float real;
    };

    static Value value_of(FieldRule const& rule, nvinfer1::PluginField const& field);

    Rules<FieldRule> mRules;
    std::vector<Value> mValues; // in the order of mRules
};

} // namespace dflash_trt
