"""The main program of a worker: open one rank's shard of an engine, then run the orders of rank 0.

Ends with rank 0's process in any case.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NoReturn

from dflash_trt.core.errors import DFlashError
from dflash_trt.core.step_plan import StepResult
from dflash_trt.executor.ranks.messages import (
    Awake,
    GoOn,
    Opened,
    OpenShard,
    Order,
    Raised,
    Ran,
    Returned,
    RunLogits,
    RunStep,
)
from dflash_trt.executor.ranks.shard import ShardExecutor, check_devices, fingerprint, join

if TYPE_CHECKING:
    from torch import Tensor

    from dflash_trt.backends.torch.process_group import ProcessRanks
    from dflash_trt.core.step_plan import StepRows

    _Outcome = StepResult | Tensor

# Time that a worker whose step failed waits for GoOn, longer than rank 0 waits for reports. Then it ends, and with it
# the collectives of ranks that did not fail.
FAILED_ALONE_S = 6.0
_PARENT_POLL_S = 0.5
_MAX_QUEUED = 2  # as rank 0's loop: staging memory has a block for each, and one that is read


def main() -> None:
    """Arguments: the file descriptor of the pipe to rank 0, and rank 0's process id."""
    pipe: Connection[object, Order] = Connection(int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(int(sys.argv[2]),), daemon=True).start()
    for each in (signal.SIGINT, signal.SIGTERM):  # a terminal and a supervisor send them to all processes at once
        signal.signal(each, signal.SIG_IGN)  # rank 0 decides: a server lets running requests end
    exit_code = 1
    try:
        exit_code = 0 if _serve(pipe) else 1
    except (EOFError, OSError):
        pass  # rank 0 has ended
    except BaseException:  # noqa: BLE001 - a bug of ours, which `_exit` would not show
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(exit_code)  # libraries would wait for ranks that have ended


def _serve(pipe: Connection[object, Order]) -> bool:
    """Return True if rank 0 has asked to stop, False after a failure of which it is told."""
    request = pipe.recv()
    assert isinstance(request, OpenShard)
    ranks = None
    try:
        check_devices(request.options.num_local_ranks, request.options.config.device)  # another machine than rank 0's
        pipe.send(Awake())
        ranks = join(request.options, request.rank, request.address)
        executor = request.open(ranks)
    except Exception as error:  # noqa: BLE001 - rank 0 tells the user
        pipe.send(_raised(error, ranks))
        return False
    pipe.send(Opened(executor.place_files))
    answers = Answers(
        pipe, ranks, ends_after_failure=executor.has_queue, returns_results=request.options.has_own_requests
    )
    with answers:
        return _follow(pipe, executor, answers)


def _follow(pipe: Connection[object, Order], executor: ShardExecutor, answers: Answers) -> bool:
    """Follow orders until the last, and return as `_serve` does.

    A GPU gets the next step while it runs the previous one, as on rank 0.
    """
    rows: StepRows | None = None
    while isinstance(order := pipe.recv(), RunStep | RunLogits | GoOn):
        if isinstance(order, GoOn):
            continue
        answers.wait_for_room()
        try:
            if isinstance(order, RunStep):
                plan = order.plan_after(rows)
                rows = plan.rows
                answers.give(executor.submit(plan).result)
            else:
                answers.give(partial(_same, executor.target_logits(order.token_ids)))
        except Exception as error:  # noqa: BLE001 - rank 0 tells the user
            answers.give(partial(_raise, error))
            if executor.has_queue or not pipe.poll(FAILED_ALONE_S):
                return False
    return True


class Answers:
    """Reports of outcomes to rank 0, in order, from a thread that waits for them."""

    def __init__(
        self,
        pipe: Connection[object, Order],
        ranks: ProcessRanks,
        *,
        ends_after_failure: bool,
        returns_results: bool = False,
    ) -> None:
        """`ends_after_failure`: the process may start nothing more, and ends unless rank 0 ends it.

        `returns_results`: rank 0 has none to compare with.
        """
        self._pipe, self._ranks = pipe, ranks
        self._ends_after_failure = ends_after_failure
        self._returns_results = returns_results
        self._room = threading.Semaphore(_MAX_QUEUED)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dflash-answers")

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()  # other GPUs may be in the collectives of what is queued

    def wait_for_room(self) -> None:
        """Until one more order may be started."""
        self._room.acquire()

    def give(self, read: Callable[[], _Outcome]) -> None:
        """Report what `read` returns or raises, when it does."""
        self._thread.submit(self._report, read)

    def _report_of(self, outcome: _Outcome) -> Returned | Ran:
        if self._returns_results and isinstance(outcome, StepResult):
            return Returned(result=outcome)
        return Ran(fingerprint=fingerprint(outcome))

    def _report(self, read: Callable[[], _Outcome]) -> None:
        try:
            self._pipe.send(self._report_of(read()))
        except Exception as error:  # noqa: BLE001 - rank 0 tells the user
            self._pipe.send(_raised(error, self._ranks))
            if self._ends_after_failure:
                time.sleep(FAILED_ALONE_S)
                os._exit(1)
        self._room.release()


def _same(outcome: _Outcome) -> _Outcome:
    return outcome


def _raise(error: Exception) -> NoReturn:
    raise error


def _raised(error: Exception, ranks: ProcessRanks | None) -> Raised:
    is_users = isinstance(error, DFlashError)
    return Raised(
        reason=str(error) if is_users else traceback.format_exception_only(error)[-1].strip(),
        traceback="".join(traceback.format_exception(error)),
        num_calls=0 if ranks is None else ranks.num_calls,
        error_class=type(error) if isinstance(error, DFlashError) else None,
    )


def _end_with(process_id: int) -> None:
    """Exit when the parent process has ended, even during a collective."""
    while os.getppid() == process_id:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)


if __name__ == "__main__":
    main()
