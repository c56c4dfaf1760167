"""`dflash-trt serve` over an engine whose second rank is another command's."""

import os
import signal
from pathlib import Path

import pytest

from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.request import SamplingParams
from dflash_trt.executor.ranks.joining import SECRET as VARIABLE
from dflash_trt.serving.llm import LLM
from tests.docs.pages import ROOT
from tests.executor.node_commands import PORT, SECRET, children, ranks_on, said
from tests.servers.dynamo.serving import Server, serving

DEMO = ROOT / "dflash_trt" / "demo"
LOOPBACK = "127.0.0.1"
PROMPT = "def fibonacci(n):"


@pytest.fixture
def engine(demo: Path, tmp_path: Path) -> Path:
    """Of two ranks; `demo` needs the extra."""
    config = BuildConfig(target=str(DEMO / "target"), drafter=str(DEMO / "drafter"), dtype="float32", tp_size=2)
    path = tmp_path / "engine"
    build_engine(config, path, base_dir=DEMO, overwrite=False, command=["test"], progress=lambda _: None)
    return path


def text(server: Server) -> str:
    answer = server.post("completions", prompt=PROMPT, max_tokens=16, temperature=0)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)


def test_a_service_whose_node_is_lost_waits_for_it_and_serves_on(engine: Path, tmp_path: Path, offline: LLM) -> None:
    [expected] = [output.text for output in offline.generate([PROMPT], SamplingParams(max_new_tokens=16))]
    nodes = ("--nnodes", "2", "--master-addr", LOOPBACK, "--master-port", str(PORT))
    with (
        ranks_on(None, engine, LOOPBACK) as first,
        serving(engine, tmp_path, "--device", "cpu", *nodes, num_replicas=1) as server,
    ):
        assert text(server) == expected
        os.kill(children(first.pid)[0], signal.SIGKILL)
        assert server.answers() == 500
        assert said(first)[0] == 1
        with ranks_on(None, engine, LOOPBACK) as again:
            server.wait_until(lambda: server.answers() == 200)
            assert text(server) == expected and len(children(again.pid)) == 1
            assert server.stop() == 143
        assert said(again)[0] == 0
