#!/usr/bin/env python3
"""Conversations with and without tiers of host memory and disk on this machine: the tables of docs/benchmarks.md.

    python -m scripts.host_tier ENGINE PROMPTS.jsonl [--conversations 200] [--turns 8] [--held 20] [--rounds 5]

Conversations take turns: each has its next message when all others have had theirs. The K/V pages hold `--held` of
them; the host's memory holds all, or as many as the pages where a directory holds all. One thread, one request at a
time; times are those of a clock to the first token of an answer; without hits, CPU times of all threads as well.
"""

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dflash_trt import LLM, SamplingParams
from dflash_trt.core.errors import DFlashError

ANSWER, MESSAGE = 16, 32  # tokens


class Side:
    """An engine with some pages and some of the host's memory."""

    def __init__(
        self, engine_dir: Path, *, num_tokens: int, num_host_tokens: int, directory: str | None = None
    ) -> None:
        with LLM(engine_dir, kv_cache_bytes=1 << 30) as sizes:
            assert sizes.page_plan is not None
            num_bytes = sizes.page_plan.bytes_per_token
        fields = {"kv_cache_bytes": num_tokens * num_bytes, "host_cache_bytes": num_host_tokens * num_bytes or None}
        self.llm = LLM(engine_dir, num_threads=1, disk_cache_dir=directory, **fields)

    def answer(self, token_ids: Sequence[int]) -> tuple[list[int], float, tuple[float, float], int, int]:
        """The answer, seconds to its first token, seconds and CPU seconds to its end, hit tokens, accepted drafts."""
        sampling = SamplingParams(max_new_tokens=ANSWER, ignore_eos=True)
        started_s, started_cpu_s, first_s = time.perf_counter(), time.process_time(), None
        for chunk in self.llm.stream(list(token_ids), sampling):
            first_s = time.perf_counter() if first_s is None else first_s
            output = chunk.output
        assert first_s is not None and output is not None
        hits = output.statistics.num_prefix_hit_tokens
        times_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
        return list(output.token_ids), first_s - started_s, times_s, hits, output.num_accepted_tokens


def converse(side: Side, prompts: Sequence[list[int]], messages: Sequence[list[int]], num_turns: int) -> list[str]:
    """A row of the table for each turn."""
    talks, rows = [list(prompt) for prompt in prompts], []
    for turn in range(num_turns):
        first_s, hits, accepted, lengths = [], 0, 0, 0
        for index, talk in enumerate(talks):
            if turn:
                talk += messages[(index + turn) % len(messages)]
            lengths += len(talk)
            answer, to_first_s, _, num_hits, num_accepted = side.answer(talk)
            talk += answer
            first_s.append(to_first_s)
            hits, accepted = hits + num_hits, accepted + num_accepted
        rows.append(
            f"| {turn + 1} | {lengths / len(talks):.0f} | {hits / lengths:.0%} | "
            f"{statistics.median(first_s) * 1e3:.0f} | {accepted / len(talks):.2f} |"
        )
    return rows


def without_hits(sides: dict[str, Side], prompts: Sequence[list[int]], num_rounds: int) -> str:
    """Tokens per second, prompts included, where nothing is asked twice; sides take turns."""
    rounds = []
    for number in range(num_rounds):
        times_s = {name: np.zeros(2) for name in sides}
        for index, prompt in enumerate(prompts):
            fresh = [*prompt[:1], 3 + number, 3 + index % 200, *prompt[1:]]
            for name in sorted(sides, reverse=bool((index + number) % 2)):
                times_s[name] += sides[name].answer(fresh)[2]
        rounds.append(times_s)
    lines, (first, *others) = [], sides
    for other in others:
        for kind, clock in enumerate(("second", "CPU second")):
            ratios = [times_s[first][kind] / times_s[other][kind] for times_s in rounds]
            listed = ", ".join(f"{ratio:.3f}" for ratio in ratios)
            lines.append(f"{other} / {first}, tokens per {clock} without hits: {np.median(ratios):.3f} of {listed}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--held", type=int, default=20, help="conversations that the K/V pages hold")
    parser.add_argument("--side", action="append", help="none, host, disk or device; repeatable (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="of the comparison without hits")
    parser.add_argument("--directory", default="build/prefixes", help="of the disk's tier; emptied before and after")
    options = parser.parse_args()
    shutil.rmtree(options.directory, ignore_errors=True)
    texts = [json.loads(line)["prompt"] for line in options.prompts.read_text().splitlines()]
    with LLM(options.engine, num_threads=1) as llm:
        known = [llm.tokenizer.encode(text).ids for text in texts]
    # Conversations differ from their third token on.
    prompts = [
        [*known[i % len(known)][:1], 3 + i % 200, 3 + i // 200, *known[i % len(known)][1:]]
        for i in range(options.conversations)
    ]
    messages = [ids[10 : 10 + MESSAGE] for ids in known]
    longest = max(map(len, prompts)) + options.turns * (ANSWER + MESSAGE)
    held, everything = options.held * longest, options.conversations * longest
    sizes = {
        "none": (held, 0, None),
        "host": (held, everything, None),
        "disk": (held, held, options.directory),
        "device": (everything, 0, None),
    }
    for name in options.side or sizes:
        num_tokens, num_host_tokens, directory = sizes[name]
        side = Side(options.engine, num_tokens=num_tokens, num_host_tokens=num_host_tokens, directory=directory)
        print(f"\n{name}: {side.llm.page_plan}\n")
        print("| turn | prompt tokens | hits | ms to the first token, median | accepted drafts |")
        print("|---:|---:|---:|---:|---:|")
        for row in converse(side, prompts, messages, options.turns):
            print(row, flush=True)
        side.llm.close()
    sides = {
        name: Side(options.engine, num_tokens=held, num_host_tokens=num_host_tokens, directory=directory)
        for name, num_host_tokens, directory in (
            ("none", 0, None),
            ("host memory", held, None),
            ("a directory", held, options.directory),
        )
    }
    for side in sides.values():
        for prompt in prompts:  # each further one evicts another, to a place that was written to before
            side.answer(prompt)
    print("\n" + without_hits(sides, known, options.rounds))
    for side in sides.values():
        side.llm.close()
    shutil.rmtree(options.directory)


if __name__ == "__main__":
    try:
        main()
    except DFlashError as error:
        raise SystemExit(f"Error: {error}") from None
