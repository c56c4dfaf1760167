// From a program to launches.
#pragma once

#include "program/program.h"
#include "runtime/device.h"
#include "runtime/float_type.h"
#include "runtime/prepared_launch.h"

#include <cstddef>
#include <vector>

namespace dflash_trt
{

/// What a node is made with and given, but for addresses.
struct Node
{
    FloatType type;
    std::vector<Shape> shapes;  // of the inputs, in the program's order
    std::vector<double> fields; // in the program's order
};

/// Throws Problem unless it is in its range.
void check_field(FieldRule const& rule, double value);

/// Of steps of up to these shapes, on any GPU. Throws Problem for shapes that contradict each other, and when the
/// library has no kernels for them.
size_t workspace_bytes(Program const& program, Node const& max);

/// In the order in which they must run. Tensors are the program's, with a workspace of workspace_bytes().
PreparedLaunches prepare(Program const& program, Node const& node, Device const& device);

/// Those of other steps' shapes, too: a step that is captured into a graph cannot load.
void load_kernels(Program const& program, Node const& node, Device const& device);

} // namespace dflash_trt
