/// What is computed row by row: norms, rotary embedding, the activation of an MLP.
#include "rows.h"

#include <cmath>

namespace dflash_trt
{
namespace
{

float sum_of_squares(float const* x, int64_t width)
{
    Vec squares = broadcast(0.0F);
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes)
    {
        Vec const values = load(x + i);
        squares = fma(values, values, squares);
    }
    float total = sum(squares);
    for (; i < width; ++i)
    {
        total += x[i] * x[i];
    }
    return total;
}

float silu(float x)
{
    return x / (1.0F + std::exp(-x));
}

} // namespace

void norm_row(float const* x, float const* weight, int64_t width, float eps, float* out)
{
    float const factor = 1.0F / std::sqrt(sum_of_squares(x, width) / static_cast<float>(width) + eps);
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes)
    {
        store(out + i, load(x + i) * broadcast(factor) * load(weight + i));
    }
    for (; i < width; ++i)
    {
        out[i] = x[i] * factor * weight[i];
    }
}

void rotate_head(float const* x, float const* cos, float const* sin, int64_t head_dim, float* out)
{
    int64_t const half = head_dim / 2;
    for (int64_t i = 0; i < half; ++i)
    {
        float const low = x[i], high = x[half + i];
        out[i] = low * cos[i] - high * sin[i];
        out[half + i] = high * cos[half + i] + low * sin[half + i];
    }
}

void rotate_row(DflashTrtRotation const& rotation, int64_t row, float const* x, int64_t num_heads, int64_t head_dim, float* out)
{
    int64_t const start = rotation.positions[row] * head_dim;
    for (int64_t head = 0; head < num_heads; ++head)
    {
        float const* from = x + head * head_dim;
        float* const to = out + head * head_dim;
        if (rotation.norm != nullptr)
        {
            norm_row(from, rotation.norm + head * rotation.norm_stride, head_dim, rotation.eps, to);
            from = to;
        }
        rotate_head(from, rotation.cos + start, rotation.sin + start, head_dim, to);
    }
}

} // namespace dflash_trt

using namespace dflash_trt;

void dflash_trt_cpu_rms_norm(float const* x, int64_t num_rows, int64_t width, float const* weight, int64_t num_weights,
    float eps, float* out)
{
    for (int64_t row = 0; row < num_rows; ++row)
    {
        norm_row(x + row * width, weight + row % num_weights * width, width, eps, out + row * width);
    }
}

void dflash_trt_cpu_silu_mul(float const* gate_up, int64_t num_rows, int64_t width, float* out)
{
    Vec const one = broadcast(1.0F);
    for (int64_t row = 0; row < num_rows; ++row, gate_up += 2 * width, out += width)
    {
        int64_t i = 0;
        for (; i + kLanes <= width; i += kLanes)
        {
            Vec const gate = load(gate_up + i);
            store(out + i, gate / (one + exp(-gate)) * load(gate_up + width + i));
        }
        for (; i < width; ++i)
        {
            out[i] = silu(gate_up[i]) * gate_up[width + i];
        }
    }
}

void dflash_trt_cpu_rotate(
    float* x, int64_t row_stride, int64_t num_rows, int64_t num_heads, int64_t head_dim, DflashTrtRotation const* rotation)
{
    for (int64_t row = 0; row < num_rows; ++row)
    {
        rotate_row(*rotation, row, x + row * row_stride, num_heads, head_dim, x + row * row_stride);
    }
}
