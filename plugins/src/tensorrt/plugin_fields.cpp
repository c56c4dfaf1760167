#include "tensorrt/plugin_fields.h"

#include "runtime/problem.h"

#include <cassert>
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

int32_t value_of(FieldRule const& rule, nvinfer1::PluginField const& field)
{
    if (field.type != nvinfer1::PluginFieldType::kINT32 || field.length != 1 || field.data == nullptr)
    {
        throw Problem(std::string("field ") + rule.name, "one int32",
            std::to_string(field.length) + " of type " + std::to_string(static_cast<int32_t>(field.type)), kMend);
    }
    int32_t const value = *static_cast<int32_t const*>(field.data);
    if (value < rule.min || value > rule.max)
    {
        throw Problem(std::string("field ") + rule.name, std::to_string(rule.min) + " to " + std::to_string(rule.max),
            std::to_string(value), kMend);
    }
    return value;
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

PluginFields::PluginFields(PluginContract const& contract, nvinfer1::PluginFieldCollection const* given)
    : mRules(contract.fields)
{
    std::vector<std::optional<int32_t>> values(static_cast<size_t>(mRules.count));
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

int32_t PluginFields::operator[](std::string_view name) const
{
    for (int32_t i = 0; i < mRules.count; ++i)
    {
        if (name == mRules[i].name)
        {
            return mValues[static_cast<size_t>(i)];
        }
    }
    assert(false && "a field outside the contract");
    return 0;
}

std::vector<nvinfer1::PluginField> PluginFields::serialized() const
{
    std::vector<nvinfer1::PluginField> fields;
    for (int32_t i = 0; i < mRules.count; ++i)
    {
        fields.emplace_back(mRules[i].name, &mValues[static_cast<size_t>(i)], nvinfer1::PluginFieldType::kINT32, 1);
    }
    return fields;
}

} // namespace dflash_trt
