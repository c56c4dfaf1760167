"""What rank 0 hands on to its workers and to its own shard; processes that end, hang or are stopped."""

import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_trt.core.errors import CapacityError, ConfigError, EngineDirError, RankError
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.executor.ranks import executor as ranks
from dflash_trt.executor.ranks import launcher, messages, shard, worker
from dflash_trt.executor.ranks.executor import RankedExecutor
from dflash_trt.executor.ranks.launcher import RankWorkers
from dflash_trt.executor.ranks.messages import GoOn, OpenShard, Raised, RankGoneError, RankProcess, RunLogits, Stop
from dflash_trt.executor.ranks.shard import ShardOptions

CPU = RuntimeConfig(device="cpu", num_threads=2)


def engine_of(num_ranks: int, *, pp_size: int = 1) -> Any:
    mapping = Mapping(world_size=num_ranks * pp_size, tp_size=num_ranks, pp_size=pp_size)
    manifest = SimpleNamespace(pretrained_config=SimpleNamespace(mapping=mapping), backend="torch")
    return SimpleNamespace(manifest=manifest, path=Path("engine"))


def options_of(tmp_path: Path, **config: Any) -> ShardOptions:
    return ShardOptions(
        num_ranks=3,
        rendezvous=tmp_path / "store",
        config=RuntimeConfig(**config),
        timeout_s=3.0,
        load_timeout_s=70.0,
        draft_lens=(0, 2),
    )


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RankWorkers]]:
    """All that are made."""
    made: list[RankWorkers] = []
    monkeypatch.setattr(ranks, "RankWorkers", lambda nodes: made.append(RankWorkers(nodes)) or made[-1])
    yield made
    for each in made:
        each.close()


@pytest.mark.parametrize("draft_lens", [None, [0, 3]])
def test_ranks_open_with_the_limits_and_settings_of_the_engine(
    workers: list[RankWorkers], monkeypatch: pytest.MonkeyPatch, draft_lens: list[int] | None
) -> None:
    monkeypatch.setattr(ranks, "_start", lambda order, open_local, workers: order)
    order: Any = ranks.open_ranks(engine_of(3), CPU, draft_lens=draft_lens)
    options = order.options
    assert (order.engine_dir, order.rank) == (str(Path("engine").absolute()), 1)
    assert (options.num_ranks, options.config, options.draft_lens) == (3, CPU, draft_lens and tuple(draft_lens))
    assert options.rendezvous.parent == workers[0].directory and not options.rendezvous.exists()
    assert options.timeout_s == ranks.TIMEOUTS_S["cpu"] < options.load_timeout_s
    assert ranks.TIMEOUTS_S["cpu"] < ranks.TIMEOUTS_S["cuda"], "kernels are compiled in the first steps"
    assert ranks._FAILURE_TIMEOUT_S < worker.FAILED_ALONE_S, "a worker waits for longer than rank 0 does"


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (CapacityError("no room"), CapacityError, "^no room"),
        (ValueError("a bug"), RankError, "^rank 0 of 1 failed: ValueError: a bug"),
        (KeyboardInterrupt("now"), KeyboardInterrupt, "^now"),
    ],
)
def test_an_opening_that_fails_leaves_nothing_behind(
    workers: list[RankWorkers], monkeypatch: pytest.MonkeyPatch, error: BaseException, kind: Any, said: str
) -> None:
    def failing(order: OpenShard, open_local: Any, workers: RankWorkers) -> None:
        assert workers._is_watched.is_set(), "a worker that is stopped ends the opening"
        raise error

    monkeypatch.setattr(ranks, "_start", failing)
    with pytest.raises(kind, match=said):
        ranks.open_ranks(engine_of(2), CPU)
    assert not workers[0].directory.exists() and not workers[0]._is_watched.is_set()


