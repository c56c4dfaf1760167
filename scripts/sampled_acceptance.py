#!/usr/bin/env python3
"""Acceptance lengths of sampled texts, with a seed and without one: a table of docs/benchmarks.md.

With a seed drafts share the noise of the target's sample, without one they are tested by rejection sampling.
"""

import argparse
import json
from pathlib import Path

from dflash_trt import LLM, SamplingParams
from dflash_trt.core.acceptance import acceptance_length
from dflash_trt.core.model import draft
from dflash_trt.core.request import GenerationOutput

MAX_NEW_TOKENS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine_dir", type=Path)
    parser.add_argument("prompts", type=Path, metavar="PROMPTS.jsonl")
    parser.add_argument("num_rounds", type=int)
    parser.add_argument("temperatures", type=float, nargs="+")
    parser.add_argument("--draft-topk", type=int, help="top-k candidates per draft, for drafters without a selector")
    given = parser.parse_args()
    if given.draft_topk is not None:
        draft._DRAFT_TOPK = given.draft_topk
    prompts = [json.loads(line)["prompt"] for line in given.prompts.read_text().splitlines()]
    with LLM(given.engine_dir, draft_length=7, enable_prefix_caching=False) as llm:
        for temperature in given.temperatures:
            for name, has_seed in (("with a seed", True), ("without", False)):
                rounds = [_round(llm, prompts, temperature, index, has_seed) for index in range(given.num_rounds)]
                each = " ".join(f"{acceptance_length(outputs):.3f}" for outputs in rounds)
                mean = acceptance_length([output for outputs in rounds for output in outputs])
                print(f"T = {temperature}, {name}: {mean:.3f} (rounds {each})", flush=True)


def _round(llm: LLM, prompts: list[str], temperature: float, index: int, has_seed: bool) -> list[GenerationOutput]:
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
