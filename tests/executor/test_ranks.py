"""Two ranks compute what one computes, and whatever happens to one of them is told and leaves nothing behind."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.backends.cuda.backend import CudaBackend
from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.core.batch import RequestResult, ScheduledRequest, StepBatch, StepSampling, plan_of, run_batch
from dflash_trt.core.errors import CapacityError, ConfigError, EngineDirError, RankError
from dflash_trt.core.request import Request, SamplingParams
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.core.step_plan import StepPlan
from dflash_trt.engine_dir import EngineDir
from dflash_trt.executor import opening
from dflash_trt.executor.ranks import executor as ranks
from dflash_trt.executor.ranks import launcher as rank_workers
from dflash_trt.executor.ranks.executor import RankedExecutor
from dflash_trt.executor.ranks.messages import RunStep
from dflash_trt.executor.ranks.shard import fingerprint
from dflash_trt.network.ops import Linear
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from tests.executor.rank_engines import (
    PACKED,
    build,
    make_speculators_pair,
    make_zlab_pair,
    opened,
    skipping,
    write_calibration_prompts,
)
from tests.fake_executor import result_of
from tests.traces import GREEDY, PROMPTS, SAMPLED, integers, logprobs, trace

K = 3


@dataclass(frozen=True)
class Pair:
    one: TorchExecutor
    two: RankedExecutor
    engine: EngineDir  # of two ranks


@pytest.fixture(scope="module", params=["the target's head", "a reduced vocabulary", "quantized"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("pair")
    fields: dict[str, Any] = {}
    if request.param == "a reduced vocabulary":
        make_speculators_pair(root)
    else:
        make_zlab_pair(root)
    if request.param == "quantized":
        if not _has_modelopt():
            pytest.skip("modelopt is not installed: scripts/test installs it")
        write_calibration_prompts(root)
        fields["quantization"] = PACKED
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        engines = [build(root, tp_size=tp_size, **fields) for tp_size in (1, 2)]
    with opened(engines[0]) as one, opened(engines[1]) as two:
        yield Pair(one, two, engines[1])


@pytest.fixture
def engine(tmp_path: Path) -> EngineDir:
    make_zlab_pair(tmp_path)
    return build(tmp_path, tp_size=2)


def _has_modelopt() -> bool:
    from importlib.util import find_spec

    return find_spec("modelopt") is not None


# The same tokens


@pytest.mark.parametrize(
    ("samplings", "ks"),
    [(GREEDY, (K,)), (GREEDY, (0,)), (SAMPLED, (K,)), (SAMPLED, (K, 0, 1))],
    ids=["greedy", "greedy without drafts", "sampled", "sampled, K changing"],
)
def test_every_step_of_a_mixed_trace_equals_that_of_one_rank(pair: Pair, samplings: Any, ks: tuple[int, ...]) -> None:
    expected, _ = trace(pair.one, samplings, num_draft_tokens=ks)
    found, _ = trace(pair.two, samplings, num_draft_tokens=ks)
    assert integers(found) == integers(expected)
    torch.testing.assert_close(logprobs(found), logprobs(expected), rtol=0, atol=1e-4)  # measured 4e-6


def test_accepted_and_rejected_drafts_are_those_of_one_rank(pair: Pair) -> None:
    """Drafts that are right but for every fifth token."""
    _, runs = trace(pair.one, SAMPLED, num_draft_tokens=(0,), num_new=16)
    texts = [[(token + 1) % 12 if i % 5 == 4 else token for i, token in enumerate(run.tokens)] for run in runs]
    expected, runs = trace(pair.one, SAMPLED, num_draft_tokens=(K,), proposals=texts)
    found, _ = trace(pair.two, SAMPLED, num_draft_tokens=(K,), proposals=texts)
    assert integers(found) == integers(expected)
    accepted = [count for run in runs for count in run.num_accepted]
    assert {0, K} <= set(accepted)


def drawn_apart(executor: Any) -> list[tuple[tuple[int, ...], list[int]]]:
    """Tokens and accepted drafts of requests without a seed of their user's, through chained steps."""
    loop = EngineLoop(executor, Scheduler(executor.limits), overlaps=True)
    requests = [
        Request(
            request_id=str(seed),
            prompt_token_ids=tuple(PROMPTS[seed % len(PROMPTS)]),
            sampling=SamplingParams(max_new_tokens=12, temperature=2.0, top_p=0.97),
            seed=seed,
            is_reproducible=False,
        )
        for seed in range(8)
    ]
    streams = [loop.submit(request) for request in requests]
    while loop.step():
        pass
    outputs = [stream.result(timeout_s=5) for stream in streams]
    return [(output.token_ids, [step.num_accepted for step in output.steps]) for output in outputs]