def test_ranks_that_this_machine_cannot_have_are_refused_before_any_starts(
    workers: list[RankWorkers], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineDirError, match="mapping pp_size: expected 1, found 2"):
        ranks.open_ranks(engine_of(2, pp_size=2), CPU)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="expected at most 2, the number of GPUs, found 3"):
        ranks.open_ranks(engine_of(3), RuntimeConfig(device="cuda"))
    with pytest.raises(ConfigError, match="expected at most 2, the number of GPUs, found 3"):
        ranks.open_ranks(engine_of(6), RuntimeConfig(device="cuda", nnodes=2, master_addr="127.0.0.1"))
    monkeypatch.setattr(shard.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match=r"expected torch.distributed with NCCL, found none"):
        ranks.open_ranks(engine_of(2), RuntimeConfig(device="cuda"))
    monkeypatch.setattr(shard.distributed, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"expected torch.distributed with gloo, found none"):
        ranks.open_ranks(engine_of(2), CPU)
    assert not workers


@pytest.mark.parametrize(
    ("device", "nnodes", "of_rank"), [("cpu", 1, "cpu"), ("cuda", 1, "cuda:2"), ("cuda", 3, "cuda:0")]
)
def test_a_rank_joins_on_its_own_device_with_the_limits_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, nnodes: int, of_rank: str
) -> None:
    """A node's first rank has its first GPU."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(shard.ProcessRanks, "join", lambda path, **named: (path, named))
    options = options_of(tmp_path, device=device, nnodes=nnodes)
    assert shard.join(options, 2, "10.0.0.2") == (
        tmp_path / "store",
        {"rank": 2, "num_ranks": 3, "device": torch.device(of_rank), "timeout_s": 3.0, "opening_timeout_s": 70.0}
        | {"address": "10.0.0.2"},
    )
    assert calls == ([torch.device(of_rank)] if device == "cuda" else [])


def test_a_node_with_fewer_gpus_than_its_ranks_says_so_before_others_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    order = OpenShard(engine_dir="dir", rank=2, options=options_of(tmp_path, device="cuda", nnodes=3))
    reports: list[Any] = []
    assert not worker._serve(SimpleNamespace(recv=lambda: order, send=reports.append))  # type: ignore[arg-type]
    [report] = reports
    assert report.error_class is ConfigError
    assert report.reason.startswith("ranks: expected at most 0, the number of GPUs, found 1.")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_shard_is_opened_by_the_backend_of_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    names: list[str] = []
    backend = SimpleNamespace(open=lambda *given, **named: (*given, named, threading.current_thread()))
    monkeypatch.setattr(shard, "backend_of", lambda name: names.append(name) or backend)
    engine, group, options = engine_of(3), object(), options_of(tmp_path, device=device)
    opened: Any = shard.open_shard(engine, 2, group, options)  # type: ignore[arg-type]
    assert opened[:3] == (engine, options.config, {"rank": 2, "ranks": group, "draft_lens": (0, 2)})
    assert names == ["cuda" if device == "cuda" else "torch"]
    assert (opened[3] is threading.current_thread()) == (device == "cuda")


def test_a_worker_opens_the_engine_with_the_window_of_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, group = SimpleNamespace(with_draft_window=lambda window: ("windowed", window)), object()
    monkeypatch.setattr(messages.EngineDir, "open", lambda path: opened if path == "dir" else None)
    monkeypatch.setattr(messages, "open_shard", lambda *given: given)
    order = OpenShard(engine_dir="dir", rank=1, options=options_of(tmp_path, draft_window=9))
    found: Any = order.open(group)  # type: ignore[arg-type]
    assert found == (("windowed", 9), 1, group, order.options)


def test_places_of_all_ranks_are_found_by_their_number_and_kind() -> None:
    """Two places of pages and four of snapshots on each of three ranks."""
    own = memoryview(b"own")
    limits = SimpleNamespace(num_host_pages=2, num_host_snapshots=4)
    local: Any = SimpleNamespace(limits=limits, place_bytes=lambda place, is_state: [own])
    places: list[Any] = [{False: b"pages%d-PAGES%d-" % (n, n), True: b"a%db%dc%dd%d" % (n, n, n, n)} for n in (1, 2)]
    executor = RankedExecutor(local, *([None] * 2), num_threads=1, places=places)  # type: ignore[arg-type]
    assert [bytes(part) for part in executor.place_bytes(1, False)] == [b"own", b"PAGES1-", b"PAGES2-"]
    assert [bytes(part) for part in executor.place_bytes(1, True)] == [b"own", b"b1", b"b2"]


def test_a_report_of_a_failure_tells_a_users_mistake_from_a_bug() -> None:
    group: Any = SimpleNamespace(num_calls=7)
    users = worker._raised(CapacityError("no room"), None)
    assert (users.reason, users.num_calls, users.error_class) == ("no room", 0, CapacityError)
    bug = worker._raised(ZeroDivisionError("bug"), group)
    assert bug == Raised(
        reason="ZeroDivisionError: bug", traceback="ZeroDivisionError: bug\n", num_calls=7, error_class=None
    )


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_worker_whose_step_failed_goes_on_only_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    reports: list[Any] = []
    orders = [OpenShard(engine_dir="dir", rank=1, options=options_of(tmp_path, device="cpu"))]
    orders += [RunLogits(token_ids=(1,)), GoOn(), RunLogits(token_ids=(2,)), Stop()]
    pipe: Any = SimpleNamespace(recv=lambda: orders.pop(0), send=reports.append, poll=lambda timeout_s: goes_on)

    def failing(token_ids: tuple[int, ...]) -> None:
        raise ValueError(token_ids)

    monkeypatch.setattr(worker, "join", lambda options, rank, address: SimpleNamespace(num_calls=rank))
    opened = SimpleNamespace(target_logits=failing, has_queue=False, place_files={})
    monkeypatch.setattr(OpenShard, "open", lambda order, ranks: opened)
    assert worker._serve(pipe) == goes_on, "it was asked to stop"
    said = ["ValueError: (1,)", "ValueError: (2,)"] if goes_on else ["ValueError: (1,)"]
    assert [report.reason for report in reports[2:]] == said and len(orders) == (0 if goes_on else 3)


class Watched:
    """A process that is stopped at these looks; none is left after a kill."""

    def __init__(self, rank: int, looks: list[bool], is_over: threading.Event) -> None:
        self.rank, self.looks, self._is_over = rank, looks, is_over
        self.reason = ""

    @property
    def is_stopped(self) -> bool:
        return self.looks.pop(0) if self.looks else False

    def kill(self, reason: str | None = None) -> None:
        self.reason = reason or ""
        self._is_over.set()


def test_a_process_is_ended_that_was_stopped_for_three_looks_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_LOOK_S", 0.01)
    is_watched, is_over = threading.Event(), threading.Event()
    is_watched.set()
    often = Watched(1, [True, True, False] * 4, is_over)
    long = Watched(2, [False, True, True, False, True, True, True, True], is_over)
    launcher.end_stopped([often, long], is_watched, is_over)
    assert len(long.looks) == 1 and not often.reason
    assert long.reason == "its process was stopped by a signal such as SIGSTOP for 0 s"


def test_a_process_that_is_silent_or_gone_is_told_apart() -> None:
    process = RankProcess(1)
    with pytest.raises(RankGoneError, match="no answer for 0 s") as silent:
        process.receive(0.0)
    assert not silent.value.has_ended and not process.is_stopped
    process._sent_s -= 100.0
    with pytest.raises(RankGoneError, match="no answer for 100 s"):
        process.receive(0.0)
    process.send(Stop())  # the time of an answer begins with the order
    with pytest.raises(RankGoneError, match="no answer for 0 s"):
        process.receive(0.0)
    process.kill("the first reason")
    process.kill("another one")
    process.wait()
    for call in (lambda: process.receive(5.0), lambda: process.send(Stop())):
        with pytest.raises(RankGoneError, match="the first reason") as gone:
            call()
        assert gone.value.has_ended
    process.end(0.0)
    assert not process.is_stopped


class Answering:
    """A worker's process that takes a while to answer, or is gone."""

    def __init__(self, rank: int, *, answers_after_s: float = 0.0, is_gone: bool = False) -> None:
        self.rank, self._answers_after_s, self._is_gone = rank, answers_after_s, is_gone
        self.calls: list[Any] = []

    def send(self, order: Any) -> None:
        self.calls.append(order)
        if self._is_gone:
            raise RankGoneError("gone")

    def receive(self, timeout_s: float) -> Any:
        self.calls.append(timeout_s)
        time.sleep(self._answers_after_s)
        if self._is_gone:
            raise RankGoneError("gone")
        return f"report {self.rank}"

    def end(self, timeout_s: float) -> None:
        self.calls.append(timeout_s)
        time.sleep(self._answers_after_s)

    def kill(self, reason: str | None = None) -> None:
        self.calls.append("killed")

    def wait(self) -> None:
        self.calls.append("waited")


