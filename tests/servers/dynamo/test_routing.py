"""Routing by prefix: the events of the workers' prefix caches, and what they gain over round-robin."""

import itertools
import random
from pathlib import Path

import pytest

from dflash_trt.serving.llm import LLM
from tests.servers.dynamo.serving import Server, serving

NUM_PREFIXES, NUM_TAILS = 8, 3


def hit_fraction(server: Server, offline: LLM, tag: str) -> float:
    """Of prompts in random order, each a prefix of five pages that others share, and a tail of its own."""
    text = "".join(f"    {tag}_{index} = {index}\n" for index in range(60))
    prefixes = [offline.codec.encode(f"{tag}{index}\n{text}")[: 5 * 32] for index in range(NUM_PREFIXES)]
    prompts = [
        [*map(int, prefix), *map(int, offline.codec.encode(f"tail {index}"))]
        for index, prefix in itertools.product(range(NUM_TAILS), prefixes)
    ]
    random.Random(5).shuffle(prompts)
    names = ("dflash_trt:prefix_hit_tokens_total", "dflash_trt:prompt_tokens_total")
    before = [server.total(name) for name in names]
    for prompt in prompts:
        assert server.post("completions", prompt=prompt, max_tokens=1, temperature=0).status_code == 200
    num_hit, num_prompt = (server.total(name) - count for name, count in zip(names, before, strict=True))
    assert num_prompt == sum(map(len, prompts))
    return num_hit / num_prompt


def test_routing_by_prefix_hits_more_often_than_round_robin(
    server: Server, demo: Path, offline: LLM, tmp_path: Path
) -> None:
    by_prefix = hit_fraction(server, offline, "routed")
    with serving(demo, tmp_path, "--router-mode", "round-robin") as other:
        in_turn = hit_fraction(other, offline, "routed")
    assert by_prefix == pytest.approx((NUM_TAILS - 1) / NUM_TAILS, abs=0.07)  # only the first of a prefix misses
    assert in_turn < by_prefix - 0.1
