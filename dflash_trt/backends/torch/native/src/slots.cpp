/// The two ends of a step: inputs from the slots of requests, and back to them.
#include "kernels.h"

#include <algorithm>

void dflash_trt_cpu_assemble(DflashTrtAssemble const* arguments)
{
    DflashTrtAssemble const& a = *arguments;
    for (int64_t request = 0; request < a.num_requests; ++request)
    {
        int64_t const slot = a.slot_ids[request];
        bool const is_given = a.given_lens[request] >= 0;
        int32_t const context_len = is_given ? a.given_lens[request] : a.slot_lens[slot];
        int32_t const start = a.token_offsets[request], stop = a.token_offsets[request + 1];
        a.context_lens[request] = context_len;
        for (int32_t row = start; row < stop; ++row)
        {
            int64_t const index = std::min<int64_t>(row - start, a.slot_width - 1);
            a.positions[row] = context_len + row - start;
            a.token_ids[row] = is_given ? a.given_token_ids[row] : a.slot_token_ids[slot * a.slot_width + index];
        }
        for (int64_t group = 0; group < a.num_groups; ++group)
        {
            int32_t const* const pages = a.slot_tables + (slot * a.num_groups + group) * a.max_pages;
            std::copy_n(pages, a.num_pages, a.page_tables + (group * a.num_requests + request) * a.num_pages);
        }
        int64_t const from = slot * a.slot_topk, to = request * a.draft_topk;
        std::copy_n(a.slot_topk_ids + from, a.draft_topk, a.topk_ids + to);
        if (is_given) // the host's drafts were not sampled
        {
            std::fill_n(a.topk_probs + to, a.draft_topk, 0.0F);
        }
        else
        {
            std::copy_n(a.slot_topk_probs + from, a.draft_topk, a.topk_probs + to);
        }
    }
}

void dflash_trt_cpu_store(DflashTrtStore const* arguments)
{
    DflashTrtStore const& a = *arguments;
    for (int64_t request = 0; request < a.num_requests; ++request)
    {
        int64_t const slot = a.slot_ids[request];
        int32_t* const tokens = a.slot_token_ids + slot * a.slot_width;
        tokens[0] = a.bonus_tokens[request];
        std::copy_n(a.drafts + request * a.num_drafts, a.num_drafts, tokens + 1);
        a.slot_lens[slot] = a.next_context_lens[request];
    }
}
