"""An engine in a child that was forked from its process: nothing hangs, and nothing of the parent's is harmed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.executor.rank_engines import build, make_zlab_pair

# In the child: every call that would wait for a thread that is not there, then the end of the program.
PROGRAM = """
import os, sys
from dflash_trt.core.errors import ForkError
from dflash_trt.core.request import SamplingParams
from dflash_trt.serving.llm import LLM

def refused(call):
    try:
        call()
    except ForkError as error:
        assert isinstance(error, RuntimeError)
        return str(error)
    raise AssertionError("not refused")

overlaps = sys.argv[2] == "overlapped"
llm = LLM(sys.argv[1], device="cpu", num_threads=1, kv_cache_bytes=1 << 20, overlap_scheduling=overlaps)
long = SamplingParams(max_new_tokens=40, ignore_eos=True)
expected = llm.generate([[5, 9, 2]], long)[0].token_ids
stream = llm.submit([5, 9, 2], long)
llm._engine._lock.acquire()  # as if the fork came in the middle of a commit
child = os.fork()
if child == 0:
    print("child:", refused(lambda: llm.generate([[1, 2]])))
    for call in (lambda: llm.submit([1]), lambda: next(iter(llm.stream([1]))), stream.result, lambda: llm.statistics):
        refused(call)
    stream.cancel()
    if sys.argv[2] != "overlapped":
        llm.close()
    sys.exit(0)  # runs the finalizers
llm._engine._lock.release()
_, status = os.waitpid(child, 0)
assert status == 0, status
assert stream.result().token_ids == expected
assert llm.generate([[5, 9, 2]], long)[0].token_ids == expected
llm.close()
print("parent: goes on")
"""


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_forked_child_is_refused_and_leaves_the_engine_alone(tmp_path: Path, num_ranks: int, loop: str) -> None:
    make_zlab_pair(tmp_path)
    engine = build(tmp_path, tp_size=num_ranks)
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM, str(engine.path), loop]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "child: engine: expected process" in ran.stdout
    assert "Open the engine in the child" in ran.stdout
    assert ran.stdout.endswith("parent: goes on\n")
