#pragma once

#include "kernels.h"
#include "simd.h"

namespace dflash_trt
{

/// RMSNorm of one row; `out` may be `x`.
void norm_row(float const* x, float const* weight, int64_t width, float eps, float* out);

/// All heads of one row, normed and rotated; `out` may be `x`.
void rotate_row(DflashTrtRotation const& rotation, int64_t row, float const* x, int64_t num_heads, int64_t head_dim, float* out);

} // namespace dflash_trt
