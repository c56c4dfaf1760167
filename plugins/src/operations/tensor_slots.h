// The tensors of an operation by their contract's names.
#pragma once

#include "contract/contract.h"
#include "runtime/call_tensors.h"

namespace dflash_trt
{

/// Throws Problem for a name that is not in the contract.
TensorSlot input_slot(PluginContract const& contract, char const* name);
TensorSlot output_slot(PluginContract const& contract, char const* name);

} // namespace dflash_trt
