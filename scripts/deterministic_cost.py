"""Measures the cost of `deterministic` on the demo pair, in each dtype: a table of docs/benchmarks.md.

Usage: python -m scripts.deterministic_cost WORK_DIR [NUM_ROUNDS]. Sides alternate within a round; the time is
the CPU time of the process, per new token, on one thread.
"""

import sys
import time
from pathlib import Path
from statistics import median

from dflash_trt import LLM, SamplingParams
from scripts.text_stability import build
from scripts.train_demo.prompts import held_out_prompts

NUM_PROMPTS, NUM_NEW = 8, 96
# name, K, whether all prompts run at once
LOADS = (("K = 7, one at a time", 7, False), ("K = 7, 8 at once", 7, True), ("K = 0, one at a time", 0, False))


def cpu_us_per_token(engine: Path, *, num_draft_tokens: int, is_at_once: bool, deterministic: bool) -> float:
    prompts = held_out_prompts(NUM_PROMPTS)
    sampling = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)
    with LLM(
        engine,
        deterministic=deterministic,
        draft_length=num_draft_tokens,
        num_threads=1,
        enable_prefix_caching=False,
        kv_cache_bytes=1 << 28,
    ) as llm:
        llm.generate(prompts[:1], sampling)
        start = time.process_time()
        for batch in [prompts] if is_at_once else [[prompt] for prompt in prompts]:
            llm.generate(batch, sampling)
        return (time.process_time() - start) * 1e6 / (NUM_PROMPTS * NUM_NEW)


def main() -> None:
    work = Path(sys.argv[1])
    num_rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    print("| dtype, load | us per token | deterministic | ratio | rounds |\n|---|---:|---:|---:|---|")
    for dtype in ("float32", "bfloat16"):
        engine = build(work, dtype)
        for name, num_draft_tokens, is_at_once in LOADS:
            rounds = [
                [
                    cpu_us_per_token(
                        engine, num_draft_tokens=num_draft_tokens, is_at_once=is_at_once, deterministic=deterministic
                    )
                    for deterministic in (False, True)
                ]
                for _ in range(num_rounds)
            ]
            ratios = [after / before for before, after in rounds]
            off, on = (median(side) for side in zip(*rounds, strict=True))
            listed = " ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"| {dtype}, {name} | {off:.0f} | {on:.0f} | {median(ratios):.2f} | {listed} |", flush=True)


if __name__ == "__main__":
    main()
