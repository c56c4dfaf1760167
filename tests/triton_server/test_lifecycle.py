"""Loading, reloading, dying and stopping of a real server."""

import ipaddress
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from scripts.triton_server.launcher import ServerProcess
from tests.factories import edit_json
from tests.triton_server.clients import GrpcStream, generate, load, sse, unload, until
from tests.triton_server.conftest import ENVIRONMENT, ROOT, deploy


@pytest.fixture
def own_repository(engine_dir: Path, tmp_path: Path, installation: Path) -> Path:
    path = tmp_path / "repository"
    deploy(
        engine_dir,
        path,
        "dflash",
        "--environment",
        ENVIRONMENT,
        "--num-threads",
        1,
        "--copy-engine",
        "--kv-cache-bytes",
        1 << 26,
        "--drain-timeout",
        1,
    )
    return path


def make_server(repository: Path, installation: Path, tmp_path: Path, *options: str, **more: Any) -> ServerProcess:
    return ServerProcess(repository, installation, tmp_path / "log", options=options, **more)


def listening(pids: list[int]) -> set[tuple[str, int]]:
    sockets = [socket for pid in pids for socket in psutil.Process(pid).net_connections("inet")]
    return {(socket.laddr.ip, socket.laddr.port) for socket in sockets if socket.status == psutil.CONN_LISTEN}


def is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def test_what_deploy_prints_listens_on_loopback_alone_and_the_documented_restrictions_close_its_apis(
    engine_dir, installation, tmp_path, tritonclient
) -> None:
    repository = tmp_path / "models"
    printed = deploy(engine_dir, repository, "dflash", "--environment", ENVIRONMENT, "--num-threads", 1)
    assert f"Python environment of the model: {ENVIRONMENT.resolve()}" in printed
    command = shlex.split(next(line for line in printed.splitlines() if "tritonserver " in line))
    documented = re.findall(r"^ *(--\S+)=\$ADMIN_KEY$", (ROOT / "docs" / "deployment.md").read_text(), re.MULTILINE)
    assert len(documented) == 2
    restricted = [f"{option}=secret" for option in documented]
    with make_server(repository, installation, tmp_path, *restricted, exit_timeout_s=5) as server:
        words = psutil.Process(server.pid).cmdline()
        assert (Path(words[0]).name, *words[1 : len(command)]) == tuple(command), "the server runs what was printed"
        assert "--disable-auto-complete-config" in command
        ports = {server.http_port, server.grpc_port, server.metrics_port}
        until(lambda: {port for _, port in listening(server.members())} >= ports, "HTTP, gRPC and metrics listen")
        found = listening(server.members())
        assert {port for _, port in found} == ports
        assert all(is_loopback(host) for host, _ in found), found
        assert generate(server, text_input="x", max_tokens=2)["num_output_tokens"] == 2
        for path in ("systemsharedmemory/status", "models/dflash/config", "logging"):
            assert httpx.get(f"{server.url}/v2/{path}", timeout=10).status_code == 403
            assert httpx.get(f"{server.url}/v2/{path}", timeout=10, headers={"admin-key": "secret"}).status_code == 200
        client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
        with pytest.raises(Exception, match="restricted"):
            client.get_system_shared_memory_status()
        client.get_system_shared_memory_status(headers={"triton-grpc-protocol-admin-key": "secret"})
        client.close()


def test_a_reload_leaves_nothing_and_a_failed_one_says_why_while_the_old_model_goes_on(
    own_repository, installation, tmp_path
) -> None:
    """After a failed reload this Triton does not stop by itself, whatever the model: no exit code is looked at."""
    manifest = own_repository / "dflash" / "1" / "engine" / "config.json"
    options = ("--model-control-mode=explicit", "--load-model=dflash")
    with make_server(own_repository, installation, tmp_path, *options, exit_timeout_s=2) as server:
        expected = generate(server, text_input="x", max_tokens=8)["output_ids"]
        num_members, num_regions = len(server.members()), len(server.shared_memory())
        unload(server, "dflash")
        until(lambda: len(server.members()) == 1, "the process of the model ends")
        assert "dflash_0_0 closes" in server.log.read_text()
        assert load(server, "dflash") is None
        assert generate(server, text_input="x", max_tokens=8)["output_ids"] == expected
        assert (len(server.members()), len(server.shared_memory())) == (num_members, num_regions)
        edit_json(manifest, version="0.0")
        said = load(server, "dflash")
        assert said is not None
        assert "expected" in said and "found" in said and "dflash-trt build" in said, said
        assert generate(server, text_input="x", max_tokens=8)["output_ids"] == expected
    assert not server.members()
    assert not server.shared_memory()


