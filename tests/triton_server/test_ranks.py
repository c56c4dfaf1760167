"""An engine of two ranks behind a real server: rank 0 in the model's process, which starts the other one."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from dflash_trt import LLM, SamplingParams
from dflash_trt.cli.main import cli
from scripts.triton_server.launcher import ServerProcess
from tests.triton_server.clients import counter, generate, sse, stream, until
from tests.triton_server.conftest import ENVIRONMENT, MAX_SEQ_LEN, deploy
from tests.triton_server.test_lifecycle import is_loopback, listening

PROMPTS = ["hello", "import os\n", "x", "def main():\n    return", "a b c d", "Zürich", "0123456789", "the end"]
NUM_TOKENS = 40
LONG = {"text_input": "x", "max_tokens": MAX_SEQ_LEN - 8, "end_id": -1}
SHARD = "rank1.safetensors"


@pytest.fixture(scope="module")
def engine_of_two(engine_dir: Path) -> Path:
    """The pair of `engine_dir`, for two ranks."""
    path = engine_dir.parent / "two_ranks"
    words = ["build", "--target", path.parent / "target", "--drafter", path.parent / "drafter", "-o", path]
    words += ["--tp-size", 2, "--dtype", "float32", "--max-seq-len", MAX_SEQ_LEN, "--max-batch-size", 16]
    result = CliRunner().invoke(cli, [*map(str, words), "--page-size", "8"])
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture
def start(engine_of_two: Path, installation: Path, tmp_path: Path) -> Any:
    """Make a server of the engine, which stands in the repository."""

    def make(*options: str, **more: Any) -> ServerProcess:
        deploy_two(engine_of_two, tmp_path / "models", "--copy-engine")
        return ServerProcess(tmp_path / "models", installation, tmp_path / "log", options=options, **more)

    return make


@pytest.fixture(scope="module")
def running(
    engine_of_two: Path, installation: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """One server for the tests that leave it serving."""
    path = tmp_path_factory.mktemp("two_ranks")
    deploy_two(engine_of_two, path / "models")
    with ServerProcess(path / "models", installation, path / "log") as server:
        yield server
        assert server.stop() == 0, server.log.read_text(errors="replace")[-4000:]
    assert not server.members()
    assert not server.shared_memory()


def deploy_two(engine: Path, repository: Path, *options: str) -> None:
    common = ["--environment", ENVIRONMENT, "--num-threads", 1, "--kv-cache-bytes", 1 << 26, "--drain-timeout", 1]
    deploy(engine, repository, "dflash", *common, *options)


def workers(server: ServerProcess) -> list[int]:
    """The processes of the ranks but rank 0."""
    return [pid for pid in server.members() if "dflash_trt.executor.ranks.worker" in psutil.Process(pid).cmdline()]


def kill_while_it_streams(server: ServerProcess, num_running: int = 1) -> str:
    """Kill rank 1 in the middle of a request, and of others; the error that its client gets."""
    (worker,) = workers(server)
    with sse(server, **LONG, stream=True) as responses:
        next(responses)
        until(lambda: counter(server, "requests_running") == num_running, "all requests run")
        os.kill(worker, signal.SIGKILL)
        *_, last = responses
    return str(last["error"])


def shard_of(server: ServerProcess) -> Path:
    return server.log.parent / "models" / "dflash" / "1" / "engine" / SHARD


def test_eight_clients_get_the_tokens_of_one_rank(running, engine_of_two, offline) -> None:
    sampling = [
        SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.5 * (i % 2), seed=i) for i in range(8)
    ]
    expected = [list(output.token_ids) for output in offline.generate(PROMPTS, sampling)]
    with LLM(engine_of_two, num_threads=1, kv_cache_bytes=1 << 26) as two:
        assert [list(output.token_ids) for output in two.generate(PROMPTS, sampling)] == expected

    def ask(i: int) -> list[int]:
        fields: dict[str, Any] = {"text_input": PROMPTS[i], "max_tokens": NUM_TOKENS, "end_id": -1, "seed": i}
        fields["temperature"] = sampling[i].temperature
        return list(
            generate(running, **fields)["output_ids"] if i < 4 else stream(running, **fields, stream=True).token_ids
        )

    with ThreadPoolExecutor(8) as clients:
        assert list(clients.map(ask, range(8))) == expected
    assert len(running.members()) == 3, "the server, one model instance, and one worker"


def test_the_ranks_listen_on_loopback_alone(running) -> None:
    (worker,) = workers(running)
    assert listening([worker]), "gloo of rank 1 listens: otherwise this test sees nothing"
    found = listening(running.members())
    assert all(is_loopback(host) for host, _ in found), found


def test_a_killed_rank_fails_what_runs_by_name_and_the_model_serves_on(running) -> None:
    fields = {"text_input": "hello", "max_tokens": NUM_TOKENS, "end_id": -1}
    expected = generate(running, **fields)["output_ids"]
    (worker,) = workers(running)
    with ThreadPoolExecutor(8) as clients:
        waiting = [clients.submit(generate, running, **LONG) for _ in range(7)]
        failed = [kill_while_it_streams(running, 8), *(future.result()["error"] for future in waiting)]
    for error in failed:
        assert "rank 1 of 2" in error and "SIGKILL" in error and "send the request again" in error, error
    assert generate(running, **fields)["output_ids"] == expected
    assert running.is_ready()
    assert len(workers(running)) == 1 and workers(running) != [worker]


def test_a_stop_of_the_whole_process_group_lets_requests_end(start) -> None:
    """As systemd stops a service, and a terminal its job."""
    with start(exit_timeout_s=20) as server:
        with sse(server, **LONG, stream=True) as responses:
            next(responses)
            os.killpg(server.pid, signal.SIGTERM)
            *_, last = responses
        assert last["finish_reason"] == "cancelled"
        assert server.wait() == 0, server.log.read_text(errors="replace")[-4000:]
        assert not server.members()


def test_the_ranks_of_a_killed_server_end(start) -> None:
    with start() as server:
        assert generate(server, text_input="x", max_tokens=1)["status"] == 200
        assert len(server.members()) == 3
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: not server.members(), "all processes of the model notice", timeout_s=10)


def test_an_engine_that_cannot_be_opened_again_stops_a_server_that_would_call_it_ready(start) -> None:
    with start(exit_timeout_s=20) as server:
        shard_of(server).unlink()
        assert "rank 1 of 2" in kill_while_it_streams(server)
        assert server.wait() == 0
        said = server.log.read_text(errors="replace")
        assert said.count("dflash_0_0 stops the server") == 1
        assert f"{SHARD}: expected a file, found none" in said


def test_an_instance_of_several_gpus_is_left_its_choice_by_the_server(engine_of_two, installation, tmp_path) -> None:
    """Up to where a machine without a GPU refuses it."""
    deploy_two(engine_of_two, tmp_path / "models", "--gpus", "2,3")
    with (
        pytest.raises(Exception, match="device: expected a CUDA GPU that PyTorch can use, found none"),
        ServerProcess(tmp_path / "models", installation, tmp_path / "log"),
    ):
        pass
    assert "dflash_0_0 (MODEL device 0)" in (tmp_path / "log").read_text()
