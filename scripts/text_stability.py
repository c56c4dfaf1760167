"""Builds the demo pair in each dtype and counts the texts that K and batch mates change: a table of docs/benchmarks.md.

Usage: python -m scripts.text_stability WORK_DIR [NUM_PROMPTS] [MAX_NEW_TOKENS]. Every prompt has a seed of its own,
the same in all runs. The texts are compared with those of K = 0, one request at a time.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from dflash_trt import LLM, SamplingParams
from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.scheduler.config import SchedulerConfig
from scripts.train_demo.prompts import held_out_prompts

DEMO = Path(__file__).resolve().parents[1] / "dflash_trt" / "demo"
TEMPERATURES = (0.0, 0.8, 1.0)
# name, K, whether all prompts run at once, tokens of a prefill chunk
RUNS: tuple[tuple[str, int, bool, int | None], ...] = (
    ("K = 0 again", 0, False, None),
    ("K = 1", 1, False, None),
    ("K = 3", 3, False, None),
    ("K = 7", 7, False, None),
    ("K = 0, all at once", 0, True, None),
    ("K = 7, all at once", 7, True, None),
    ("K = 0, prompts in chunks of 16", 0, False, 16),
)


def build(work: Path, dtype: str) -> Path:
    config = BuildConfig(target=str(DEMO / "target"), drafter=str(DEMO / "drafter"), dtype=dtype, max_batch_size=32)
    output = work / f"demo-{dtype}"
    build_engine(config, output, base_dir=DEMO, overwrite=True, command=sys.argv, progress=lambda progress: None)
    return output


def texts(engine: Path, prompts: Sequence[str], samplings: Sequence[SamplingParams], run: int) -> list[str]:
    _, num_draft_tokens, is_at_once, chunk = RUNS[run]
    config = SchedulerConfig(enable_prefix_caching=False, max_prefill_tokens=chunk)
    with LLM(engine, draft_length=num_draft_tokens, scheduler_config=config, kv_cache_bytes=1 << 30) as llm:
        if is_at_once:
            outputs = llm.generate(list(prompts), samplings)
        else:
            pairs = zip(prompts, samplings, strict=True)
            outputs = [output for prompt, sampling in pairs for output in llm.generate([prompt], sampling)]
    return [output.text for output in outputs]


def main() -> None:
    work = Path(sys.argv[1])
    num_prompts, max_new_tokens = (int(word) for word in (*sys.argv[2:4], *("20", "128")[len(sys.argv) - 2 :]))
    prompts = held_out_prompts(num_prompts)
    columns: dict[str, list[int]] = {}
    for dtype in ("float32", "bfloat16"):
        engine = build(work, dtype)
        for temperature in TEMPERATURES:
            samplings = [
                SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, ignore_eos=True)
                for seed in range(num_prompts)
            ]
            expected = texts(engine, prompts, samplings, 0)
            found = [texts(engine, prompts, samplings, run) for run in range(len(RUNS))]
            changed = [sum(a != b for a, b in zip(expected, run, strict=True)) for run in found]
            columns[f"{dtype}, {'greedy' if temperature == 0 else f'T = {temperature}'}"] = changed
            print(dtype, temperature, changed, file=sys.stderr)
    print(f"| changed texts of {num_prompts} | {' | '.join(columns)} |")
    print("|---" + "|---:" * len(columns) + "|")
    for row, (name, *_) in enumerate(RUNS):
        print(f"| {name} | {' | '.join(str(changed[row]) for changed in columns.values())} |")


if __name__ == "__main__":
    main()
