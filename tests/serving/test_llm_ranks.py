"""LLM over two ranks: the same answers, and a clear end when a rank's process is lost."""

import os
import signal
import time
from pathlib import Path

import pytest

from dflash_trt.core.errors import ConfigError
from dflash_trt.core.request import SamplingParams
from dflash_trt.engine_dir import EngineDir
from dflash_trt.serving.llm import LLM
from tests.executor.rank_engines import KV_CACHE_BYTES, build, make_zlab_pair

PROMPTS = [[5, 9, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [7], [3] * 14]
SAMPLING = [SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=0.3 * i, seed=i) for i in range(4)]


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


def test_a_worker_lost_in_the_middle_fails_what_ran_and_the_engine_reopens(engines: list[EngineDir]) -> None:
    long = SamplingParams(max_new_tokens=45, ignore_eos=True)
    with _open(engines[0], num_draft_tokens=0) as one:
        expected = [output.token_ids for output in one.generate(PROMPTS, [long] * 4)]
    with _open(engines[1], num_draft_tokens=0) as llm:
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
    with pytest.raises(ConfigError, match="num_draft_tokens"):
        _open(engines[1], num_draft_tokens=99)
    assert _children() == before


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True
