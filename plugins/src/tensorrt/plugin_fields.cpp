#include "tensorrt/plugin_fields.h"

#include "runtime/problem.h"

#include <optional>
#include <string>

namespace dflash_trt
{
namespace
{

constexpr char kMend[] = "Build the plugin library from the same version of dflash-trt.";

std::string names_of(Rules<FieldRule> const& rules)
{
    std::string names;
    for (FieldRule const& rule : rules)
    {
        names += (names.empty() ? "" : ", ") + std::string(rule.name);
    }
    return names.empty() ? "none" : names;
}

int32_t index_of(Rules<FieldRule> const& rules, char const* name)
{
    for (int32_t i = 0; name != nullptr && i < rules.count; ++i)
    {
        if (std::string_view(rules[i].name) == name)
        {
            return i;
        }
    }
    throw Problem("fields", names_of(rules), name != nullptr ? name : "a field without a name", kMend);
}

} // namespace

nvinfer1::PluginFieldType field_type(FieldType type) noexcept
{
    return type == FieldType::kInt32 ? nvinfer1::PluginFieldType::kINT32 : nvinfer1::PluginFieldType::kFLOAT32;
}

PluginFields::Value PluginFields::value_of(FieldRule const& rule, nvinfer1::PluginField const& field)
{
    if (field.type != field_type(rule.type) || field.length != 1 || field.data == nullptr)
    {
        throw Problem(std::string("field ") + rule.name, rule.type == FieldType::kInt32 ? "one int32" : "one float32",
            std::to_string(field.length) + " of type " + std::to_string(static_cast<int32_t>(field.type)), kMend);
    }
    Value value{};
    double number = 0.0;
    if (rule.type == FieldType::kInt32)
    {
        number = value.integer = *static_cast<int32_t const*>(field.data);
    }
    else
    {
        number = value.real = *static_cast<float const*>(field.data);
    }
    check_field(rule, number);
    return value;
}

PluginFields::PluginFields(Program const& program, nvinfer1::PluginFieldCollection const* given)
    : mRules(program.fields)
{
    std::vector<std::optional<Value>> values(static_cast<size_t>(mRules.count));
    for (int32_t i = 0; given != nullptr && i < given->nbFields; ++i)
    {
        nvinfer1::PluginField const& field = given->fields[i];
        int32_t const index = index_of(mRules, field.name);
        auto& value = values[static_cast<size_t>(index)];
        if (value.has_value())
        {
            throw Problem(std::string("field ") + field.name, "one value", "two", kMend);
        }
        value = value_of(mRules[index], field);
    }
    for (int32_t i = 0; i < mRules.count; ++i)
    {
        auto const& value = values[static_cast<size_t>(i)];
        if (!value.has_value())
        {
            throw Problem("fields", names_of(mRules), std::string("no ") + mRules[i].name, kMend);
        }
        mValues.push_back(*value);
    }
}

int32_t PluginFields::integer(char const* name) const
{
    return mValues[static_cast<size_t>(index_of(mRules, name))].integer;
}

std::vector<double> PluginFields::numbers() const
{
    std::vector<double> numbers;
    for (int32_t i = 0; i < mRules.count; ++i)
    {
        Value const& value = mValues[static_cast<size_t>(i)];
        numbers.push_back(mRules[i].type == FieldType::kInt32 ? value.integer : static_cast<double>(value.real));
    }
    return numbers;
}

std::vector<nvinfer1::PluginField> PluginFields::serialized() const
{
    std::vector<nvinfer1::PluginField> fields;
    for (int32_t i = 0; i < mRules.count; ++i)
    {
        // A union starts where its members do.
        fields.emplace_back(mRules[i].name, &mValues[static_cast<size_t>(i)], field_type(mRules[i].type), 1);
    }
    return fields;
}

} // namespace dflash_trt
