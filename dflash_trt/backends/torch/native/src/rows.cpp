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

template <typename Element>
void copy_rows(DflashTrtCopyRows const& a)
{
    for (int64_t row = 0; row < a.num_rows; ++row)
    {
        Element const* const from = static_cast<Element const*>(a.x) + (a.rows == nullptr ? row : a.rows[row]) * a.x_stride;
        float* const to = a.out + row * a.out_stride;
        for (int64_t i = 0; i < a.width; ++i)
        {
            to[i] = as_float(from[i]) * a.factor;
        }
    }
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

void dflash_trt_cpu_rms_norm(DflashTrtRmsNorm const* arguments)
{
    DflashTrtRmsNorm const& a = *arguments;
    for (int64_t row = 0; row < a.num_rows; ++row)
    {
        int64_t const start = row * a.width;
        norm_row(a.x + start, a.weight + row % a.num_weights * a.width, a.width, a.eps, a.out + start);
    }
}

void dflash_trt_cpu_silu_mul(DflashTrtSiluMul const* arguments)
{
    int64_t const width = arguments->width;
    float const* gate_up = arguments->gate_up;
    float* out = arguments->out;
    Vec const one = broadcast(1.0F);
    for (int64_t row = 0; row < arguments->num_rows; ++row, gate_up += 2 * width, out += width)
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

void dflash_trt_cpu_rotate(DflashTrtRotate const* arguments)
{
    DflashTrtRotate const& a = *arguments;
    for (int64_t row = 0; row < a.num_rows; ++row)
    {
        float* const x = a.x + row * a.row_stride;
        rotate_row(a.rotation, row, x, a.num_heads, a.head_dim, x);
    }
}

void dflash_trt_cpu_add(DflashTrtAdd const* arguments)
{
    DflashTrtAdd const& a = *arguments;
    for (int64_t i = 0; i < a.size; ++i)
    {
        a.out[i] = a.a[i] + a.b[i];
    }
}

void dflash_trt_cpu_copy_rows(DflashTrtCopyRows const* arguments)
{
    arguments->is_bfloat16 ? copy_rows<BFloat16>(*arguments) : copy_rows<float>(*arguments);
}
