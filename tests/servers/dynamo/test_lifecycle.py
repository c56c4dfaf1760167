"""Start, losses and end of a service: sockets, processes, files, and the requests of a replica that is killed."""

import concurrent.futures
import ipaddress
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import psutil
import pytest

from dflash_trt.core.request import SamplingParams
from dflash_trt.servers.dynamo.state_directory import state_directory
from dflash_trt.servers.dynamo.supervisor import ServiceError, Supervisor, _Child
from dflash_trt.serving.llm import LLM
from tests.servers.dynamo.serving import Server, listening, serving

LONG: dict[str, Any] = {"model": "demo", "max_tokens": 1500, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def crowded(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two replicas with short queues, which tests may kill."""
    with serving(demo, tmp_path_factory.mktemp("crowded"), "--max-queue-len", "2") as running:
        yield running


def prompts(count: int, tag: str) -> list[str]:
    return [f"def {tag}_{index}(x):\n" for index in range(count)]


def test_every_socket_listens_on_loopback(crowded: Server) -> None:
    crowded.client().completions.create(model="demo", prompt="x", max_tokens=2)
    places = [place for process in crowded.processes() for place in listening(process)]
    assert len(places) >= 6  # HTTP and answers of the front end; requests and metrics of two workers
    assert [place for place in places if not ipaddress.ip_address(place.ip).is_loopback] == []


def test_a_client_that_leaves_ends_its_request_and_frees_its_pages(crowded: Server) -> None:
    for stream in [
        crowded.client().completions.create(prompt=text, stream=True, **LONG) for text in prompts(4, "gone")
    ]:
        next(iter(stream))
        stream.close()
    crowded.wait_until(lambda: crowded.total("dflash_trt:requests_running") == 0)
    assert crowded.total("dflash_trt:pages_in_use") == 0


def test_a_full_queue_is_answered_with_429(crowded: Server) -> None:
    codes: list[int] = []

    def ask(text: str) -> None:
        fields = {"prompt": text, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        codes.append(crowded.post("completions", **fields).status_code)

    with concurrent.futures.ThreadPoolExecutor(160) as pool:  # 64 places and 2 in the queue of each replica
        list(pool.map(ask, prompts(160, "crowd")))
    assert set(codes) == {200, 429}


def test_a_killed_replica_loses_only_its_requests_and_comes_back(crowded: Server, offline: LLM) -> None:
    texts: list[str] = []
    streams: list[tuple[str, Any]] = []
    while not all(crowded.metric("dflash_trt:requests_running", replica) for replica in range(2)):
        assert len(streams) < 40  # the router chooses by chance among replicas that are equally full
        texts.append(f"def killed_{len(texts)}(x):\n")
        streams.append(begun(crowded.client(), texts[-1], LONG))  # one after the other, for the queues are short
    outcomes: dict[int, str | None] = {}

    def read(index: int) -> None:
        first, stream = streams[index]
        try:
            outcomes[index] = first + "".join(chunk.choices[0].text for chunk in stream)
        except openai.APIError:
            outcomes[index] = None

    (victim,) = (worker for worker in crowded.workers() if crowded.port + 1 in ports(worker))
    victim.kill()
    with concurrent.futures.ThreadPoolExecutor(len(texts)) as pool:
        list(pool.map(read, range(len(texts))))
    lost = [index for index, text in outcomes.items() if text is None]
    assert 0 < len(lost) < len(texts)
    finished = [index for index in range(len(texts)) if index not in lost]
    sampling = SamplingParams(max_new_tokens=LONG["max_tokens"], ignore_eos=True)
    expected = offline.generate([texts[index] for index in finished], sampling)
    assert [outcomes[index] for index in finished] == [output.text for output in expected]
    # The other replica answers at once, and a new process takes the place.
    assert [crowded.post("completions", prompt="x", max_tokens=2).status_code for _ in range(10)] == [200] * 10
    crowded.wait_until(lambda: len(crowded.workers()) == 2)
    assert victim.pid not in {process.pid for process in crowded.workers()}
    assert "ended by signal 9" in crowded.output


def begun(client: openai.OpenAI, prompt: str, fields: dict[str, Any]) -> tuple[str, Any]:
    """A stream, and the text of its first chunk."""
    stream = client.completions.create(prompt=prompt, stream=True, **fields)
    return next(iter(stream)).choices[0].text, stream


def ports(process: psutil.Process) -> set[int]:
    return {place.port for place in listening(process)}


def test_a_gateway_and_a_front_end_that_die_come_back(crowded: Server) -> None:
    workers = {process.pid for process in crowded.workers()}
    doors = [process for process in crowded.processes() if listening(process) and process.pid not in workers]
    assert len(doors) == 2
    for door in doors:
        door.kill()
        crowded.wait_until(lambda: crowded.answers() == 200)
    assert "gateway ended by signal 9" in crowded.output
    assert "front end ended by signal 9" in crowded.output
    assert {process.pid for process in crowded.workers()} == workers


def test_after_a_pause_that_is_longer_than_its_leases_a_service_answers_again(crowded: Server) -> None:
    """As `docker pause` or the migration of a virtual machine stops it: a paused worker is registered no more."""
    before = {process.pid for process in crowded.workers()}
    paused = crowded.processes()
    for process in paused:
        process.suspend()
    time.sleep(14)
    workers = [process for process in paused if process.pid in before]
    for process in [process for process in paused if process not in workers] + workers:  # so that leases are over
        if process == workers[0]:
            time.sleep(1)
        process.resume()
    statuses = []
    crowded.wait_until(lambda: statuses.append((crowded.answers(), crowded.health())) or statuses[-1] == (200, 200))
    assert {status for pair in statuses for status in pair} <= {200, 503}
    crowded.wait_until(lambda: len(crowded.workers()) == 2 and before.isdisjoint(p.pid for p in crowded.workers()))
    assert all(f"replica {i} has lost its registration" in crowded.output for i in range(2))


def test_a_service_stops_without_leaving_anything(demo: Path, tmp_path: Path) -> None:
    with serving(demo, tmp_path, num_replicas=1) as server:
        stream = server.client().completions.create(prompt="x", stream=True, **LONG)
        next(iter(stream))
        processes = server.processes()
        assert server.stop(signal.SIGINT) == 130
    gone, alive = psutil.wait_procs(processes, timeout=5)
    assert (len(gone), alive) == (len(processes), [])
    assert [path for path in tmp_path.iterdir() if path != server.log and path.name != ".cache"] == []


def test_workers_end_with_a_supervisor_that_is_killed(demo: Path, tmp_path: Path) -> None:
    with serving(demo, tmp_path, num_replicas=1) as server:
        children = server.processes()[1:]
        server.process.kill()
        server.process.wait()
        assert psutil.wait_procs(children, timeout=20)[1] == []


def test_the_directory_of_a_service_that_was_killed_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_trt.servers.dynamo.state_directory.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "from dflash_trt.servers.dynamo.state_directory import state_directory as made\n"
    code += "import os\nwith made() as path: (path / 'card').mkdir(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)}, check=False)
    (killed,) = tmp_path.iterdir()
    foreign = tmp_path / "dflash-trt-serve-foreign"  # of an earlier version, without a lock
    foreign.mkdir()
    with state_directory() as first, state_directory() as second:
        assert set(tmp_path.iterdir()) == {foreign, first, second}
        assert killed not in (first, second)
    assert list(tmp_path.iterdir()) == [foreign]


def test_a_directory_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_trt.servers.dynamo.state_directory.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    linked, own = tmp_path / "dflash-trt-serve-link", tmp_path / "dflash-trt-serve-dead"
    linked.symlink_to(tmp_path / "elsewhere")
    own.mkdir()
    for path in (linked, own):
        (path / "lock").touch()
    with monkeypatch.context() as patch:
        patch.setattr("os.geteuid", lambda: 12345)
        with state_directory():
            assert linked.is_dir() and own.is_dir()
    with state_directory():
        assert (linked / "lock").exists() and not own.exists()


def test_a_worker_that_cannot_start_ends_the_service_with_its_reason(demo: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    with (
        pytest.raises(AssertionError, match="found a budget of 1 bytes"),
        serving(demo, tmp_path, "--kv-cache-bytes", "1"),
    ):
        raise RuntimeError("it started")
    assert time.monotonic() - started < 60


def test_a_process_writes_to_the_log_file_of_its_service(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Here the traceback of one that cannot read its task."""
    child = _Child(name="broken", task=None, environment=dict(os.environ), log_file=tmp_path / "log")
    child.start()
    assert child.process is not None and child.process.wait(timeout=120) != 0
    child.wait(time.monotonic())
    assert "Traceback" in (tmp_path / "log").read_text()
    assert capfd.readouterr().err == ""


def test_a_process_that_served_is_started_again_at_once_and_one_that_never_does_is_given_up() -> None:
    service: Any = SimpleNamespace(log_file=None)
    supervisor, child = Supervisor(service, lambda line: None), _Child(name="replica 0", task=None, environment={})
    supervisor._is_up = True
    for has_served in (True, False, True, False, True, True, True, True, True):
        child.has_served = has_served
        supervisor._lost(child, 1, 100.0)
        assert child.due_s == (100.0 if has_served else 101.0)
    child.has_served = False
    for pause_s in (1.0, 3.0, 7.0, 15.0):
        supervisor._lost(child, 1, 100.0)
        assert child.due_s == 100.0 + pause_s
    with pytest.raises(ServiceError, match="the 5th time in a row without serving"):
        supervisor._lost(child, 1, 100.0)
