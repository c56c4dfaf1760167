"""A process of `dflash-trt serve`: gateway, front end or worker. Ends with its parent process.

Its role comes through stdin, which stays open for as long as the supervisor lives.
"""

import os
import pickle
import signal
import sys
import threading

from dflash_trt.core.errors import DFlashError
from dflash_trt.core.process import let_threads_sleep
from dflash_trt.servers.dynamo.connections import raise_file_limit
from dflash_trt.servers.dynamo.settings import GatewaySettings, WorkerSettings

Task = WorkerSettings | GatewaySettings | tuple[str, ...]  # the front end's are the words of its command line


def main() -> int:
    """Return the exit code."""
    let_threads_sleep()
    raise_file_limit()
    stdin = os.fdopen(os.dup(0), "rb")
    task: Task = pickle.load(stdin)
    threading.Thread(target=_end_with, args=(stdin.fileno(),), name="dflash-supervisor-watch", daemon=True).start()
    try:
        return _run(task)
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the only output of a worker that cannot start
        return error.exit_code


def _run(task: Task) -> int:
    if isinstance(task, GatewaySettings):
        from dflash_trt.servers.dynamo.gateway import run_gateway

        return run_gateway(task)
    from dflash_trt.servers.dynamo.contract import run_frontend, run_worker

    return run_worker(task) if isinstance(task, WorkerSettings) else run_frontend(task)


def _end_with(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
