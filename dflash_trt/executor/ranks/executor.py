"""An engine of several ranks as one executor: this process is rank 0, the others are its workers.

Each step is sent to the workers, run by all ranks at once, and the outcomes are compared. Apart from that only the
collectives of the network communicate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from dflash_trt.backends.page_budget import PagePlan
from dflash_trt.backends.step_inputs import check_plan
from dflash_trt.backends.torch.process_group import ExchangeError
from dflash_trt.core.errors import DFlashError, EngineDirError, RankError
from dflash_trt.core.process import OwnProcess
from dflash_trt.core.step_plan import ExecutorLimits, FinishedStep, StepHandle, StepPlan, StepResult
from dflash_trt.engine_dir import EngineDir
from dflash_trt.executor.ranks.launcher import RankWorkers, Reports, explained_failure
from dflash_trt.executor.ranks.messages import (
    Awake,
    GoOn,
    Opened,
    OpenShard,
    Raised,
    Ran,
    RankGoneError,
    Report,
    Returned,
    RunLogits,
    RunStep,
)
from dflash_trt.executor.ranks.nodes import Nodes
from dflash_trt.executor.ranks.shard import ShardExecutor, ShardOptions, check_devices, fingerprint, join, open_shard

if TYPE_CHECKING:
    from dflash_trt.backends.torch.process_group import ProcessRanks, StoreAddress
    from dflash_trt.core.runtime_config import RuntimeConfig
    from dflash_trt.core.step_plan import StepRows

# Limits of one collective and one answer of a worker; a GPU's kernels are compiled in the first steps.
TIMEOUTS_S = {"cpu": 300.0, "cuda": 900.0}
_START_TIMEOUT_S = 120.0  # until a process has imported everything
_LOAD_TIMEOUT_S = 1800.0  # for weights on a slow disk
_FAILURE_TIMEOUT_S = 5.0  # for the reports of the other ranks

_Outcome = TypeVar("_Outcome", StepResult, Tensor)
_T = TypeVar("_T")


class RankedExecutor:
    """Implements EngineExecutor. After a RankError it is closed, and its workers have ended.

    Where steps are queued, on GPUs, each step is queued on every rank at once, and its outcomes are compared when the
    next step's are read, so no rank waits for another rank's host. Elsewhere they are compared at once.

    The workers end with `close`, with the garbage collection of this object, and with the program.
    """

    def __init__(
        self,
        local: ShardExecutor,
        ranks: ProcessRanks,
        workers: RankWorkers,
        *,
        num_threads: int,
        places: Sequence[Mapping[bool, mmap]] = (),
    ) -> None:
        """Made by `open_ranks`. `num_threads` counts per rank; `places` are the host tier's of ranks 1, 2, ..."""
        self._local = local
        self._places = places
        self._num_threads = num_threads
        self._ranks = ranks
        self._workers = workers
        self._own_process = OwnProcess()
        self._sent_rows: StepRows | None = None
        self._uncompared: deque[Ran] = deque()  # this rank's outcomes; the workers' are read or on their way
        self._failure: str | None = None

    @property
    def limits(self) -> ExecutorLimits:
        return self._local.limits

    @property
    def page_plan(self) -> PagePlan:
        """The page plan, which is the same on each rank."""
        return self._local.page_plan

    @property
    def worker_process_ids(self) -> tuple[int, ...]:
        """Process ids of ranks 1, 2, ..."""
        return self._workers.process_ids

    @property
    def has_queue(self) -> bool:
        return self._local.has_queue

    @property
    def can_retry(self) -> bool:
        return self._failure is None

    def submit(self, plan: StepPlan) -> StepHandle:
        """Run one step on all ranks at once, or queue it; then `result` of the handle raises.

        Raises:
            RankError: a rank has ended, failed alone, or has another result, or had one in the step before.
            Exception: the error that the step raised on every rank; the next step may be run.
        """
        check_plan(plan, self.limits)
        order = RunStep.after(self._sent_rows, plan)
        self._sent_rows = plan.rows
        return self._step(lambda: self._workers.send(order), plan, lateness=1)

    def _step(self, send: Callable[[], None], own: StepPlan, *, lateness: int) -> StepHandle:
        """Send the workers' orders and submit this rank's step; a queued one may be compared late."""

        def start() -> StepHandle:
            return self._start(send, lambda: self._local.submit(own))

        if self.has_queue:
            return _QueuedStep(start(), partial(self._finish, lateness=lateness))
        return FinishedStep(lambda: self._finish(start().result))

    @property
    def target_logits(self) -> Callable[[Sequence[int]], Tensor]:  # float [N, V]
        """The target's logits after every token of one sequence; raises as `submit` does.

        An AttributeError, as on one rank, where the backend returns none.
        """
        local = self._local.target_logits

        def run(token_ids: Sequence[int]) -> Tensor:
            order = RunLogits(token_ids=tuple(token_ids))
            logits = self._start(lambda: self._workers.send(order), lambda: local(token_ids))
            return self._finish(lambda: logits)

        return run

    def place_bytes(self, place: int, is_state: bool) -> list[memoryview]:
        """See EngineExecutor."""
        own = self._local.place_bytes(place, is_state)
        num_places = self.limits.num_host_snapshots if is_state else self.limits.num_host_pages
        return [*own, *(_part(memory[is_state], place, num_places) for memory in self._places)]

    def close(self) -> None:
        """End the workers, and free this rank's weights and pages. Calling it again does nothing."""
        self._failure = self._failure or "The engine is closed. Open it again."
        self._workers.close()

    def _start(self, send: Callable[[], None], run: Callable[[], _T]) -> _T:
        """Send orders and follow this rank's."""
        self._own_process.check()
        if torch.get_num_threads() != self._num_threads:  # a setting of the calling thread
            torch.set_num_threads(self._num_threads)  # the number of threads changes how sums are rounded

        def send_and_run() -> _T:
            send()
            return run()

        return self._alike(send_and_run)

    def _finish(self, read: Callable[[], _Outcome], *, lateness: int = 0) -> _Outcome:
        """Read an outcome, and compare all but the last `lateness` outcomes with the workers'."""
        outcome = self._alike(read)
        self._uncompared.append(Ran(fingerprint=fingerprint(outcome)))
        with self._workers.watched():
            while len(self._uncompared) > lateness:
                reports = self._workers.receive(TIMEOUTS_S[self._ranks.device.type])
                if any(report != self._uncompared[0] for report in reports):
                    raise self._given_up(reports, None)
                self._uncompared.popleft()
        return outcome

    def _alike(self, act: Callable[[], _T]) -> _T:
        """Act as the other ranks do. An error ends all of them, unless each has it."""
        if self._failure is not None:
            raise RankError(self._failure)
        with self._workers.watched():
            try:
                return act()
            except Exception as error:
                reports = self._failed_reports()
                if self._have_failed_alike(reports, error):
                    self._continue_after(error)
                    raise
                raise self._given_up(reports, error) from error
            except BaseException:  # an interrupt: the ranks are no longer in step
                self._failure = "A step was interrupted. Open the engine again."
                self._kill_workers()
                raise

    def _failed_reports(self) -> Reports:
        """Reports on the order that failed here, or on an earlier one that failed on a worker."""
        reports = self._workers.receive(_FAILURE_TIMEOUT_S)
        while self._uncompared and all(report == self._uncompared[0] for report in reports):
            self._uncompared.popleft()
            reports = self._workers.receive(_FAILURE_TIMEOUT_S)
        return reports

    def _continue_after(self, error: Exception) -> None:
        try:
            self._workers.send(GoOn())
        except RankGoneError as gone:
            raise self._given_up([gone], error) from error

    def _have_failed_alike(self, reports: Reports, error: Exception) -> bool:
        """True if every rank raised after the same collective. Unknown, so False, on GPUs."""
        if isinstance(error, ExchangeError) or self._ranks.device.type != "cpu":
            return False
        num_calls = self._ranks.num_calls
        return all(isinstance(report, Raised) and report.num_calls == num_calls for report in reports)

    def _given_up(self, reports: Reports, error: Exception | None) -> DFlashError:
        explained = explained_failure(reports, error, hint=self._workers.hint)
        self._failure = str(explained)
        self._kill_workers()
        return explained

    def _kill_workers(self) -> None:
        if self._ranks.device.type != "cpu":  # this rank's GPU may wait for one that has ended
            self._workers.at_end.remove(self._local.close)
        self._workers.kill()


