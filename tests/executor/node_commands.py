"""`dflash-trt` on nodes of a network, as processes of their own."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.namespaces import Node

SECRET = "a secret of the tests' own"
PORT = 29_512
_DFLASH_TRT = ("-m", "dflash_trt.cli.main")
_END_TIMEOUT_S = 60.0


def on_node(node: Node | None, *words: object, secret: str = SECRET) -> "subprocess.Popen[str]":
    """Python with these arguments on a node, or on this machine, with one thread and the secret."""
    argv = [sys.executable, *map(str, words)]
    return subprocess.Popen(
        argv if node is None else node.command(argv),
        env=os.environ | {"DFLASH_TRT_SECRET": secret, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_on(node: Node | None, *words: object) -> "subprocess.Popen[str]":
    """`dflash-trt run` on a CPU."""
    settings = ("--device", "cpu", "--num-threads", 1, "--kv-cache-bytes", "1MiB")
    return on_node(node, *_DFLASH_TRT, "run", *words, *settings)


@contextmanager
def ranks_on(
    node: Node | None, engine_dir: Path, master: str, *, nnodes: int = 2, node_rank: int = 1, secret: str = SECRET
) -> "Iterator[subprocess.Popen[str]]":
    """`dflash-trt ranks`, which must have ended by itself when the block ends."""
    words = ("--nnodes", nnodes, "--node-rank", node_rank, "--master-addr", master, "--master-port", PORT)
    process = on_node(node, *_DFLASH_TRT, "ranks", engine_dir, *words, secret=secret)
    try:
        yield process
        process.wait(_END_TIMEOUT_S)
    finally:
        process.kill()
        process.communicate()


def said(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """The exit code of a command, and its messages."""
    _, messages = process.communicate(timeout=_END_TIMEOUT_S)
    return process.returncode, messages


def children(process_id: int) -> Sequence[int]:
    """Processes that a process has started and that run."""
    return [*map(int, Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split())]


def alive(process_ids: Sequence[int]) -> list[int]:
    """Those that run; one that has ended may wait for a parent that does not ask."""
    found = []
    for process_id in process_ids:
        with suppress(FileNotFoundError, ProcessLookupError):
            state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
            found += [process_id] if state != "Z" else []
    return found


def wait_for(holds: Callable[[], object], timeout_s: float = 30.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end_s, "it did not come about"
        time.sleep(0.05)
