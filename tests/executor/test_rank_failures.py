"""What is said of ranks that fail, and which outcomes of two ranks are the same."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt.backends.torch.process_group import ExchangeError
from dflash_trt.core.errors import CapacityError, RankError
from dflash_trt.core.logprobs import PromptScores, TopTokens
from dflash_trt.core.step_plan import StepResult
from dflash_trt.executor.ranks import messages
from dflash_trt.executor.ranks.executor import RankedExecutor
from dflash_trt.executor.ranks.launcher import RankWorkers, explained_failure
from dflash_trt.executor.ranks.messages import Gone, Opened, Raised, Ran, RankConnection, RankGoneError, WorkerProcess
from dflash_trt.executor.ranks.shard import fingerprint
from tests.cli.calls import RecordedError, Recorder

EARLY = Raised(reason="ValueError: early", traceback="", num_calls=2, error_class=None)
LATE = Raised(reason="ValueError: late", traceback="", num_calls=5, error_class=None)
USERS = Raised(reason="no room", traceback="", num_calls=9, error_class=CapacityError)
SILENT, ENDED = RankGoneError("no answer for 5 s", has_ended=False), RankGoneError("its process exited with 3")
OF_NODE = RankGoneError("its process exited with 4", rank=1)  # what rank 2 has from its node
OWN, EXCHANGE = ZeroDivisionError("mine"), ExchangeError("nobody came")


@pytest.mark.parametrize(
    ("reports", "error", "said"),
    [
        ([LATE, EARLY], OWN, "rank 2 of 3 failed: ValueError: early. "),
        ([EARLY, LATE], EXCHANGE, "rank 1 of 3 failed: ValueError: early. "),
        ([EARLY, ENDED], OWN, "rank 2 of 3 failed: its process exited with 3. "),
        ([EARLY, OF_NODE], OWN, "rank 1 of 3 failed: its process exited with 4. "),
        ([SILENT, LATE], EXCHANGE, "rank 2 of 3 failed: ValueError: late. "),
        ([Opened(), SILENT], OWN, "rank 0 of 3 failed: ZeroDivisionError: mine. "),
        ([Opened(), SILENT], EXCHANGE, "rank 2 of 3 failed: no answer for 5 s. "),
        ([Opened(), SILENT], None, "rank 2 of 3 failed: no answer for 5 s. "),
        ([Opened(), Opened()], EXCHANGE, "rank 0 of 3 failed: ExchangeError: nobody came. "),
        ([Opened(), Opened()], None, "3 ranks: expected the same tokens and log-probabilities on all ranks"),
    ],
)
def test_the_rank_that_failed_first_is_named(reports: list[Any], error: Exception | None, said: str) -> None:
    found = explained_failure(reports, error)
    assert type(found) is RankError and str(found).startswith(said)
    assert "send the request again" in str(found)


def test_the_way_on_depends_on_where_the_ranks_are() -> None:
    nodes: Any = SimpleNamespace(close=lambda: None)
    for given, way_on in ((None, "send the request again"), (nodes, "Start the engine on every node again")):
        workers = RankWorkers(given)
        assert way_on in workers.hint
        workers.close()


class Ended(RankConnection):
    """A worker of another node, of which the node says why it has ended."""

    is_stopped = False

    def wait(self) -> None: ...

    def kill(self, reason: str | None = None) -> None: ...

    def end(self, timeout_s: float) -> None: ...

    def _ending(self, error: Exception) -> RankGoneError:
        raise AssertionError(error)


def test_the_first_reason_of_an_end_stays() -> None:
    here, there = Pipe()
    worker = Ended(2, here)
    for reason in ("first", "second"):
        there.send(Gone(rank=1, reason=reason))
        with pytest.raises(RankGoneError, match="first") as found:
            worker.receive(5)
        assert found.value.rank == 1
    here.close()
    there.close()


def test_a_worker_imports_what_its_parent_would(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty entry of the path is the directory of now."""
    process = Recorder(messages.subprocess.Popen)
    monkeypatch.setattr(messages.subprocess, "Popen", process)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", "/elsewhere"])
    with pytest.raises(RecordedError):
        WorkerProcess(1, 7)
    assert process.arguments["env"]["PYTHONPATH"] == f"{tmp_path}{os.pathsep}/elsewhere"


def test_how_to_go_on_is_said_for_the_nodes_there_are() -> None:
    found = explained_failure([ENDED], OWN, hint="Start all nodes again.")
    assert str(found) == "rank 1 of 2 failed: its process exited with 3. Start all nodes again."