def test_rejection_sampling_is_alike_on_every_rank(pair: Pair) -> None:
    expected = drawn_apart(pair.one)
    assert drawn_apart(pair.two) == expected
    assert any(any(accepted) for _, accepted in expected)


def test_all_ranks_have_the_same_logits_bit_for_bit(pair: Pair) -> None:
    """`target_logits` compares the hashes of all ranks; see the negative control below."""
    prompt = list(PROMPTS[1])
    torch.testing.assert_close(pair.two.target_logits(prompt), pair.one.target_logits(prompt), rtol=0, atol=1e-4)


def test_both_ranks_have_the_pages_of_half_the_heads(pair: Pair) -> None:
    assert pair.two.page_plan.bytes_per_token * 2 == pair.one.page_plan.bytes_per_token
    assert str(pair.two.page_plan).startswith("on each of 2 ranks ")
    assert pair.two.limits == replace(pair.one.limits, num_pages=pair.two.limits.num_pages)


def test_a_lost_weight_of_one_rank_changes_the_tokens(pair: Pair) -> None:
    """The negative control of the traces: the ranks still agree with each other."""
    expected, _ = trace(pair.one, GREEDY, num_draft_tokens=(K,))
    local = pair.two._local
    network = local.network
    layers = list(network.target_weights.layers)
    mlp = replace(layers[2].feed_forward, down=Linear(weight=torch.zeros(64, 48)))
    layers[2] = replace(layers[2], feed_forward=mlp)
    local.network = replace(network, target_weights=replace(network.target_weights, layers=tuple(layers)))
    found, _ = trace(pair.two, GREEDY, num_draft_tokens=(K,))
    local.network = network
    assert integers(found) != integers(expected)


@pytest.mark.parametrize("skipped", [0, 7], ids=["first layer", "last layer"])
def test_a_rank_that_skips_a_sum_changes_the_logits(pair: Pair, skipped: int) -> None:
    """Another negative control: rank 0 takes part, but ignores the sum. The ranks exchange wrong logits then."""
    expected = pair.one.target_logits(PROMPTS[1])
    with skipping(pair.two._local, skipped):
        found = pair.two.target_logits(PROMPTS[1])
    assert (found - expected).abs().max() > 0.1  # those of all ranks are within 1e-4


def test_ranks_that_come_to_different_logits_are_found_out(engine: EngineDir) -> None:
    """The negative control of equal bits: rank 0 ignores the other's half of the vocabulary."""
    with opened(engine) as two, skipping(two._local, 8):
        with pytest.raises(RankError, match="2 ranks: expected the same tokens and log-probabilities"):
            two.target_logits(PROMPTS[1])
        assert not _alive(two.worker_process_ids)


def test_ranks_agree_on_the_fewest_pages(engine: EngineDir) -> None:
    class Poor:
        num_ranks = 2

        def smallest(self, number: int) -> int:
            return min(number, 17)

    executor = TorchExecutor.open(engine, RuntimeConfig(kv_cache_bytes=1 << 20), ranks=Poor())  # type: ignore[arg-type]
    assert executor.limits.num_pages == executor.page_plan.num_pages == 17


# What happens to processes


