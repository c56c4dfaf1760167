"""Runs a part in child processes, so that a case that crashes, hangs or breaks the CUDA context costs itself alone.

Needs nothing but Python.
"""

import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from gpu_visit_parts.results import Results

MAX_CASE_S = 300.0
CONTEXT_IS_BROKEN = 3  # exit code of a child whose CUDA context no longer works: the next one takes the other cases
_START = "start of the process"


def run_part(
    part: int,
    command: Sequence[str],
    results: Results,
    *,
    deadline_s: float,
    max_case_s: float = MAX_CASE_S,
    num_jobs: int = 1,
) -> None:
    """Until all cases of the part have a result, or the deadline (of time.monotonic) is there.

    Several jobs run the command at once, each with `--share I N` and results of its own, which are put together.
    """
    shares = [results] if num_jobs == 1 else [results.share(index) for index in range(num_jobs)]
    with ThreadPoolExecutor(num_jobs) as pool:
        for index, share in enumerate(shares):
            words = [*command, "--out", str(share.directory), "--share", str(index), str(num_jobs)]
            pool.submit(_run_share, part, words, share, deadline_s=deadline_s, max_case_s=max_case_s)
    if num_jobs > 1:
        for share in shares:
            results.add_all(share)
    results.write_tables()


def _run_share(part: int, command: Sequence[str], results: Results, *, deadline_s: float, max_case_s: float) -> None:
    while time.monotonic() < deadline_s:
        num_before = len(results.done(part))
        results.start(part, _START)  # which the child ends
        with subprocess.Popen(command) as child:
            why = _watch(child, part, results, deadline_s, max_case_s)
        running = results.running(part)
        if running is not None:
            why = why or f"the process ended with {child.returncode}"
            results.end(part, running["case"], "unfinished" if why == "out of time" else "failed", why=why)
        if child.returncode == 0 or len(results.done(part)) == num_before or _START in _failed(part, results):
            return


def _watch(
    child: subprocess.Popen[bytes], part: int, results: Results, deadline_s: float, max_case_s: float
) -> str | None:
    """Why the child was ended here; None when it ended by itself."""
    while child.poll() is None:
        running = results.running(part)
        why = None
        if time.monotonic() >= deadline_s:
            why = "out of time"
        elif running is not None and time.time() - running["at"] > max_case_s:
            why = f"no end after {max_case_s:.0f} s"
        if why is not None:
            child.kill()
            child.wait()
            return why
        time.sleep(0.2)
    return None


def _failed(part: int, results: Results) -> set[str]:
    return {case for (_, case), row in results.cases(part).items() if row["status"] == "failed"}


def has_started(part: int, results: Results) -> None:
    """Said by the child when its imports are done."""
    results.end(part, _START, "ok")