class DataParallelExecutor(RankedExecutor):
    """Ranks with requests of their own: each gets its own plan, and returns what it computed.

    A step that raises ends all ranks, as those that raised nothing wait for it.
    """

    _sent: Sequence[StepRows | None] = ()  # to ranks 1, 2, ...

    def submit(self, plan: StepPlan) -> StepHandle:
        """Run one step of all ranks at once, or queue it; `plan` has those of the other ranks.

        Raises:
            RankError: a rank has ended or failed.
        """
        for each in (plan, *plan.others):
            check_plan(each, self.limits)
        sent = self._sent or (None,) * len(plan.others)
        orders = [RunStep.after(before, other) for before, other in zip(sent, plan.others, strict=True)]
        self._sent = [other.rows for other in plan.others]
        return self._step(lambda: self._workers.send_each(orders), replace(plan, others=()), lateness=0)

    def _finish(self, read: Callable[[], _Outcome], *, lateness: int = 0) -> _Outcome:
        """Read this rank's outcome, with the workers' results; logits of a rank alone are rounded in its own way."""
        outcome = self._alike(read)
        with self._workers.watched():
            reports = self._workers.receive(TIMEOUTS_S[self._ranks.device.type])
            if not all(isinstance(report, Ran | Returned) for report in reports):
                raise self._given_up(reports, None)
        if isinstance(outcome, Tensor):
            return outcome
        return replace(outcome, others=tuple(report.result for report in reports if isinstance(report, Returned)))

    def _have_failed_alike(self, reports: Reports, error: Exception) -> bool:
        return False


