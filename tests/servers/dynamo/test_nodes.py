"""Workers on several machines, found through etcd: texts, routing, and machines that die and come back.

Machines are network namespaces. The commands are those of docs/scaling.md, with shorter times.
"""

import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dflash_trt import SamplingParams
from dflash_trt.serving.llm import LLM
from tests.servers.dynamo.machines import (
    LEASE_S,
    STREAM_TIMEOUT_S,
    Answer,
    Cluster,
    FrontEnd,
    Worker,
    cluster,
    needed,
    wait_until,
)
from tests.servers.dynamo.test_roles import LOADED, SAVED, prompt_of

EMITTED = "dflash_trt:output_tokens_total"
LONG: dict[str, Any] = {"max_tokens": 1200, "temperature": 0, "ignore_eos": True, "stream": True}
FORGOTTEN_S = LEASE_S + 5  # etcd ends leases by whole seconds, and this machine is busy


@dataclass
class Deployment:
    cluster: Cluster
    workers: list[Worker]
    migrating: FrontEnd
    failing: FrontEnd  # its requests end with their worker

    @property
    def addresses(self) -> set[str]:
        return {worker.node.address for worker in self.workers}

    def wait(self) -> None:
        for front_end in (self.migrating, self.failing):
            wait_until(lambda front_end=front_end: front_end.is_serving(self.addresses))


@pytest.fixture(scope="module")
def deployment(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with cluster(demo, tmp_path_factory.mktemp("cluster")) as made:
        for node in made.nodes:  # a second network, before the one of the cluster
            for words in (("link", "add", "public", "type", "bridge"), ("link", "set", "public", "up")):
                subprocess.run(["ip", "-n", node.name, *words], check=True)
            subprocess.run(["ip", "-n", node.name, "addr", "add", "192.0.2.1/24", "dev", "public"], check=True)
        workers = [made.worker(node) for node in made.nodes]
        yield Deployment(made, workers, made.front_end(8000), made.front_end(8001, "--migration-limit", "0"))


@pytest.fixture
def ready(deployment: Deployment) -> Deployment:
    deployment.wait()
    return deployment


def alone(offline: LLM, prompt: Any, **fields: Any) -> str:
    names = {"max_tokens": "max_new_tokens"}
    given = {names.get(name, name): value for name, value in fields.items() if name != "stream"}
    return offline.generate(prompt, SamplingParams(**given)).text


def test_texts_are_those_of_one_engine_and_both_machines_answer(ready: Deployment, offline: LLM) -> None:
    greedy, sampled = {"max_tokens": 40, "temperature": 0}, {"max_tokens": 40, "temperature": 0.9}
    requests = [
        (f"def f{index}(x):\n", fields | {"stream": stream} | ({"seed": index} if fields is sampled else {}))
        for index in range(6)
        for fields in (greedy, sampled)
        for stream in (False, True)
    ]
    before = [worker.metric(EMITTED) for worker in ready.workers]
    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(lambda request: ready.migrating.ask(request[0], **request[1]), requests)]
    for (prompt, fields), answer in zip(requests, answers, strict=True):
        assert (answer.text, answer.error) == (alone(offline, prompt, **fields), None)
    known = ready.migrating.instances()
    assert {known[answer.worker] for answer in answers if answer.worker is not None} == ready.addresses
    assert all(worker.metric(EMITTED) > count for worker, count in zip(ready.workers, before, strict=True))


def test_a_repeated_prompt_goes_to_the_machine_that_has_it(ready: Deployment, offline: LLM) -> None:
    owners_of_prompts(ready.migrating, offline, ready.addresses)


def owners_of_prompts(front_end: FrontEnd, offline: LLM, addresses: set[str]) -> None:
    """Eight prompts at once, so that both machines have some; then each of them twice."""
    prompts = [prompt_of(offline, f"owned{index}") for index in range(8)]
    with ThreadPoolExecutor(8) as pool:
        first = [*pool.map(lambda prompt: front_end.ask(prompt, max_tokens=60, temperature=0), prompts)]
    owners = [answer.worker for answer in first]
    assert {front_end.instances()[owner] for owner in owners if owner is not None} == addresses
    time.sleep(1)  # events are on their way
    for _ in range(2):
        for prompt, owner in zip(prompts, owners, strict=True):
            again = front_end.ask(prompt, max_tokens=4, temperature=0)
            assert (again.worker, again.num_cached) == (owner, 6 * 32)


def test_sockets_are_at_the_named_address_but_for_those_of_zeromq(ready: Deployment) -> None:
    for worker in ready.workers:
        assert worker.listening() == {worker.node.address, "0.0.0.0"}
        assert "publishers listen on every interface" in worker.log.read_text()


