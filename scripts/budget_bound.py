#!/usr/bin/env python3
"""What a verify budget for each request could gain on a GPU at most, by plan: a table of docs/design/drafts.md.

    python -m scripts.budget_bound

Half of the requests have 0.9 of their drafts accepted after an accepted one, half have 0.4, and a budget is given that
knows which is which. It takes the best number of drafts for each half, every row is computed alone (no bucket pads a
step), and the choice costs nothing. Against it stands the best K for all. Clients ask again as soon as they are
answered, both kinds as often and for as many tokens, so the ones that are slower are more of a batch.

Kernels take what NVIDIA measured (the extra `silicon`).
"""

from collections.abc import Iterator
from itertools import product

import numpy as np

from dflash_trt.plan.computed_rows import ComputedRows
from dflash_trt.plan.gpus import gpu_of
from dflash_trt.plan.step_costs import StepClock, clock_of
from dflash_trt.plan.step_work import EngineWork
from scripts.published_points import planned

PAIRS = (
    ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", "fp8", "h200", 15),
    ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", None, "h200", 15),
    ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", "nvfp4", "b300", 15),
    ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "z-lab/Qwen3-Coder-30B-A3B-DFlash", None, "h200", 15),
    ("openai/gpt-oss-120b", "z-lab/gpt-oss-120b-DFlash", None, "b300", 9),
)
RATES = (0.9, 0.4)
BATCHES = (4, 16, 64, 128)
CONTEXT_LEN = 1024


def tokens_per_second(work: EngineWork, clock: StepClock, batch: int, drafts: tuple[int, int]) -> float:
    """Of `batch` requests in a steady state, whose halves verify so many drafts each."""
    per_step = [sum(rate**i for i in range(length + 1)) for rate, length in zip(RATES, drafts, strict=True)]
    share = (1 / per_step[0]) / (
        1 / per_step[0] + 1 / per_step[1]
    )  # of the batch: the requests that a kind has running
    fast = min(batch - 1, max(1, round(share * batch)))
    rows = ComputedRows(
        num_tokens=np.repeat([drafts[0] + 1, drafts[1] + 1], [fast, batch - fast]),
        context_lens=np.full(batch, CONTEXT_LEN),
        num_draft_tokens=max(drafts),
    )
    return batch * (share * per_step[0] + (1 - share) * per_step[1]) / clock.time(work.of(rows)).total_s


def lines() -> Iterator[str]:
    yield "| pair | GPU | format | " + " | ".join(f"{batch} requests" for batch in BATCHES) + " |"
    yield "|---|---|---|" + "---:|" * len(BATCHES)
    for target, drafter, quantization, gpu, most in PAIRS:
        plan = planned(target, drafter, quantization, gpu, 1, 1)
        work, clock = EngineWork(plan.pretrained_config, has_drafter=True), clock_of(gpu_of(gpu), None)
        cells = []
        for batch in BATCHES:
            speeds = {
                drafts: tokens_per_second(work, clock, batch, drafts) for drafts in product(range(most + 1), repeat=2)
            }
            alike = max((drafts for drafts in speeds if drafts[0] == drafts[1]), key=lambda drafts: speeds[drafts])
            best = max(speeds, key=lambda drafts: speeds[drafts])
            cells.append(f"{speeds[best] / speeds[alike]:.2f} ({best[0]} and {best[1]}; {alike[0]})")
        yield f"| {target.partition('/')[2]} | {gpu.upper()} | {quantization or 'as stored'} | {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(lines()))
