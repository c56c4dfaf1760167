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
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from dflash_trt.core.errors import DFlashError
from dflash_trt.engine_dir import EngineDir
from dflash_trt.executor.ranks.messages import Awake, GoOn, Opened, OpenShard, Order, Raised, Ran, RunLogits, RunStep
from dflash_trt.executor.ranks.shard import ShardExecutor, fingerprint, join, open_shard

if TYPE_CHECKING:
    from torch import Tensor

    from dflash_trt.backends.torch.process_group import ProcessRanks
    from dflash_trt.core.step_plan import StepResult

# Time that a worker whose step failed waits for GoOn, longer than rank 0 waits for reports. Then it ends, and with it
# the collectives of ranks that did not fail.
FAILED_ALONE_S = 6.0
_PARENT_POLL_S = 0.5


def main() -> None:
    """Arguments: the file descriptor of the pipe to rank 0, and rank 0's process id."""
    pipe: Connection[object, Order] = Connection(int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(int(sys.argv[2]),), daemon=True).start()
    for each in (signal.SIGINT, signal.SIGTERM):  # a terminal and a supervisor send them to all processes at once
        signal.signal(each, signal.SIG_IGN)  # rank 0 decides: a server lets running requests end
    exit_code = 1
    try:
        _serve(pipe)
        exit_code = 0
    except (EOFError, OSError):
        pass  # rank 0 has ended
    except BaseException:  # noqa: BLE001 - a bug of ours, which `_exit` would not show
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(exit_code)  # libraries would wait for ranks that have ended


def _engine(request: OpenShard) -> EngineDir:
    return EngineDir.open(request.engine_dir).with_draft_window(request.options.config.draft_window)


def _serve(pipe: Connection[object, Order]) -> None:
    request = pipe.recv()
    assert isinstance(request, OpenShard)
    ranks = None
    try:
        pipe.send(Awake())
        ranks = join(request.options, request.rank)
        executor = open_shard(_engine(request), request.rank, ranks, request.options)
    except Exception as error:  # noqa: BLE001 - rank 0 tells the user
        pipe.send(_raised(error, ranks))
        return
    pipe.send(Opened())
    while isinstance(order := pipe.recv(), RunStep | RunLogits | GoOn):
        if isinstance(order, GoOn):
            continue
        try:
            pipe.send(Ran(fingerprint=fingerprint(_run(executor, order))))
        except Exception as error:  # noqa: BLE001 - rank 0 tells the user
            pipe.send(_raised(error, ranks))
            if not pipe.poll(FAILED_ALONE_S):
                return


def _run(executor: ShardExecutor, order: RunStep | RunLogits) -> StepResult | Tensor:
    return (
        executor.submit(order.plan).result() if isinstance(order, RunStep) else executor.target_logits(order.token_ids)
    )


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
