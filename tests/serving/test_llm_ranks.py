"""LLM over two ranks: the same answers, and a clear end when a rank's process is lost."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.core.errors import ConfigError
from dflash_trt.core.request import SamplingParams
from dflash_trt.engine_dir import EngineDir
from dflash_trt.serving.llm import LLM
from tests.executor.rank_engines import KV_CACHE_BYTES, build, make_zlab_pair

PROMPTS = [[5, 9, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [7], [3] * 14]
RULES = [{}, {"repetition_penalty": 1.5}, {"presence_penalty": 1.0, "min_tokens": 3}, {"logit_bias": {3: -50, 9: 1}}]
SAMPLING = [
    SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=0.3 * i, seed=i, **rules)
    for i, rules in enumerate(RULES)
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> list[EngineDir]:
    """Of one rank and of two."""
    root = tmp_path_factory.mktemp("pair")
    make_zlab_pair(root)
    return [build(root, tp_size=tp_size) for tp_size in (1, 2)]


def _open(engine: EngineDir, **options: bool | int) -> LLM:
    return LLM(engine.path, device="cpu", num_threads=1, kv_cache_bytes=KV_CACHE_BYTES, **options)  # type: ignore[arg-type]


def _tokens(llm: LLM) -> list[tuple[int, ...]]:
    return [output.token_ids for output in llm.generate(PROMPTS, SAMPLING)]


@pytest.mark.parametrize("overlaps", [False, True], ids=["plain loop", "overlapped loop"])
def test_answers_are_those_of_one_rank_and_closing_ends_the_workers(engines: list[EngineDir], overlaps: bool) -> None:
    with _open(engines[0]) as one:
        expected = _tokens(one)
    with _open(engines[1], overlap_scheduling=overlaps) as two:
        process_ids = two._engine._executor.worker_process_ids
        assert _tokens(two) == expected
        assert _is_alive(process_ids[0])
    assert not _is_alive(process_ids[0])


def test_log_probabilities_are_those_of_one_rank(engines: list[EngineDir]) -> None:
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=True, top_logprobs=4, prompt_logprobs=2)
    outputs = []
    for engine in engines:
        with _open(engine) as llm:
            outputs.append(llm.generate(PROMPTS, sampling))
    for one, two in zip(*outputs, strict=True):
        for found, expected in ((two.top_logprobs, one.top_logprobs), (two.prompt_logprobs, one.prompt_logprobs)):
            assert _ids(found) == _ids(expected)
            assert _values(found) == pytest.approx(_values(expected), abs=1e-4)
        assert len(one.top_logprobs) == 12 and len(_values(one.prompt_logprobs)) == 3 * (one.num_prompt_tokens - 1)


def _ids(entries: Any) -> list[int]:
    """Of nested entries that are TokenLogprob or PromptLogprob, in their order."""
    return [leaf for leaf in _leaves(entries) if isinstance(leaf, int)]


def _values(entries: Any) -> list[float]:
    return [leaf for leaf in _leaves(entries) if isinstance(leaf, float)]


def _leaves(entries: Any) -> Iterator[int | float]:
    for entry in entries:
        if isinstance(entry, tuple):
            yield from _leaves(entry)
        elif entry is not None:
            yield entry


def test_a_worker_lost_in_the_middle_fails_what_ran_and_the_engine_reopens(engines: list[EngineDir]) -> None:
    long = SamplingParams(max_new_tokens=45, ignore_eos=True)
    with _open(engines[0], draft_length=0) as one:
        expected = [output.token_ids for output in one.generate(PROMPTS, [long] * 4)]
    with _open(engines[1], draft_length=0) as llm:
        lost = llm._engine._executor
        (process_id,) = lost.worker_process_ids
        stream = llm.submit(PROMPTS[0], long)
        next(iter(stream))  # it runs
        os.kill(process_id, signal.SIGKILL)
        started = time.monotonic()
        error = stream.result().error or ""
        assert time.monotonic() - started < 15
        assert "rank 1 of 2" in error and "SIGKILL" in error
        assert [output.token_ids for output in llm.generate(PROMPTS, [long] * 4)] == expected
        assert "network" not in vars(lost._local), "its weights were freed before others were loaded"
        assert llm.failure is None and llm._engine._executor.worker_process_ids != (process_id,)


def test_an_llm_that_cannot_be_made_leaves_no_process(engines: list[EngineDir]) -> None:
    before = _children()
    with pytest.raises(ConfigError, match="draft_length"):
        _open(engines[1], draft_length=99)
    assert _children() == before


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True
