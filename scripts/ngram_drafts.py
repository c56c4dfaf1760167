#!/usr/bin/env python3
"""Drafts from texts (`--ngram`) against the drafter's alone on this CPU: tables of docs/benchmarks.md.

    python -m scripts.ngram_drafts ENGINE PROMPTS.jsonl [--rounds 5]

One thread, one request at a time, greedy, K = max_draft_len. Sides take turns prompt by prompt, and times are CPU
times. The demo pair does not copy, so the answers of the edits are fixed by a constraint (`choice`).
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_trt import LLM, SamplingParams
from dflash_trt.core.acceptance import acceptance_length
from dflash_trt.core.request import GenerationOutput
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.executor.opening import max_draft_len

POINT = '''class Point:
    """A point in the plane."""

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def move(self, dx, dy):
        self.x += dx
        self.y += dy
        return self

    def distance(self, other):
        return math.hypot(self.x - other.x, self.y - other.y)

    def __repr__(self):
        return 'Point(%r, %r)' % (self.x, self.y)
'''
HEADERS = """def read_header(stream):
    line = stream.readline()
    if not line:
        raise ValueError('empty file')
    name, _, value = line.partition(':')
    return name.strip(), value.strip()


def read_body(stream, size):
    data = stream.read(size)
    if len(data) < size:
        raise ValueError('file is too short')
    return data


def read_message(stream):
    headers = {}
    while True:
        name, value = read_header(stream)
        if not name:
            break
        headers[name] = value
    return headers, read_body(stream, int(headers['size']))
"""
EDITS = (  # a file, and what is replaced in it
    (POINT, (("Point", "Vector"), ("A point in", "A vector of"))),
    (POINT, (("dx, dy", "step"), ("+= dx", "+= step.x"), ("+= dy", "+= step.y"))),
    (POINT, (("return self\n", "return self\n\n    def copy(self):\n        return Point(self.x, self.y)\n"),)),
    (HEADERS, (("stream", "source"),)),
    (HEADERS, (("'empty file'", "'no header'"), ("'file is too short'", "'no body'"))),
    (HEADERS, (("(stream, size)", "(stream, size, encoding)"), ("return data", "return data.decode(encoding)"))),
)


@dataclass(frozen=True)
class Workload:
    name: str
    prompts: Sequence[str]
    samplings: Sequence[SamplingParams]


def edits() -> Workload:
    changed = []
    for text, changes in EDITS:
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        changed.append(text)
    samplings = [SamplingParams(max_new_tokens=600, choice=(text,)) for text in changed]
    return Workload("edits of a file", [f"{source}\n# Changed:\n\n" for source, _ in EDITS], samplings)


def continuations(prompts: Sequence[str], num_tokens: int) -> Workload:
    sampling = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    return Workload(f"functions, {num_tokens} tokens", prompts, [sampling] * len(prompts))


def run(engines: dict[bool, LLM], workload: Workload) -> tuple[dict[bool, list[GenerationOutput]], dict[bool, float]]:
    """One round: outputs, and CPU time in seconds, by `ngram`. Sides take turns at every prompt."""
    outputs: dict[bool, list[GenerationOutput]] = {False: [], True: []}
    times_s = {False: 0.0, True: 0.0}
    for i, (prompt, sampling) in enumerate(zip(workload.prompts, workload.samplings, strict=True)):
        for ngram in (i % 2 == 0, i % 2 == 1):
            started_s = time.process_time()
            outputs[ngram].append(engines[ngram].generate(prompt, sampling))
            times_s[ngram] += time.process_time() - started_s
    return outputs, times_s


def compare(engines: dict[bool, LLM], workload: Workload, num_rounds: int) -> str:
    """A row of the first table, after a warm-up."""
    run(engines, replace(workload, samplings=[SamplingParams(max_new_tokens=8)] * len(workload.prompts)))
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(num_rounds):
        outputs, times_s = run(engines, workload)
        for ngram, own in outputs.items():
            speeds[ngram].append(sum(len(output.token_ids) for output in own) / times_s[ngram])
    is_equal = [a.token_ids == b.token_ids for a, b in zip(outputs[False], outputs[True], strict=True)]
    ratios = [ours / theirs for ours, theirs in zip(speeds[True], speeds[False], strict=True)]
    steps = [step for output in outputs[True] for step in output.steps if step.ngram_draft_token_ids]
    cells = [
        workload.name,
        *(f"{statistics.median(speeds[ngram]):.0f}" for ngram in (False, True)),
        f"{statistics.median(ratios):.2f} ({' '.join(f'{ratio:.2f}' for ratio in ratios)})",
        *(f"{acceptance_length(outputs[ngram]) or 0:.2f}" for ngram in (False, True)),
        f"{sum(step.num_accepted for step in steps)} of {sum(step.num_candidates for step in steps)}",
        f"{sum(is_equal)} of {len(is_equal)}",
    ]
    return f"| {' | '.join(cells)} |"


def matches(engine: Path, workload: Workload, num_drafts: int) -> Iterator[tuple[int, int, int]]:
    """Steps of a run with the drafter alone: match length, drafts accepted from the text if it had them, drafter's."""
    with LLM(engine, device="cpu", num_threads=1, draft_length=num_drafts) as llm:
        assert llm.codec is not None
        outputs = llm.generate(list(workload.prompts), workload.samplings)
        for prompt, output in zip(workload.prompts, outputs, strict=True):
            text = "".join(map(chr, [*llm.codec.encode(prompt), *output.token_ids]))
            for step in output.steps:
                known, following = text[: step.context_len + 1], text[step.context_len + 1 :][:num_drafts]
                if step.num_candidates < num_drafts or len(following) < num_drafts:
                    continue
                lengths = (n for n in range(32, 0, -1) if n < len(known) and known.find(known[-n:], 0, -1) >= 0)
                length = next(lengths, 0)
                start = known.rfind(known[-length:], 0, -1) + length if length else len(known)
                drafts = (known[start:] * num_drafts)[:num_drafts]
                is_right = [a == b for a, b in zip(drafts, following, strict=False)]  # without a match, no drafts
                yield length, [*is_right, False].index(False), step.num_accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("prompts", type=Path, metavar="PROMPTS.jsonl")
    parser.add_argument("--rounds", type=int, default=5)
    words = parser.parse_args()
    prompts = [json.loads(line)["prompt"] for line in words.prompts.read_text().splitlines()]
    short, long = continuations(prompts, 128), continuations(prompts, 640)
    print("| answers | tok/s without | with | ratio (rounds) | acceptance length without | with | from texts | equal |")
    config = RuntimeConfig(device="cpu", num_threads=1, enable_prefix_caching=False, kv_cache_bytes=1 << 30)
    with LLM(words.engine, config) as drafter, LLM(words.engine, config, ngram=True) as both:
        for workload in (edits(), short, long):
            print(compare({False: drafter, True: both}, workload, words.rounds), flush=True)
    most = max_draft_len(EngineDir.open(words.engine))
    found = [step for workload in (short, long) for step in matches(words.engine, workload, most)]
    print("\n| match of | steps | accepted from texts | from the drafter |")
    for first, last in ((1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 7), (8, 11), (12, 31), (32, 32)):
        of_length = [step for step in found if first <= step[0] <= last]
        means = (f"{statistics.fmean(step[i] for step in of_length):.2f}" for i in (1, 2))
        lengths = f"{first}" if first == last else f"{first} to {last}"
        print(f"| {lengths} | {len(of_length)} | {' | '.join(means)} |")


if __name__ == "__main__":
    main()
