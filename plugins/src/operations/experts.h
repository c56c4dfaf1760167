// A mixture of experts behind its router: the launches of dflash_trt/kernels/routing_launch.py and experts_launch.py.
#pragma once

#include "operations/float_type.h"
#include "runtime/device.h"
#include "runtime/prepared_launch.h"

#include <cstddef>
#include <cstdint>

namespace dflash_trt
{

/// One weight of all experts. `form` is the format of its codes, as `packed_product.py` counts them.
struct ExpertMatrix
{
    int64_t form;
    bool has_row_scale;
    int64_t num_input_scales; // of each expert; 0: activations are not quantized; 2: gate and up have one each
    bool has_bias;
    int64_t num_block_rows; // rows of block_scale, of each expert
};

struct ExpertsShape
{
    FloatType type;
    int64_t num_rows; // N
    int64_t hidden_size;
    int64_t ffn_size;    // F
    int64_t num_experts; // that the router knows
    int64_t num_here;    // of this rank
};

struct ExpertsOptions
{
    int64_t first_expert; // of this rank
    int64_t num_chosen;   // of a row
    int64_t routing;      // as `routing.py` counts the kinds
    bool normalizes;
    bool has_choice_bias; // else choice_bias is not read
    int64_t num_groups;   // of adjacent experts, as many each
    int64_t num_chosen_groups;
    int64_t activation;   // as `experts.py` counts them
    bool scales_inputs;   // the router's weights multiply rows of x, and not results
    float routing_scale;
    float limit;
    float alpha;
    ExpertMatrix gate_up;
    ExpertMatrix down;
};

/// Of one row of codes of `in` columns.
int64_t row_bytes(int64_t form, int64_t in, FloatType type);

/// Of one row of block scales, 0 where the form has none; those of FP8 blocks are found by block_rows.
int64_t block_row_bytes(int64_t form, int64_t in);

constexpr int64_t kFp8Blocks = 2; // the form of FP8 codes with a scale for 128 x 128 of them

/// Grows with the rows: the bytes of a shape serve all smaller ones. Throws Problem when the library has no kernels
/// for it.
size_t experts_workspace_bytes(ExpertsShape const& shape, ExpertsOptions const& options);

/// In the order in which they must run. Tensors are those of the contract's Experts, with a workspace of
/// experts_workspace_bytes().
PreparedLaunches prepare_experts(ExpertsShape const& shape, ExpertsOptions const& options, Device const& device);

} // namespace dflash_trt
