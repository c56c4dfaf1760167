// Sizes of a node's tensors that follow from each other.
#pragma once

#include "runtime/problem.h"

#include <cstdint>
#include <string>

namespace dflash_trt
{

/// Throws Problem for another one.
inline void expect_size(char const* tensor, int64_t found, int64_t expected)
{
    if (found != expected)
    {
        throw Problem(tensor, std::to_string(expected) + " along an axis", std::to_string(found),
            "Shapes stand in plugins/README.md.");
    }
}

} // namespace dflash_trt
