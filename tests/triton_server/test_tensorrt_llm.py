"""An engine of backend tensorrt_llm behind a real server, with the stand-in of TensorRT-LLM in its own environment."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from dflash_trt.cli.main import cli
from dflash_trt.core.request import SamplingParams
from dflash_trt.serving.tensorrt_llm.engine import PYTHON
from scripts.triton_server.launcher import ServerProcess
from tests.serving.trtllm_environment import stand_in_python
from tests.triton_server.clients import generate, sse, stream
from tests.triton_server.conftest import ENVIRONMENT, deploy


@pytest.fixture(scope="module")
def running(engine_dir: Path, installation: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The pair of `engine_dir`, as checkpoints for TensorRT-LLM."""
    path, pair = tmp_path_factory.mktemp("trtllm"), engine_dir.parent
    words = ["build", "--target", pair / "target", "--drafter", pair / "drafter", "-o", path / "engine"]
    words += ["--backend", "tensorrt_llm", "--max-seq-len", 256, "--max-num-tokens", 256, "--max-batch-size", 8]
    result = CliRunner().invoke(cli, list(map(str, words)))
    assert result.exit_code == 0, result.output
    deploy(path / "engine", path / "models", "dflash", "--environment", ENVIRONMENT)
    environment = {PYTHON: stand_in_python(path / "venv"), "STAND_IN_LOG": str(path / "told.jsonl")}
    with ServerProcess(path / "models", installation, path / "log", environment=environment) as server:
        yield server
        assert server.stop() == 0, server.log.read_text(errors="replace")[-4000:]
    assert not server.members()


def test_texts_and_streams_are_those_of_the_torch_engine(running, offline) -> None:
    """The tiny target is float32 on disk, and so are the tokens of the stand-in."""
    expected = offline.generate("hello", SamplingParams(max_new_tokens=24, ignore_eos=True))
    fields = {"text_input": "hello", "max_tokens": 24, "end_id": -1}
    assert generate(running, **fields)["text_output"] == expected.text
    streamed = stream(running, **fields, stream=True)
    assert streamed.token_ids == list(expected.token_ids) and len(streamed.responses) > 2


def test_a_client_that_leaves_cancels_its_request(running) -> None:
    with sse(running, text_input="x", max_tokens=200, end_id=-1, stream=True) as responses:
        next(responses)
    assert generate(running, text_input="x", max_tokens=2)["status"] == 200


def test_what_the_backend_refuses_is_named(running) -> None:
    answer = generate(running, text_input="x", max_tokens=4, return_log_probs=True)
    assert answer["status"] == 400 and "sampling logprobs" in answer["error"], answer
