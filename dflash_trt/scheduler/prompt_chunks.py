"""Chunks of prompts that a step computes."""

from dflash_trt.core.array import Array
from dflash_trt.scheduler.request_pool import RequestPool


def prompt_chunks(request_pool: RequestPool, slots: Array, budget: int) -> list[tuple[int, int]]:
    """(slot, tokens) of each chunk: of `slots` in their order, while `budget` tokens last.

    A chunk ends where the recurrent state of its slot is to be saved, or where layers with windows have no more pages
    for it now, though more would fit.
    """
    table, chunks = request_pool.table, []
    starts, num_pending = table.max_context_len(slots).tolist(), table.num_pending(slots).tolist()
    for slot, start, pending in zip(slots.tolist(), starts, num_pending, strict=True):
        if budget <= 0:
            break
        num_tokens = request_pool.states.chunk_len(slot, start, min(pending, budget))
        num_tokens = request_pool.lend(slot, start, num_tokens)
        if num_tokens:
            chunks.append((slot, num_tokens))
            budget -= num_tokens
    return chunks