@pytest.mark.parametrize("others", [[ENDED, USERS], [EARLY, USERS], [SILENT, USERS]])
def test_what_a_user_can_mend_is_said_before_all_else(others: list[Any]) -> None:
    found = explained_failure(others, OWN)
    assert type(found) is CapacityError and str(found) == "rank 2 of 3: no room"


def result() -> StepResult:
    """Two rows of K = 2: one draft accepted, and none."""
    return StepResult(
        emitted_tokens=np.array([[1, 2, 0], [3, 0, 0]], np.int32),
        emitted_logprobs=np.array([[-0.5, -0.25, 0], [-1, 0, 0]], np.float32),
        num_accepted=np.array([1, 0], np.int32),
        next_context_lens=np.array([7, 8], np.int32),
        draft_tokens=np.array([[4, 5], [6, 7]], np.int32),
        top=TopTokens(
            np.arange(12, dtype=np.int32).reshape(2, 3, 2), -np.arange(12.0, dtype=np.float32).reshape(2, 3, 2)
        ),
        prompt=PromptScores(np.zeros(2, np.float32), TopTokens.zeros(2, 1)),
    )


COUNTED: dict[str, Callable[[StepResult], Any]] = {
    "top token": lambda r: r.top.token_ids.__setitem__((0, 1, 1), 99),
    "top log probability": lambda r: r.top.logprobs.__setitem__((1, 0, 0), 99),
    "prompt": lambda r: r.prompt.logprobs.__setitem__(1, 99),
    "prompt's top token": lambda r: r.prompt.top.token_ids.__setitem__((1, 0), 99),
    "prompt's top log probability": lambda r: r.prompt.top.logprobs.__setitem__((1, 0), 99),
    "last emitted token": lambda r: r.emitted_tokens.__setitem__((0, 1), 99),
    "last log probability": lambda r: r.emitted_logprobs.__setitem__((1, 0), 99),
    "accepted drafts": lambda r: r.num_accepted.__setitem__(1, 1),
    "context length": lambda r: r.next_context_lens.__setitem__(1, 99),
    "last draft": lambda r: r.draft_tokens.__setitem__((1, 1), 99),
    "logits without a token": lambda r: r.emitted_logprobs.__setitem__((0, 1), np.nan),
}
IGNORED: dict[str, Callable[[StepResult], Any]] = {
    "token behind the bonus": lambda r: r.emitted_tokens.__setitem__((0, 2), 99),
    "log probability behind the bonus": lambda r: r.emitted_logprobs.__setitem__((1, 1), 99),
    "NaN behind the bonus": lambda r: r.emitted_logprobs.__setitem__((1, 2), np.nan),
    "top token behind the bonus": lambda r: r.top.token_ids.__setitem__((1, 1, 0), 99),
}


@pytest.mark.parametrize("name", COUNTED)
def test_ranks_that_differ_in_what_is_read_are_found_out(name: str) -> None:
    changed = result()
    COUNTED[name](changed)
    assert fingerprint(changed) != fingerprint(result())


@pytest.mark.parametrize("name", IGNORED)
def test_ranks_may_differ_in_what_nobody_reads(name: str) -> None:
    changed = result()
    IGNORED[name](changed)
    assert fingerprint(changed) == fingerprint(result())


def test_nothing_counts_behind_logits_that_gave_no_token() -> None:
    """Neither the tokens after them nor drafts, which follow the bonus that is missing."""
    first, second = result(), result()
    for each, token in ((first, 8), (second, 9)):
        each.emitted_logprobs[0, 0] = np.nan
        each.emitted_tokens[0, :2] = each.draft_tokens[0] = token
        each.emitted_logprobs[0, 1] = -token
    assert fingerprint(first) == fingerprint(second) != fingerprint(result())


def test_logits_are_compared_bit_for_bit() -> None:
    logits = torch.arange(6.0).view(2, 3)
    changed = logits.clone()
    changed[1, 2] = torch.nextafter(changed[1, 2], torch.tensor(9.0))
    assert fingerprint(logits.t().contiguous().t()) == fingerprint(logits) != fingerprint(changed)
    assert fingerprint(replace(result(), top=None)) != fingerprint(result())


class Group:
    """A process group of which this rank has started two collectives."""

    num_calls = 2

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