def test_closing_ends_the_workers(engine: EngineDir) -> None:
    with opened(engine) as two:
        trace(two, GREEDY, num_draft_tokens=(K,))
        process_ids = two.worker_process_ids
        assert len(_alive(process_ids)) == 1
        pages = weakref.ref(two._local._state.target_kv[0].tensor)
    assert not _alive(process_ids)
    assert pages() is None
    with pytest.raises(RankError, match="engine is closed"):
        run_batch(two, _batch(5))


def test_a_worker_that_is_killed_is_named_within_seconds(engine: EngineDir) -> None:
    with opened(engine) as two:
        run_batch(two, _batch(5))
        os.kill(two.worker_process_ids[0], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(
            RankError, match=r"rank 1 of 2 failed: its process was ended by SIGKILL\. .*open the engine"
        ):
            run_batch(two, _batch(5))
        with pytest.raises(RankError, match="rank 1 of 2"):  # from then on
            run_batch(two, _batch(5))
        assert time.monotonic() - started < 15


@pytest.mark.parametrize(("kv_heads", "draft_kv_heads"), [(2, 1), (1, 4)])
def test_four_ranks_give_the_tokens_of_one_and_the_lost_one_is_named(
    kv_heads: int, draft_kv_heads: int, tmp_path: Path
) -> None:
    """With fewer K/V heads than ranks, each rank holds a copy of the head that its query heads read."""
    make_zlab_pair(tmp_path, num_key_value_heads=kv_heads, draft={"num_key_value_heads": draft_kv_heads})
    engines = [build(tmp_path, tp_size=tp_size) for tp_size in (1, 4)]
    with opened(engines[0]) as one, opened(engines[1]) as four:
        expected, _ = trace(one, SAMPLED, num_draft_tokens=(K,), num_new=6)
        found, _ = trace(four, SAMPLED, num_draft_tokens=(K,), num_new=6)
        assert integers(found) == integers(expected)
        torch.testing.assert_close(logprobs(found), logprobs(expected), rtol=0, atol=1e-4)
        layer_bytes, draft_layer_bytes = 2 * 16 * 4, 2 * 8 * 4  # of a head's K and V, float32, head_dim 16 and 8
        assert one.page_plan.bytes_per_token == 4 * kv_heads * layer_bytes + 2 * draft_kv_heads * draft_layer_bytes
        assert four.page_plan.bytes_per_token == 4 * layer_bytes + 2 * draft_layer_bytes
        os.kill(four.worker_process_ids[1], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(RankError, match=r"rank 2 of 4 failed: its process was ended by SIGKILL"):
            run_batch(four, _batch(5))
        assert time.monotonic() - started < 15
        assert not _alive(four.worker_process_ids)


def test_a_rank_that_fails_alone_is_named_with_its_error(engine: EngineDir) -> None:
    with opened(engine) as two:
        send, started = two._workers.send, time.monotonic()
        two._workers.send = lambda order: send(
            RunStep.after(None, plan_of(_batch(99))) if isinstance(order, RunStep) else order
        )
        with pytest.raises(RankError, match=r"rank 1 of 2 failed: IndexError: index out of range"):
            run_batch(two, _batch(5))
        assert time.monotonic() - started < 15
        assert not _alive(two.worker_process_ids)


def test_a_step_that_fails_on_every_rank_costs_only_the_step(pair: Pair) -> None:
    """The engine loop runs it again in parts."""
    expected = run_batch(pair.two, _batch(5))
    for _ in range(2):
        with pytest.raises(IndexError):
            run_batch(pair.two, _batch(99))
    assert run_batch(pair.two, _batch(5)) == expected


def test_a_stopped_worker_is_named_in_seconds_with_the_time_it_stood(engine: EngineDir) -> None:
    """The limits of exchanges and answers are those of the product, five minutes."""
    with opened(engine) as two:
        os.kill(two.worker_process_ids[0], signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(RankError, match=r"rank 1 of 2 failed: its process was stopped by a signal .* for 3 s\."):
            run_batch(two, _batch(5))
        assert 2 < time.monotonic() - started < 15
        assert not _alive(two.worker_process_ids)


def test_a_worker_that_is_stopped_for_a_moment_or_while_it_has_nothing_to_do_goes_on(
    engine: EngineDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_workers, "_LOOK_S", 0.1)
    with opened(engine) as two:
        (process_id,) = two.worker_process_ids
        expected = run_batch(two, _batch(5))
        os.kill(process_id, signal.SIGSTOP)
        time.sleep(1.0)  # ten looks, but no step
        os.kill(process_id, signal.SIGCONT)
        assert run_batch(two, _batch(5)) == expected
        os.kill(process_id, signal.SIGSTOP)
        threading.Timer(0.15, os.kill, (process_id, signal.SIGCONT)).start()
        assert run_batch(two, _batch(5)) == expected


def test_an_interrupt_in_a_step_ends_the_ranks(engine: EngineDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(plan: StepPlan) -> None:
        raise KeyboardInterrupt

    with opened(engine) as two:
        monkeypatch.setattr(two._local, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_batch(two, _batch(5))
        assert not _alive(two.worker_process_ids)
        with pytest.raises(RankError, match="interrupted"):
            run_batch(two, _batch(5))


def test_an_interrupt_while_weights_load_does_not_wait_for_them(
    engine: EngineDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_s: list[float] = []

    def load(*arguments: Any, **options: Any) -> None:
        started_s.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)  # handled in the main thread
        time.sleep(30)

    monkeypatch.setattr(TorchExecutor, "open", load)
    before = _children()
    with pytest.raises(KeyboardInterrupt), opened(engine):
        pass
    assert time.monotonic() - started_s[0] < 10
    assert _children() == before


def test_weights_may_load_longer_than_an_exchange_may_take(engine: EngineDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 loads for longer than the limit of an exchange, in which the other one waits for it."""
    monkeypatch.setitem(ranks.TIMEOUTS_S, "cpu", 4.0)
    load = TorchExecutor.open

    def slow(*arguments: Any, **options: Any) -> TorchExecutor:
        time.sleep(8)
        return load(*arguments, **options)

    monkeypatch.setattr(TorchExecutor, "open", slow)
    with opened(engine) as two:
        run_batch(two, _batch(5))


def test_failures_at_different_places_are_not_taken_as_alike(engine: EngineDir) -> None:
    """Rank 0 seems to have made one exchange more than the other when both raise."""
    with opened(engine) as two:
        two._ranks.num_calls += 1
        with pytest.raises(RankError, match=r"rank 1 of 2 failed: IndexError"):
            run_batch(two, _batch(99))
        assert not _alive(two.worker_process_ids)


def test_a_step_has_the_engines_number_of_threads_whoever_calls_it(engine: EngineDir) -> None:
    with opened(engine, num_threads=1) as two:
        torch.set_num_threads(2)
        run_batch(two, _batch(5))
        assert torch.get_num_threads() == 1


def test_outcomes_that_differ_in_any_part_have_different_fingerprints() -> None:
    row = RequestResult(
        emitted_tokens=(1, 2), logprobs=(-0.5, -0.25), num_accepted=1, draft_tokens=(3,), next_context_len=7
    )
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"emitted_tokens": (1, 4)},
        {"logprobs": (-0.5, -0.2500001)},
        {"num_accepted": 0},
        {"draft_tokens": (4,)},
        {"next_context_len": 8},
    )
    results = [result_of((replace(row, **change),), num_draft_tokens=1) for change in changes]
    assert len({fingerprint(result) for result in results}) == len(changes)


def test_a_worker_that_hangs_is_named_in_time(engine: EngineDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_workers, "_MAX_STOPPED_LOOKS", 1000)  # as if it did not run without being stopped
    monkeypatch.setitem(ranks.TIMEOUTS_S, "cpu", 3.0)
    monkeypatch.setattr(ranks, "_FAILURE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(rank_workers, "_END_TIMEOUT_S", 0.5)
    with opened(engine) as two:
        os.kill(two.worker_process_ids[0], signal.SIGSTOP)
        with pytest.raises(RankError, match=r"rank 1 of 2 failed: no answer for [3-9] s"):
            run_batch(two, _batch(5))
        assert not _alive(two.worker_process_ids)


def test_memory_that_is_too_small_is_refused_and_leaves_nothing(engine: EngineDir) -> None:
    with (
        pytest.raises(CapacityError, match="K/V pages: expected room for one sequence"),
        opened(engine, kv_cache_bytes=10),
    ):
        pass


def test_an_engine_that_a_worker_cannot_open_is_told(engine: EngineDir) -> None:
    (engine.path / "rank1.safetensors").unlink()  # rank 0 has checked the directory before
    found = "rank1.safetensors: expected a file, found none"
    with pytest.raises(EngineDirError, match=f"rank 1 of 2: .*{found}"), opened(engine):
        pass


def test_fewer_gpus_than_ranks_are_refused(engine: EngineDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_runs_on_gpu", lambda device: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(CudaBackend, "unsupported", lambda *given: [])  # of these tiny heads
    with pytest.raises(ConfigError, match="ranks: expected at most 1, the number of GPUs, found 2"):
        opening.open_executor(engine, RuntimeConfig(device="cuda"))


def test_workers_end_with_rank_0_whatever_ends_it(engine: EngineDir) -> None:
    """The program has no `if __name__ == "__main__"`, and is killed."""
    program = (
        "from dflash_trt.engine_dir import EngineDir\n"
        "from dflash_trt.core.runtime_config import RuntimeConfig\n"
        "from dflash_trt.executor.opening import open_executor\n"
        "config = RuntimeConfig(device='cpu', kv_cache_bytes=1 << 20)\n"
        f"executor = open_executor(EngineDir.open({str(engine.path)!r}), config)\n"
        "print(*executor.worker_process_ids, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process_ids = tuple(map(int, process.stdout.readline().split()))
        assert len(_alive(process_ids)) == 1
        process.kill()
    deadline = time.monotonic() + 10
    while _alive(process_ids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _alive(process_ids)


def _batch(token: int) -> StepBatch:
    request = ScheduledRequest(
        request_id="request",
        token_ids=(token,),
        context_len=0,
        num_candidates=0,
        page_ids=(0,),
        sampling=StepSampling(),
    )
    return StepBatch(requests=(request,), num_draft_tokens=K)


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def _alive(process_ids: tuple[int, ...]) -> list[int]:
    alive = []
    for process_id in process_ids:
        try:
            os.kill(process_id, 0)
        except ProcessLookupError:
            continue
        alive.append(process_id)
    return alive


class PollsItsStore:
    """Stands for NCCL's group, whose thread polls the file of the rendezvous until the group has ended."""

    def __init__(self, group: Any, directory: Path, events: list[str]) -> None:
        self._group, self._directory, self._events = group, directory, events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def abort(self) -> None:
        self._events.append(f"group, directory {'there' if self._directory.exists() else 'gone'}")
        self._group.abort()


@pytest.mark.parametrize("way", ["close", "collected"])
def test_graphs_end_before_the_group_and_the_group_before_its_store(
    engine: EngineDir, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    events: list[str] = []
    close, join = TorchExecutor.close, ranks.join
    directories: list[Path] = []

    def joined(options: Any, rank: int, address: str) -> Any:
        group = join(options, rank, address)
        directories.append(options.rendezvous.parent)
        group._group = PollsItsStore(group._group, options.rendezvous.parent, events)
        return group

    def closed(executor: TorchExecutor) -> None:
        events.append("graphs")
        close(executor)

    monkeypatch.setattr(ranks, "join", joined)
    monkeypatch.setattr(TorchExecutor, "close", closed)
    monkeypatch.setattr(ranks.RankWorkers, "forget_directory", lambda workers: None)  # as NCCL needs it
    two = opening.open_executor(engine, RuntimeConfig(device="cpu", num_threads=1, kv_cache_bytes=1 << 20))
    if way == "close":
        two.close()
    del two
    gc.collect()
    assert events == ["graphs", "group, directory there"]
    assert not directories[0].exists()
