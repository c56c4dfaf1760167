"""Prefixes that went through a directory: texts, log probabilities and drafts as if they had never left the engine."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.backends.page_budget import plan_engine_pages
from dflash_trt.core.request import GenerationOutput, Request, SamplingParams
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from dflash_trt.serving.prefix_directory import PrefixDirectory
from tests.executor.rank_engines import build, make_zlab_pair, opened
from tests.parity.test_foreign_state import PAIRS, AnyExecutor, open_pair
from tests.parity.test_host_tier import NUM_NEW, TALKS, contents
from tests.serving.engines import until

PAGE_SIZE = 4


class Served:
    """An engine that keeps its prefixes in a directory, or in its pages alone."""

    def __init__(self, executor: AnyExecutor, directory: Path | None, *, publishes_all: bool = False) -> None:
        scheduler = Scheduler(executor.limits)
        self.loop = EngineLoop(executor, scheduler)
        self.store = None if directory is None else PrefixDirectory(directory, name="pair", max_bytes=1 << 26)
        if self.store is not None:
            self.loop.keep_prefixes(
                [scheduler], self.store, root=b"pair", place_bytes=executor.place_bytes, publishes_all=publishes_all
            )

    def text(self, index: int, prompt: list[int], *, num_new: int = NUM_NEW, salt: str = "") -> GenerationOutput:
        given: dict[str, Any] = {"temperature": 0.8, "seed": index} if index % 2 else {}
        sampling = SamplingParams(max_new_tokens=num_new, ignore_eos=True, logprobs=True, **given)
        request = Request(request_id=str(index), prompt_token_ids=tuple(prompt), sampling=sampling, cache_salt=salt)
        stream = self.loop.submit(request)
        while self.loop.step():
            self.loop.check_integrity()
        return stream.result(timeout_s=1)

    def has_kept(self, prompt: list[int]) -> bool:
        """All blocks of a prompt are in the directory."""
        assert self.store is not None and self.loop._transfers is not None
        return all(map(self.store.find, self.loop._transfers._prefixes.keys(prompt, salt="")))

    def read_early(self, prompt: list[int]) -> bool:
        """Before its request comes; True once all of it is there."""
        keys = self.loop.prefix_keys(prompt, salt="")
        return self.loop.read_early(prompt, keys, salt="") or (self.loop.step() and False)

    def settle(self) -> None:
        """Until nothing is on its way to the directory."""
        self.loop.close()


def check(
    open_small: Callable[[], AnyExecutor],
    open_large: Callable[[], AnyExecutor],
    root: Path,
    *,
    talks: Sequence[list[int]] = TALKS,
    num_new: int = NUM_NEW,
    is_exact: bool = True,
) -> None:
    """One engine computes every talk and lets it go; another, which has computed nothing, begins with what it finds.

    Small engines have pages for about one request and places for all, a large one keeps everything on the device.

    A large one has pages of answers too, so that a small one computes more rows at once: the same numbers only where
    these do not depend on the rows beside them (`is_exact`).
    """
    first = Served(open_small(), root / "store")
    answers = [first.text(index, talk, num_new=num_new) for index, talk in enumerate(talks)]
    for talk in talks[-2:]:
        first.text(99, talk, num_new=num_new)  # their beginnings have not left the device, but are shared now
    first.settle()
    kept, other = Served(open_large(), None), Served(open_small(), root / "store")
    expected, found = [], []
    for index, (talk, answer) in enumerate(zip(talks, answers, strict=True)):
        kept.text(index, talk, num_new=num_new)
        prompt = [*talk, *answer.token_ids, index]
        expected.append(kept.text(index, prompt, num_new=num_new))
        found.append(other.text(index, prompt, num_new=num_new))
    assert [row[:2] for row in contents(found)] == [row[:2] for row in contents(expected)]
    for a, b in zip(found, expected, strict=True):
        assert a.logprobs == (b.logprobs if is_exact else pytest.approx(b.logprobs, abs=1e-4))
    for talk, output in zip(talks, found, strict=True):  # at least what a second request began with
        assert output.statistics.num_prefix_hit_tokens >= len(talk) - 1 - (len(talk) - 1) % PAGE_SIZE
    assert sum(step.num_accepted for output in found for step in output.steps) > 0 or num_new < NUM_NEW
    other.settle()


def check_pair(name: str, root: Path, device: torch.device | None = None) -> None:
    def opened(num_sequences: int, host_bytes: int) -> AnyExecutor:
        return open_pair(name, root, device, num_sequences=num_sequences, host_bytes=host_bytes)

    is_exact = device is None and "delta nets" not in name
    check(partial(opened, 1, 1 << 22), partial(opened, 20, 0), root, is_exact=is_exact)


@pytest.mark.parametrize("name", PAIRS)
def test_another_engine_begins_where_the_first_one_was(name: str, tmp_path: Path) -> None:
    check_pair(name, tmp_path)


def check_hand_over(
    open_executor: Callable[[], AnyExecutor], root: Path, *, talks: Sequence[list[int]] = TALKS
) -> None:
    """One engine computes prompts and gives one token each; another goes on, and computes no block of them again.

    It reads them when the request comes, or earlier.
    """
    prefill = Served(open_executor(), root / "store", publishes_all=True)
    decode = Served(open_executor(), root / "store")
    alone = Served(open_executor(), None)
    for index, talk in enumerate(talks):
        prefill.text(index, talk, num_new=1)
        until(partial(prefill.has_kept, talk))
        if index % 2:
            until(partial(decode.read_early, talk))
        alone.text(index, talk, num_new=1)
        found, expected = decode.text(index, talk), alone.text(index, talk)
        assert contents([found]) == contents([expected]) and found.logprobs == expected.logprobs
        assert found.statistics.num_prefix_hit_tokens == (len(talk) - 1) // PAGE_SIZE * PAGE_SIZE
    for served in (prefill, decode, alone):
        served.settle()


@pytest.mark.parametrize("name", PAIRS)
def test_an_engine_goes_on_with_a_prompt_that_another_has_computed(name: str, tmp_path: Path) -> None:
    check_hand_over(partial(open_pair, name, tmp_path, None, num_sequences=2, host_bytes=1 << 22), tmp_path)


def test_two_ranks_keep_and_take_blocks_together(tmp_path: Path) -> None:
    """A block has the bytes of both; an engine of one rank has other blocks."""
    make_zlab_pair(tmp_path)
    engine, found = build(tmp_path, tp_size=2, max_batch_size=3, max_num_tokens=20), []
    page_bytes = plan_engine_pages(engine.manifest, RuntimeConfig(kv_cache_bytes=1 << 20)).bytes_per_token * 4
    for _ in range(2):
        with opened(engine, kv_cache_bytes=17 * page_bytes, host_cache_bytes=1 << 20) as executor:
            served = Served(executor, tmp_path / "store")
            found.append([served.text(index % 3, talk) for index, talk in enumerate([*TALKS[:3], *TALKS[:3]])])
            counts = served.loop.statistics().scheduler
            served.settle()
    first, second = found
    assert contents(second) == contents([*first[3:], *first[3:]])
    assert [output.logprobs for output in second] == [output.logprobs for output in [*first[3:], *first[3:]]]
    assert counts is not None and counts.num_loaded_blocks >= 3 * 7 and counts.num_accepted_tokens > 0
    sizes = {path.stat().st_size for path in (tmp_path / "store").glob("pair/??/*")}
    assert sizes == {20 + 2 * page_bytes}