class Workers:
    """One worker, which gives these reports."""

    hint = "Send the request again."

    def __init__(self, *reports: Any, ends_at: str = "") -> None:
        self._reports, self._ends_at = list(reports), ends_at
        self._is_watched = False
        self.sent: list[str] = []
        self.at_end: list[Any] = []
        self.is_killed = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        self._is_watched = True
        try:
            yield
        finally:
            self._is_watched = False

    def send(self, order: Any) -> None:
        assert self._is_watched, "a worker that is stopped would be waited for"
        self.sent.append(type(order).__name__)
        if self.sent[-1] == self._ends_at:
            raise ENDED

    def receive(self, timeout_s: float) -> list[Any]:
        assert self._is_watched, "a worker that is stopped would be waited for"
        return [self._reports.pop(0)]

    def kill(self) -> None:
        self.is_killed = True

    def close(self) -> None:
        self.sent.append("closed")


class Local:
    """Rank 0's own shard, whose logits are or raise these, in turn."""

    def __init__(self, *outcomes: Any) -> None:
        self._outcomes = list(outcomes)

    def target_logits(self, token_ids: Any) -> torch.Tensor:
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return torch.tensor([outcome])

    def close(self) -> None:
        """Graphs end."""


def executor_of(local: Local, workers: Workers, *, device: str = "cpu") -> RankedExecutor:
    workers.at_end.append(local.close)
    num_threads = torch.get_num_threads()
    return RankedExecutor(local, Group(device), workers, num_threads=num_threads)  # type: ignore[arg-type]


RAN = Ran(fingerprint=fingerprint(torch.tensor([3.0])))


def test_an_error_that_all_ranks_have_costs_the_step_alone() -> None:
    workers = Workers(EARLY, RAN)
    executor = executor_of(Local(OWN, 3.0), workers)
    with pytest.raises(ZeroDivisionError, match="mine"):
        executor.target_logits([1])
    assert executor.can_retry and not workers.is_killed
    assert executor.target_logits([1]) == 3.0
    assert workers.sent == ["RunLogits", "GoOn", "RunLogits"]


@pytest.mark.parametrize(
    ("outcome", "report", "said", "options"),
    [
        (OWN, LATE, "rank 1 of 2 failed: ValueError: late", {}),
        (OWN, RAN, "rank 0 of 2 failed: ZeroDivisionError: mine", {}),
        (EXCHANGE, EARLY, "rank 1 of 2 failed: ValueError: early", {}),
        (OWN, EARLY, "rank 1 of 2 failed: ValueError: early", {"device": "cuda"}),
        (4.0, RAN, "2 ranks: expected the same tokens", {}),
        (3.0, EARLY, "rank 1 of 2 failed: ValueError: early", {}),
        (OWN, EARLY, "rank 1 of 2 failed: its process exited with 3", {"ends_at": "GoOn"}),
        (3.0, ENDED, "rank 1 of 2 failed: its process exited with 3", {"ends_at": "RunLogits"}),
    ],
)
def test_ranks_out_of_step_end_and_say_so_from_then_on(
    outcome: Any, report: Any, said: str, options: dict[str, str]
) -> None:
    device, ends_at = options.get("device", "cpu"), options.get("ends_at", "")
    workers = Workers(report, ends_at=ends_at)
    executor = executor_of(Local(outcome), workers, device=device)
    with pytest.raises(RankError, match=said):
        executor.target_logits([1])
    assert workers.is_killed and not executor.can_retry
    assert bool(workers.at_end) == (device == "cpu"), "graphs may wait for a GPU whose rank has ended"
    for end in (executor.close, executor.close):
        with pytest.raises(RankError, match=said):
            executor.target_logits([1])
        end()
    assert workers.sent.count("closed") == 2


def test_every_step_computes_with_the_threads_of_the_rank() -> None:
    """Of the thread that calls, whatever it has computed with before."""
    num_threads = torch.get_num_threads()
    executor = executor_of(Local(3.0), Workers(RAN))
    torch.set_num_threads(num_threads + 1)
    executor.target_logits([1])
    assert torch.get_num_threads() == num_threads


def test_an_interrupt_ends_the_ranks_and_a_closed_engine_runs_nothing() -> None:
    workers = Workers()
    executor = executor_of(Local(KeyboardInterrupt()), workers)
    with pytest.raises(KeyboardInterrupt):
        executor.target_logits([1])
    assert workers.is_killed and not executor.can_retry
    with pytest.raises(RankError, match="interrupted"):
        executor.target_logits([1])
    closed = executor_of(Local(), Workers())
    closed.close()
    with pytest.raises(RankError, match="engine is closed"):
        closed.target_logits([1])
