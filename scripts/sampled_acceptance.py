#!/usr/bin/env python3
"""Acceptance lengths at temperatures: a table of docs/benchmarks.md.

Usage: scripts/sampled_acceptance.py ENGINE_DIR PROMPTS.jsonl NUM_ROUNDS TEMPERATURE... Every prompt of a round has a
seed of its own. Uses the package's API alone: `PYTHONPATH` of another checkout measures that one over the same engine.
"""

import json
import sys
from pathlib import Path

from dflash_trt import LLM, SamplingParams
from dflash_trt.core.acceptance import acceptance_length

MAX_NEW_TOKENS = 128


def main(*, one_at_a_time: bool = False) -> None:
    engine, prompts_file, num_rounds, *temperatures = sys.argv[1:]
    prompts = [json.loads(line)["prompt"] for line in Path(prompts_file).read_text().splitlines()]
    with LLM(engine, enable_prefix_caching=False) as llm:
        for temperature in map(float, temperatures):
            rounds = []
            for start in range(0, 1000 * int(num_rounds), 1000):
                samplings = [
                    SamplingParams(
                        max_new_tokens=MAX_NEW_TOKENS, temperature=temperature, seed=start + i, ignore_eos=True
                    )
                    for i in range(len(prompts))
                ]
                if one_at_a_time:
                    rounds.append([llm.generate(*each) for each in zip(prompts, samplings, strict=True)])
                else:
                    rounds.append(llm.generate(prompts, samplings))
            each = " ".join(f"{acceptance_length(outputs):.3f}" for outputs in rounds)
            mean = acceptance_length([output for outputs in rounds for output in outputs])
            print(f"T = {temperature}: {mean:.3f} (rounds {each})", flush=True)


if __name__ == "__main__":
    main()