def workers_of(*processes: Answering) -> RankWorkers:
    made = RankWorkers()
    made._processes.extend(processes)  # type: ignore[arg-type]
    return made


def test_all_workers_answer_within_one_limit() -> None:
    slow, gone, last = Answering(1, answers_after_s=0.2), Answering(2, is_gone=True), Answering(3)
    made = workers_of(slow, gone, last)
    first, second, third = made.receive(60.0)
    assert (first, third) == ("report 1", "report 3") and isinstance(second, RankGoneError)
    assert 60.0 >= slow.calls[0] >= last.calls[0] + 0.2 > 0.2
    assert made.receive(0.1)[2] == "report 3" and last.calls[1] == 0.0
    made.close()


def test_all_workers_are_asked_to_stop_and_share_the_time_for_it() -> None:
    """Then the group goes, and the directory whatever happens; once."""
    gone, slow, last = Answering(1, is_gone=True), Answering(2, answers_after_s=0.2), Answering(3)
    made, ended = workers_of(gone, slow, last), []

    def failing() -> None:
        ended.append([each.calls for each in (gone, slow, last)])
        raise ValueError("the group")

    made.at_end.append(failing)
    with pytest.raises(ValueError, match="the group"):
        made.close()
    made.close()
    assert len(ended) == 1 and not made.directory.exists()
    assert all(isinstance(each.calls[0], Stop) and len(each.calls) == 2 for each in (gone, slow, last))
    assert launcher._END_TIMEOUT_S >= slow.calls[1] >= last.calls[1] + 0.2


