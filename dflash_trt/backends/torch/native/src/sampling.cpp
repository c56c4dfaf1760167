/// Greedy sampling of the target, probabilities, and the accept test of drafts.
#include "kernels.h"
#include "simd.h"

#include <cmath>
#include <limits>

namespace dflash_trt
{
namespace
{

float largest_of(float const* logits, int64_t vocab_size) // NaN is passed over
{
    Vec top = broadcast(-INFINITY);
    int64_t i = 0;
    for (; i + kLanes <= vocab_size; i += kLanes)
    {
        top = max(load(logits + i), top);
    }
    float most = largest(top);
    for (; i < vocab_size; ++i)
    {
        most = logits[i] > most ? logits[i] : most;
    }
    return most;
}

int32_t first_of(float const* logits, int64_t vocab_size, float value) // the last one where there is none
{
    int32_t token = 0;
    while (token + 1 < vocab_size && logits[token] != value)
    {
        ++token;
    }
    return token;
}

/// Of exp(logit - most). NaN of a row that is not finite.
float sum_of_exponentials(float const* logits, int64_t vocab_size, float most)
{
    Vec sums = broadcast(0.0F);
    int64_t i = 0;
    for (; i + kLanes <= vocab_size; i += kLanes)
    {
        sums = sums + exp(load(logits + i) - broadcast(most));
    }
    float total = sum(sums);
    for (; i < vocab_size; ++i)
    {
        total += std::exp(logits[i] - most);
    }
    return std::isinf(most) ? std::numeric_limits<float>::quiet_NaN() : total;
}

} // namespace
} // namespace dflash_trt

using namespace dflash_trt;

void dflash_trt_cpu_accept(DflashTrtAcceptance const* arguments)
{
    DflashTrtAcceptance const& a = *arguments;
    for (int64_t request = 0; request < a.num_requests; ++request)
    {
        int64_t const start = request * a.width;
        for (int64_t row = start; row < start + a.width; ++row)
        {
            float const* const logits = a.logits + row * a.vocab_size;
            float const most = largest_of(logits, a.vocab_size);
            int32_t const token = a.sampled == nullptr ? first_of(logits, a.vocab_size, most) : a.sampled[row];
            a.emitted_tokens[row] = token;
            a.emitted_logprobs[row] = logits[token] - most - std::log(sum_of_exponentials(logits, a.vocab_size, most));
        }
        int32_t const* const rows = a.logit_rows + start;
        int32_t const num_candidates = a.num_candidates[request];
        int32_t accepted = 0;
        while (accepted < num_candidates && a.token_ids[rows[accepted] + 1] == a.emitted_tokens[start + accepted])
        {
            ++accepted;
        }
        int32_t const num_given = a.token_offsets[request + 1] - a.token_offsets[request];
        a.num_accepted[request] = accepted;
        a.bonus_tokens[request] = a.emitted_tokens[start + accepted];
        a.next_context_lens[request] = a.context_lens[request] + num_given - num_candidates + accepted;
    }
}

void dflash_trt_cpu_confidence(DflashTrtConfidence const* arguments)
{
    DflashTrtConfidence const& a = *arguments;
    for (int64_t row = 0; row < a.num_rows; ++row)
    {
        float const* const scores = a.scores + row * a.width;
        a.out[row] = 1.0F / sum_of_exponentials(scores, a.width, largest_of(scores, a.width));
    }
}
