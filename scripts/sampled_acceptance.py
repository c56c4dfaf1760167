#!/usr/bin/env python3
"""Acceptance lengths of sampled texts, with a seed and without one: a table of docs/benchmarks.md.

Usage: scripts/sampled_acceptance.py ENGINE_DIR PROMPTS.jsonl NUM_ROUNDS TEMPERATURE... With a seed drafts share the
noise of the target's sample, without one they are tested by rejection sampling. Uses the package's API alone:
`PYTHONPATH` of another checkout measures that one over the same engine.
"""

import json
import sys
from pathlib import Path

from dflash_trt import LLM, SamplingParams
from dflash_trt.core.acceptance import acceptance_length

MAX_NEW_TOKENS = 128


def main() -> None:
    engine, prompts_file, num_rounds, *temperatures = sys.argv[1:]
    prompts = [json.loads(line)["prompt"] for line in Path(prompts_file).read_text().splitlines()]
    with LLM(engine, enable_prefix_caching=False) as llm:
        for temperature in map(float, temperatures):
            for name, has_seed in (("with a seed", True), ("without", False)):
                rounds = [_round(llm, prompts, temperature, index, has_seed) for index in range(int(num_rounds))]
                each = " ".join(f"{acceptance_length(outputs):.3f}" for outputs in rounds)
                mean = acceptance_length([output for outputs in rounds for output in outputs])
                print(f"T = {temperature}, {name}: {mean:.3f} (rounds {each})", flush=True)


def _round(llm: LLM, prompts: list[str], temperature: float, index: int, has_seed: bool) -> list:
    """Every prompt of a round has a seed of its own."""
    samplings = [
        SamplingParams(
            max_new_tokens=MAX_NEW_TOKENS,
            temperature=temperature,
            seed=1000 * index + i if has_seed else None,
            ignore_eos=True,
        )
        for i in range(len(prompts))
    ]
    return llm.generate(prompts, samplings)


if __name__ == "__main__":
    main()
