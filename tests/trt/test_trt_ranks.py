"""TensorRT engines of several ranks: real processes, a communicator, and executors over interpreted engines."""

import ctypes
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_trt.backends.tensorrt.communicator import Communicator, EngineOfRanks
from dflash_trt.core.errors import EngineDirError, RankError
from tests.engines import make_executor
from tests.logit_uses import answers
from tests.plugins.building import ROOT
from tests.traces import integers, trace
from tests.trt.networks import MAX_SEQ_LEN
from tests.trt.rank_process import REQUESTS
from tests.trt.test_step_tokens import make_pair


@pytest.fixture(scope="session")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in of plugins/tests/fake_nccl.cpp."""
    if shutil.which("c++") is None:
        pytest.skip("needs c++ to build a stand-in for NCCL")
    library: Path = tmp_path_factory.mktemp("nccl") / "libnccl.so.2"
    source = ROOT / "plugins" / "tests" / "fake_nccl.cpp"
    command = ["c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", source, "-o", library]
    subprocess.run([str(word) for word in command], check=True, timeout=120)
    return library


@pytest.fixture(scope="module", params=["tp", "dp"])
def outcome(
    trt: ModuleType, nccl: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Any]:
    """Of rank 0 of two, and one rank's steps under "expected"."""
    root = tmp_path_factory.mktemp("ranks")
    target, drafter = make_pair(root, family="qwen3" if request.param == "tp" else "qwen3_moe")
    words = [sys.executable, "-m", "tests.trt.rank_process"]
    rest = ["2", target, drafter, root / "store", nccl, request.param]
    commands = [[str(word) for word in (*words, rank, *rest)] for rank in range(2)]
    with subprocess.Popen(commands[1], cwd=ROOT) as other:
        try:
            first = subprocess.run(commands[0], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
        finally:
            if "first" not in locals() or first.returncode != 0:
                other.kill()
    assert (first.returncode, other.returncode) == (0, 0), first.stderr
    executor = make_executor(target, drafter, max_seq_len=MAX_SEQ_LEN)
    expected, _ = trace(executor, **REQUESTS)
    found: dict[str, Any] = json.loads(first.stdout)
    found["kind"] = request.param
    of_one_rank = {"expected": integers(expected), "expected uses": answers(executor)}
    return found | json.loads(json.dumps(of_one_rank))


def test_two_processes_give_the_tokens_of_one_rank(outcome: dict[str, Any]) -> None:
    assert outcome["steps"] == outcome["expected"]


def test_two_processes_change_and_read_logits_as_one_rank_does(outcome: dict[str, Any]) -> None:
    found, expected = outcome["uses of logits"], outcome["expected uses"]
    assert found["tokens"] == expected["tokens"]
    assert found["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-4)
    half = len(expected["tokens"]) // 2
    assert expected["tokens"][:half] == expected["tokens"][half:]  # of both loops


def test_every_context_has_the_communicator(outcome: dict[str, Any]) -> None:
    assert outcome["contexts with the communicator"] == outcome["contexts"] > 2


def test_graphs_and_contexts_are_gone_before_the_communicator(outcome: dict[str, Any]) -> None:
    assert outcome["graphs"] > 0
    assert outcome["alive at the end"] == [0]  # once


def test_sums_that_do_nothing_are_noticed_though_all_ranks_agree_on_the_logits(outcome: dict[str, Any]) -> None:
    messages = {
        "tp": "collectives of rank 0: expected K/V of target_kv.1 that depend on all 2 ranks, found K/V of this rank",
        "dp": "expected target_kv.0 of rank 1 as on rank 0, after the same tokens",
    }
    assert messages[outcome["kind"]] in outcome["complaint"]


def test_an_engine_that_refuses_the_communicator_is_refused() -> None:
    class Deaf:
        def create_execution_context(self, strategy: str) -> Any:
            return SimpleNamespace(set_communicator=lambda capsule: False)

    communicator = Communicator(None, ctypes.c_void_p(16), rank=0, num_ranks=2)
    with pytest.raises(EngineDirError, match="TensorRT set_communicator: expected True, found False"):
        EngineOfRanks(Deaf(), communicator).create_execution_context("USER_MANAGED")


@pytest.mark.parametrize(
    ("result", "message"),
    [(0, "sum over 2 ranks: expected 3, found 1 on rank 0"), (1, "ncclAllReduce: expected success, found boom")],
)
def test_a_wrong_sum_is_refused(result: int, message: str) -> None:
    def send_nothing(send: Any, receive: Any, *rest: Any) -> int:
        ctypes.memmove(receive, send, 4)
        return result

    nccl = SimpleNamespace(ncclAllReduce=send_nothing, ncclGetErrorString=lambda result: b"boom")
    with pytest.raises(RankError, match=message):
        Communicator(nccl, ctypes.c_void_p(16), rank=0, num_ranks=2).check_sum(torch.device("cpu"), 0)
