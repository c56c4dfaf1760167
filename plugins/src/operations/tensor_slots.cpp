#include "operations/tensor_slots.h"

#include "runtime/problem.h"

#include <string>
#include <string_view>

namespace dflash_trt
{
namespace
{

template <typename Rule>
TensorSlot slot_in(PluginContract const& contract, Rules<Rule> const& rules, TensorSource source, char const* name)
{
    for (int32_t i = 0; i < rules.count; ++i)
    {
        if (std::string_view(rules[i].name) == name)
        {
            return {source, i, 0};
        }
    }
    throw Problem(contract.name, std::string("a tensor ") + name, "none in its contract",
        "The operation and src/contract are of different versions: build the library again.");
}

} // namespace

TensorSlot input_slot(PluginContract const& contract, char const* name)
{
    return slot_in(contract, contract.inputs, TensorSource::kInput, name);
}

TensorSlot output_slot(PluginContract const& contract, char const* name)
{
    return slot_in(contract, contract.outputs, TensorSource::kOutput, name);
}

} // namespace dflash_trt