def test_killed_workers_are_not_taken_for_one_that_ended_by_itself() -> None:
    one, other, ends = Answering(1), Answering(2), []
    made = workers_of(one, other)
    made.when_one_ends(lambda: ends.append("ended"))
    while len(ends) < 2:  # each of them is watched
        time.sleep(0.01)
    made.kill()
    made.when_one_ends(lambda: ends.append("after the end"))
    while one.calls.count("waited") + other.calls.count("waited") < 4:
        time.sleep(0.01)
    time.sleep(0.05)
    assert ends == ["ended"] * 2
    assert "killed" in one.calls and "killed" in other.calls and not made.directory.exists()


def test_a_worker_that_is_killed_has_not_ended_by_itself() -> None:
    class Mortal(Answering):
        has_ended = threading.Event()

        def wait(self) -> None:
            self.has_ended.wait(10)

        def kill(self, reason: str | None = None) -> None:
            self.has_ended.set()
            time.sleep(0.1)

    made, ends = workers_of(Mortal(1)), []
    made.when_one_ends(lambda: ends.append("ended"))
    made.kill()
    assert ends == []


def test_a_forked_child_leaves_the_workers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Answering(1)
    made = workers_of(process)
    with monkeypatch.context() as patch:
        patch.setattr(type(made._own_process), "is_this", False)
        made.kill()
        launcher._end(*made.close.peek()[2])  # type: ignore[index]
        assert process.calls == [] and made.directory.exists()
    made.close()
    assert not made.directory.exists()


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_worker_is_ended_with_the_others_also_if_it_was_gone_when_it_got_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    monkeypatch.setattr(launcher, "RankProcess", lambda rank: Answering(rank, is_gone=is_gone))
    made, order = RankWorkers(), OpenShard(engine_dir="dir", rank=2, options=options_of(tmp_path))
    with pytest.raises(RankGoneError) if is_gone else nullcontext():
        made.start(order)
    [process] = made._processes
    assert (process.rank, process.calls) == (2, [order])  # type: ignore[attr-defined]
    made.close()
    assert isinstance(process.calls[1], Stop) and len(process.calls) == 3  # type: ignore[attr-defined]
