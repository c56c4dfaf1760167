/// What DFlash2 adds to a drafter: the convolution over a block's slots, and the walk through candidates.
#include "kernels.h"
#include "simd.h"

#include <cmath>
#include <limits>

namespace dflash_trt
{
namespace
{

float dot(float const* a, float const* b, float const* c, int64_t width) // of the products of all three
{
    Vec sums = broadcast(0.0F);
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes)
    {
        sums = fma(load(a + i) * load(b + i), load(c + i), sums);
    }
    float total = sum(sums);
    for (; i < width; ++i)
    {
        total += a[i] * b[i] * c[i];
    }
    return total;
}

/// The `count` largest of a row, best first; of equal ones the smaller index is first, and NaN is below all.
void largest(float const* row, int64_t width, int64_t count, float* values, int32_t* indices)
{
    int64_t found = 0;
    for (int64_t i = 0; i < width; ++i)
    {
        float const value = std::isnan(row[i]) ? -std::numeric_limits<float>::infinity() : row[i];
        if (found == count && !(value > values[count - 1]))
        {
            continue;
        }
        int64_t at = found < count ? found++ : count - 1;
        for (; at > 0 && value > values[at - 1]; --at)
        {
            values[at] = values[at - 1];
            indices[at] = indices[at - 1];
        }
        values[at] = value;
        indices[at] = static_cast<int32_t>(i);
    }
}

} // namespace
} // namespace dflash_trt

using namespace dflash_trt;

void dflash_trt_cpu_block_conv(DflashTrtBlockConv const* conv)
{
    int64_t const width = conv->num_groups * conv->group_size;
    for (int64_t row = 0; row < conv->num_rows; ++row)
    {
        int64_t const slot = row % conv->num_slots;
        float const* const x = conv->x + row * width;
        float const* const filters = conv->filters + row * conv->filter_stride;
        float* const out = conv->out + row * width;
        for (int64_t group = 0; group < conv->num_groups; ++group)
        {
            int64_t const first = group * conv->group_size;
            for (int64_t tap = 0; tap < conv->num_taps && tap <= slot; ++tap)
            {
                float const dynamic = filters[tap * conv->num_groups + group];
                float const* const base = conv->base + tap * width;
                for (int64_t c = first; c < first + conv->group_size; ++c)
                {
                    float const before = tap == 0 ? 0.0F : out[c];
                    out[c] = before + (base[c] + dynamic) * x[c - tap * width];
                }
            }
        }
    }
}

void dflash_trt_cpu_candidates(DflashTrtCandidates const* arguments)
{
    DflashTrtCandidates const& a = *arguments;
    for (int64_t row = 0; row < a.num_rows; ++row)
    {
        int64_t const start = row * a.top_k;
        largest(a.logits + row * a.vocab_size, a.vocab_size, a.top_k, a.scores + start, a.tokens + start);
    }
}

void dflash_trt_cpu_blocks(DflashTrtBlocks const* arguments)
{
    DflashTrtBlocks const& a = *arguments;
    for (int64_t i = 0; i < a.num_requests * a.width; ++i)
    {
        int64_t const request = i / a.width;
        int32_t const slot = static_cast<int32_t>(i % a.width);
        a.token_ids[i] = slot == 0 ? a.bonus_tokens[request] : a.fill;
        a.positions[i] = a.starts[request] + slot;
    }
}

void dflash_trt_cpu_select(DflashTrtSelection const* selection)
{
    DflashTrtSelection const& s = *selection;
    for (int64_t request = 0; request < s.num_requests; ++request)
    {
        int64_t token = s.first_tokens[request];
        for (int64_t row = request * s.num_slots; row < (request + 1) * s.num_slots; ++row)
        {
            float best_score = 0.0F;
            int64_t best = 0;
            for (int64_t i = 0; i < s.top_k; ++i)
            {
                int64_t const candidate = row * s.top_k + i;
                s.scores[candidate] += dot(s.predecessor + token * s.rank, s.hidden + row * s.rank,
                    s.successor + s.tokens[candidate] * s.rank, s.rank);
                float const score = s.scores[candidate] + (s.noise == nullptr ? 0.0F : s.noise[candidate]);
                if (i == 0 || score > best_score)
                {
                    best_score = score;
                    best = candidate;
                }
            }
            token = s.tokens[best];
            s.out[row] = static_cast<int32_t>(token);
        }
    }
}