def test_numpy_2_is_refused_at_load_by_name(engine_dir, installation, tmp_path) -> None:
    """A numpy that says it is version 2, in an environment of its own before the other one."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=120)
    site_packages = next((environment / "lib").glob("python*/site-packages"))
    real = next((ENVIRONMENT / "lib").glob("python*/site-packages"))
    (site_packages / "rest.pth").write_text(
        f"import site; site.addsitedir({str(real)!r})\n"
        "import numpy; numpy.__version__ = numpy.version.version = '2.4.6'\n"
    )
    shutil.copy(ENVIRONMENT / "bin" / "activate", environment / "bin" / "activate")
    text = (environment / "bin" / "activate").read_text()
    (environment / "bin" / "activate").write_text(text.replace(str(ENVIRONMENT), str(environment)))
    repository = tmp_path / "repository"
    deploy(engine_dir, repository, "dflash", "--environment", environment, "--accept-numpy-2")
    config = repository / "dflash" / "config.pbtxt"
    text = config.read_text()
    accepted = 'parameters {\n  key: "accepts_numpy_2"\n  value {\n    string_value: "true"\n  }\n}\n'
    assert accepted in text
    config.write_text(text.replace(accepted, ""))
    with (
        pytest.raises(Exception, match=r"expected version 1, .* found 2\.4\.6\. Install 'numpy<2' there"),
        make_server(repository, installation, tmp_path),
    ):
        pass


@pytest.mark.parametrize("transport", ["sse", "grpc"])
def test_the_server_stops_cleanly_while_a_stream_runs(
    own_repository, installation, tmp_path, tritonclient, transport
) -> None:
    """The stream may run for drain_timeout_s more, then it ends as cancelled."""
    fields = {"text_input": "x", "max_tokens": 2000, "stream": True, "end_id": -1, "stop_words": ["\0never"]}
    slow = {"OMP_NUM_THREADS": "1"}
    with make_server(own_repository, installation, tmp_path, environment=slow, exit_timeout_s=20) as server:
        if transport == "sse":
            with sse(server, **fields) as responses:
                next(responses)
                server.terminate()
                last = list(responses)[-1]
        else:
            connection = GrpcStream(tritonclient, server, **fields)
            connection.next()
            server.terminate()
            last = connection.rest().last
            connection.close()
        assert last["finish_reason"] == "cancelled"
        assert server.wait() == 0, server.log.read_text(errors="replace")[-4000:]
        assert not server.members()
        assert not server.shared_memory()


def has_died(server: ServerProcess) -> bool:
    return server.pid not in server.members()


def refuses(server: ServerProcess) -> bool:
    """By an error, or because Triton died with the process, as it seldom does."""
    try:
        return bool(generate(server, text_input="x", max_tokens=1)["status"] >= 400)
    except httpx.TransportError:
        return has_died(server)


def test_a_dead_model_process_is_found_by_a_request_or_a_read_timeout_and_leaves_nothing(
    own_repository, installation, tmp_path
) -> None:
    with make_server(own_repository, installation, tmp_path, exit_timeout_s=2) as server:
        (stub,) = [pid for pid in server.members() if pid != server.pid]
        with sse(server, read_timeout_s=2, text_input="x", max_tokens=2000, stream=True, end_id=-1) as responses:
            next(responses)
            os.kill(stub, signal.SIGKILL)
            # Nearly always it stays open; seldom Triton breaks it off. It never ends as if it were whole.
            with pytest.raises((httpx.ReadTimeout, httpx.RemoteProtocolError)):
                list(responses)
        until(lambda: refuses(server), "a request says so")
        assert server.is_ready() or has_died(server), "if this fails, Triton has learned to notice: say so in the docs"
        server.stop()
        assert not server.members()
        assert not server.shared_memory()


def test_a_model_process_whose_server_is_killed_ends_too(own_repository, installation, tmp_path) -> None:
    with make_server(own_repository, installation, tmp_path) as server:
        assert generate(server, text_input="x", max_tokens=1)["status"] == 200
        assert len(server.members()) == 2
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: not server.members(), "the process of the model notices", timeout_s=30)