class _QueuedStep:
    """A step that is queued on all ranks; implements StepHandle."""

    def __init__(self, local: StepHandle, finish: Callable[[Callable[[], StepResult]], StepResult]) -> None:
        self._local = local
        self._finish = finish

    def result(self) -> StepResult:
        return self._finish(self._local.result)

    @property
    def elapsed_s(self) -> float:
        return self._local.elapsed_s


def open_ranks(engine: EngineDir, config: RuntimeConfig, *, draft_lens: Sequence[int] | None = None) -> RankedExecutor:
    """Start a worker for each rank but 0 and open all shards. Memory and threads are per rank.

    Raises:
        ConfigError: fewer GPUs than ranks, or a PyTorch without gloo or NCCL.
        EngineDirError: a mapping that this backend does not run.
        CapacityError: the pages of one max_seq_len sequence do not fit on some rank.
        RankError: a worker did not start.
    """
    _check(engine, config)

    def order(rendezvous: Path | StoreAddress) -> OpenShard:
        options = ShardOptions(
            num_ranks=engine.manifest.pretrained_config.mapping.world_size,
            rendezvous=rendezvous,
            config=config,
            timeout_s=TIMEOUTS_S[config.device],
            load_timeout_s=_LOAD_TIMEOUT_S,
            draft_lens=None if draft_lens is None else tuple(draft_lens),
            has_own_requests=engine.manifest.pretrained_config.mapping.dp_size > 1,
        )
        return OpenShard(engine_dir=str(engine.path.absolute()), rank=1, options=options)

    nodes = Nodes(EngineDir.open(engine.path), config) if config.nnodes > 1 else None  # without a draft window
    return start_ranks(order, lambda ranks, options: open_shard(engine, 0, ranks, options), nodes)


def start_ranks(
    make_order: Callable[[Path | StoreAddress], OpenShard],
    open_local: Callable[[ProcessRanks, ShardOptions], ShardExecutor],
    nodes: Nodes | None = None,
) -> RankedExecutor:
    """Open one shard here, and one in a worker for each other rank, by the order for a rendezvous.

    `nodes` has the ranks of other nodes. Raises as `open_ranks` does.
    """
    workers = RankWorkers(nodes)
    try:
        with workers.watched():
            if nodes is None:
                return _start(make_order(workers.directory / "store"), open_local, workers)
            nodes.wait()
            return _start(replace(make_order(nodes.store_address), address=nodes.address), open_local, workers)
    except DFlashError:
        workers.kill()
        raise
    except Exception as error:
        explained = explained_failure(workers.receive(_FAILURE_TIMEOUT_S), error, hint=workers.hint)
        workers.kill()
        raise explained from error
    except BaseException:  # an interrupt, or SIGTERM
        workers.kill()
        raise


def _start(
    order: OpenShard, open_local: Callable[[ProcessRanks, ShardOptions], ShardExecutor], workers: RankWorkers
) -> RankedExecutor:
    options = order.options
    for rank in range(1, options.num_ranks):
        workers.start(replace(order, rank=rank))
    _expect(workers, Awake, timeout_s=_START_TIMEOUT_S)
    ranks = join(options, 0, order.address)
    if options.config.device == "cuda":  # NCCL polls its store
        workers.when_one_ends(ranks.abort)
    else:
        workers.forget_directory()
    workers.at_end.insert(0, ranks.close)
    local = open_local(ranks, options)
    workers.at_end.insert(0, local.close)  # CUDA graphs go before the group that they use
    opened = _expect(workers, Opened, timeout_s=options.load_timeout_s)
    places = []
    if options.config.nnodes == 1:  # else nobody reads them
        files = [report.place_files for report in opened if isinstance(report, Opened)]
        places = [_mapped(*worker) for worker in zip(workers.process_ids, files, strict=True)]
    num_threads = options.config.num_threads
    assert num_threads is not None, "resolved when the engine is opened"
    kind = DataParallelExecutor if options.has_own_requests else RankedExecutor
    return kind(local, ranks, workers, num_threads=num_threads, places=places)


def _mapped(process_id: int, place_files: Mapping[bool, int]) -> dict[bool, mmap]:
    """The memory of a worker's places, which is a file without a name."""
    found = {}
    for is_state, descriptor in place_files.items():
        with open(f"/proc/{process_id}/fd/{descriptor}", "r+b") as file:
            found[is_state] = mmap(file.fileno(), 0)
    return found


def _part(memory: mmap, place: int, num_places: int) -> memoryview:
    size = len(memory) // num_places
    return memoryview(memory)[place * size : (place + 1) * size]


def _expect(workers: RankWorkers, expected: type[Report], *, timeout_s: float) -> Reports:
    reports = workers.receive(timeout_s)
    if not all(isinstance(report, expected) for report in reports):
        raise explained_failure(reports, None, hint=workers.hint)
    return reports


def _check(engine: EngineDir, config: RuntimeConfig) -> None:
    """Checks before any process is started."""
    mapping = engine.manifest.pretrained_config.mapping
    if mapping.pp_size != 1:
        hint = "Build the engine with tensor parallelism alone."
        raise EngineDirError.about("mapping pp_size", expected="1", found=str(mapping.pp_size), hint=hint)
    check_devices(mapping.world_size // config.nnodes, config.device)