@dataclass
class Load:
    """Long streams through both front ends, on both machines, and short requests meanwhile."""

    deployment: Deployment
    offline: LLM
    tag: str

    def __enter__(self) -> "Load":
        self.prompts = [f"def {self.tag}{index}(x):\n" for index in range(4)]
        self.streams = {front_end: [Answer() for _ in self.prompts] for front_end in self.front_ends}
        self.pool = ThreadPoolExecutor(9)
        self.running = [
            self.pool.submit(front_end.ask, prompt, answer, **LONG)
            for front_end, answers in self.streams.items()
            for prompt, answer in zip(self.prompts, answers, strict=True)
        ]
        wait_until(lambda: all(answer.text and answer.worker for answer in self.answers))
        known = self.deployment.migrating.instances()
        assert all(
            {known[answer.worker] for answer in found} == self.deployment.addresses for found in self.streams.values()
        )
        self.short: list[Answer] = []
        self.ended = threading.Event()
        self.running.append(self.pool.submit(self._ask_on))
        return self

    @property
    def front_ends(self) -> list[FrontEnd]:
        return [self.deployment.migrating, self.deployment.failing]

    @property
    def answers(self) -> list[Answer]:
        return [answer for found in self.streams.values() for answer in found]

    def _ask_on(self) -> None:
        while not self.ended.wait(0.2):
            self.short.append(self.deployment.migrating.ask("import os\n", max_tokens=8, temperature=0))

    def check(self, lost: int) -> None:
        """Requests of `lost` go on elsewhere or fail, by front end; nothing else has happened to any."""
        expected = [alone(self.offline, prompt, **LONG) for prompt in self.prompts]
        migrated, failed = (self.streams[front_end] for front_end in self.front_ends)
        assert [(answer.text, answer.error) for answer in migrated] == [(text, None) for text in expected]
        for answer, text in zip(failed, expected, strict=True):
            if answer.worker == lost:
                assert answer.error is not None and text.startswith(answer.text) and answer.text != text
            else:
                assert (answer.text, answer.error) == (text, None)
        short = alone(self.offline, "import os\n", max_tokens=8, temperature=0)
        assert {(answer.text, answer.error and str(answer.error)) for answer in self.short} == {(short, None)}

    def __exit__(self, *exception: object) -> None:
        self.ended.set()
        for request in self.running:
            request.result(60)
        self.pool.shutdown()


def instance_of(deployment: Deployment, worker: Worker) -> int:
    (found,) = [key for key, place in deployment.migrating.instances().items() if place == worker.node.address]
    return found


def is_serving_again(deployment: Deployment, worker: Worker) -> None:
    """The machine answers requests of its own."""
    deployment.wait()
    count = worker.metric(EMITTED)
    with ThreadPoolExecutor(8) as pool:
        fields = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
        answers = [*pool.map(lambda index: deployment.migrating.ask(f"back {index}", **fields), range(16))]
    assert all(answer.error is None for answer in answers) and worker.metric(EMITTED) > count


def test_a_killed_worker_loses_its_own_requests_alone_and_comes_back(ready: Deployment, offline: LLM) -> None:
    victim = ready.workers[0]
    lost = instance_of(ready, victim)
    with Load(ready, offline, "killed") as load:
        victim.kill()
        wait_until(lambda: lost not in ready.migrating.instances(), FORGOTTEN_S)
    load.check(lost)
    is_serving_again(ready, victim)


def test_a_machine_without_its_network_loses_its_own_requests_alone_and_comes_back(
    ready: Deployment, offline: LLM
) -> None:
    victim = ready.workers[0]
    lost, process = instance_of(ready, victim), victim.process()
    with Load(ready, offline, "unplugged") as load:
        victim.node.unplug()
        try:
            wait_until(lambda: lost not in ready.migrating.instances(), FORGOTTEN_S)
            for request in load.running[:-1]:
                request.result(STREAM_TIMEOUT_S + 60)
            wait_until(lambda: not process.is_running(), 40)
        finally:
            victim.node.plug_in()
    load.check(lost)
    assert "error: registration: expected one that lasts until a signal" in victim.log.read_text()
    is_serving_again(ready, victim)


@pytest.mark.parametrize("backend", ["files", "nixl"])
def test_prefill_and_decode_workers_are_on_different_machines(
    ready: Deployment, offline: LLM, tmp_path: Path, backend: str
) -> None:
    """Over NIXL they share no directory."""
    made = ready.cluster
    if backend == "nixl":
        pytest.importorskip("nixl_cu13", reason="needs the extra 'nixl'")
    ways = {"files": ("--disk-cache-dir", str(tmp_path)), "nixl": ("--transfer-backend", "nixl")}
    shared = ("--namespace", f"roles-{backend}", *ways[backend], "--host-cache-bytes", "64MiB")
    roles = (("prefill", "--prefill-min-tokens", "0"), ("decode",))
    prefill, decode = (
        made.worker(node, *shared, "--role", *role, port=9200 if backend == "files" else 9300)
        for node, role in zip(made.nodes, roles, strict=True)
    )
    front_end = made.front_end(8002 if backend == "files" else 8004, namespace=f"roles-{backend}")
    wait_until(lambda: front_end.is_serving(ready.addresses))
    for tag, fields in {"greedy": {"temperature": 0}, "sampled": {"temperature": 0.9, "seed": 4}}.items():
        prompt = prompt_of(offline, f"roles-{tag}-{backend}")
        given = {"max_tokens": 24, "ignore_eos": True} | fields
        answer = front_end.ask(prompt, **given)
        assert (answer.text, answer.num_cached) == (alone(offline, prompt, **given), 6 * 32)
    assert prefill.metric(SAVED) == decode.metric(LOADED) == 2 * 6 and prefill.metric(EMITTED) == 2


def test_over_nats_no_worker_listens_elsewhere(ready: Deployment, offline: LLM) -> None:
    made, nats = ready.cluster, needed("nats-server", "nats-server")
    made.start(made.head, "nats", f"exec {nats} -a 10.0.0.1")
    environment = {"NATS_SERVER": f"nats://{made.head.address}:4222"}
    plane = ("--event-plane", "nats")
    workers = [made.worker(node, *plane, "--namespace", "nats", environment=environment, port=0) for node in made.nodes]
    front_end = made.front_end(8003, *plane, namespace="nats", environment=environment)
    wait_until(lambda: front_end.is_serving(ready.addresses))
    assert [worker.listening() for worker in workers] == [{node.address} for node in made.nodes]
    owners_of_prompts(front_end, offline, ready.addresses)
