"""Prompts computed by one worker and answered by another, behind Dynamo's own router of prefill workers."""

import asyncio
import os
import random
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from dflash_trt import SamplingParams
from dflash_trt.core.errors import ConfigError, QueueFullError, RequestError
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.scheduler.stored_prefixes import Block
from dflash_trt.servers.dynamo import rooms
from dflash_trt.servers.dynamo.roles import HandOver, Role, runtime_of
from dflash_trt.servers.dynamo.rooms import port_of
from dflash_trt.servers.dynamo.service import _blocks
from dflash_trt.serving import nixl_blocks
from dflash_trt.serving.llm import LLM
from dflash_trt.serving.nixl_blocks import BlockReceiver, BlockSender, RemoteBlock
from scripts import prefill_apart
from tests.servers.dynamo.serving import Server, free_ports, serving

PREFILL, DECODE = 0, 1
RUNNING = "dflash_trt:requests_running"
LOADED, SAVED = (f"dflash_trt:{name}_blocks_total" for name in ("loaded", "saved"))


def prompt_of(offline: LLM, tag: str) -> list[int]:
    """Six pages and a part of one, which no other test has."""
    text = "".join(f"def {tag}_{index}(x):\n    return x + {index}\n" for index in range(30))
    return [*map(int, offline.codec.encode(text)[: 6 * 32 + 5])]


def answer(server: Server, prompt: list[int], **fields: Any) -> tuple[str, int, int]:
    """Text, cached prompt tokens, accepted drafts."""
    reply = server.post("completions", prompt=prompt, max_tokens=24, ignore_eos=True, **fields)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    details = body["usage"]["completion_tokens_details"]
    return (
        body["choices"][0]["text"],
        body["usage"]["prompt_tokens_details"]["cached_tokens"],
        details["accepted_prediction_tokens"],
    )


@pytest.mark.parametrize("backend", ["files", "nixl"])
def test_a_decode_worker_goes_on_where_a_prefill_worker_was(
    demo: Path, offline: LLM, tmp_path: Path, backend: str
) -> None:
    """Texts are those of one engine, and so are accepted drafts, from the first request on. Short prompts stay away."""
    if backend == "nixl":
        pytest.importorskip("nixl_cu13", reason="needs the extra 'nixl'")
    options = ("--prefill-workers", "1", "--host-cache-bytes", "64MiB", "--draft-length", "7")
    options += ("--prefill-min-tokens", "197", "--transfer-backend", backend)
    with serving(demo, tmp_path, *options) as server:
        for tag, fields in {"greedy": {"temperature": 0}, "sampled": {"temperature": 0.9, "seed": 4}}.items():
            prompt = prompt_of(offline, f"{tag}_{backend}")
            sampling = SamplingParams(max_new_tokens=24, ignore_eos=True, **fields)
            offline.generate([prompt], SamplingParams(max_new_tokens=1))  # its beginning is cached, as the worker's
            (expected,) = offline.generate([prompt], sampling)
            before = server.metric(LOADED, DECODE)
            assert answer(server, prompt, **fields) == (expected.text, 6 * 32, expected.num_accepted_tokens)
            assert server.metric(LOADED, DECODE) == before + 6
        assert server.metric(LOADED, PREFILL) == 0 and server.metric(SAVED, PREFILL) == 12
        short = prompt_of(offline, f"short_{backend}")[:-1]
        (expected,) = offline.generate([short], SamplingParams(max_new_tokens=24, ignore_eos=True))
        assert answer(server, short, temperature=0)[:2] == (expected.text, 0)
        assert server.metric("dflash_trt:output_tokens_total", PREFILL) == 2, "one token of each long prompt"
        _kill_and_go_on(server, offline)
        places = [place for process in server.workers() for place in _listening(process)]
        assert places and {place.ip for place in places} == {"127.0.0.1"}
        state = {*tmp_path.glob("dflash-trt-serve-*")}
        assert len(state) == 1
        assert any(next(iter(state)).glob("prefixes/*/??/*.pages")) == (backend == "files")
    assert not [*tmp_path.glob("dflash-trt-serve-*")], "nothing is left of the prompts"


def test_both_ways_are_measured(demo: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["script", demo, "--seconds", 1, "--rounds", 1, "--port", free_ports(3)]
    monkeypatch.setattr(sys, "argv", [*map(str, words)])
    prefill_apart.main()
    rows = [line.split("|") for line in capfd.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[1].strip() for row in rows] == ["workers", "together", "apart"]
    assert all(float(cell) > 0 for row in rows[1:] for cell in row[2:-1])


def _kill_and_go_on(server: Server, offline: LLM) -> None:
    """Both workers in turn, while a prompt is on its way: it fails by name, and the same texts come afterwards.

    A client that leaves then is like them: nothing runs any more, and no page is in use.
    """
    prompt = prompt_of(offline, "killed")
    expected = answer(server, prompt, temperature=0)[0]
    for role in (PREFILL, DECODE):
        port = server.port + 1 + role
        (victim,) = [process for process in server.workers() if port in {place.port for place in _listening(process)}]
        with ThreadPoolExecutor(1) as thread:
            reply = thread.submit(server.post, "completions", prompt=_long_prompt(role), max_tokens=2)
            server.wait_until(lambda: server.metric(RUNNING, PREFILL))
            os.kill(victim.pid, signal.SIGKILL)
            assert reply.result().status_code == 503 and reply.result().json()["error"]["message"]
        server.wait_until(lambda: server.answers() == 200)
        assert answer(server, prompt, temperature=0)[0] == expected
        server.wait_until(partial(_is_idle, server), timeout_s=10)
    with ThreadPoolExecutor(1) as thread:
        client = httpx.Client()
        body = {"model": "demo", "prompt": _long_prompt(2), "max_tokens": 2, "stream": True}
        thread.submit(client.post, f"{server.url}/v1/completions", json=body, timeout=1.0)
        server.wait_until(lambda: server.metric(RUNNING, PREFILL))
    server.wait_until(partial(_is_idle, server), timeout_s=30)
    assert answer(server, prompt, temperature=0)[0] == expected


def _long_prompt(seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(3, 500) for _ in range(1900)]


def _is_idle(server: Server) -> bool:
    names = (RUNNING, "dflash_trt:requests_waiting", "dflash_trt:pages_in_use")
    return not any(server.metric(name, role) for name in names for role in (PREFILL, DECODE))


def _listening(process: Any) -> list[Any]:
    return [entry.laddr for entry in process.net_connections("tcp") if entry.status == "LISTEN"]


# A worker's part of it


class Engine:
    """What a LocalEngine tells of its directory."""

    prefix_root = "ours"

    def __init__(self, *, num_looks: int = 3) -> None:
        self.asked, self.num_looks = 0, num_looks

    def prefix_keys(self, token_ids: list[int], *, salt: str) -> list[bytes]:
        assert (token_ids, salt) == ([1, 2, 3], "s")
        return [b"key"]

    def has_kept(self, keys: list[bytes]) -> bool:
        assert keys == [b"key"]
        self.asked += 1
        return self.asked == self.num_looks

    def read_early(self, token_ids: list[int], keys: list[bytes], *, salt: str) -> bool:
        assert (token_ids, salt) == ([1, 2, 3], "s")
        return self.has_kept(keys)


def hand_over(
    role: Role, *, engine: str = "ours", num_looks: int = 3, min_tokens: int = 0, blocks: Any = None
) -> HandOver:
    given: Any = Engine(num_looks=num_looks)
    given.prefix_root = engine
    return HandOver(role, given, min_tokens, blocks=blocks)


def test_a_prefill_worker_gives_one_token_once_the_prompt_is_written() -> None:
    worker = hand_over("prefill")
    request = {"token_ids": [1, 2, 3], "stop_conditions": {"max_tokens": 90, "min_tokens": 5}, "priority": 1}
    taken = request | {"stop_conditions": {"max_tokens": 1, "ignore_eos": True}}
    assert worker.taken(request | {"bootstrap_info": {}}) == taken
    given = asyncio.run(worker.given([1, 2, 3], salt="s", reason="cancelled"))
    assert given == {"finish_reason": "length", "disaggregated_params": {"engine": "ours"}}
    assert worker.engine.asked == 3  # type: ignore[attr-defined]


def test_a_prefill_worker_passes_short_prompts_on() -> None:
    """It asks its engine for nothing."""
    short, at_limit = {"token_ids": [1, 2]}, {"token_ids": [1, 2, 3]}
    worker = hand_over("prefill", min_tokens=3)
    given = worker.passed_on(short)
    assert given is not None and (given["finish_reason"], len(given["token_ids"])) == ("length", 1)
    assert given["disaggregated_params"] == {"engine": "ours"} and worker.passed_on(at_limit) is None
    assert worker.passed_on(at_limit | {"output_options": {"logprobs": 1}}) is None
    assert worker.passed_on(at_limit | {"output_options": {"prompt_logprobs": 0}}) == given
    assert hand_over("decode", min_tokens=3).passed_on(short) is None


# Rooms: connections between the two


class Room:
    """Number 7 of a prefill worker, and a decode worker that reads its prompt; both in the test's event loop."""

    def __init__(
        self, *, engine: str = "ours", num_looks: int = 10**9, sender: Any = None, receiver: Any = None
    ) -> None:
        self.prefill = hand_over("prefill", blocks=sender)
        self.decode = hand_over("decode", engine=engine, num_looks=num_looks, blocks=receiver)
        self.is_stopped = False
        self.num_cancelled = 0
        self.request: dict[str, Any] = {}

    async def __aenter__(self) -> "Room":
        assert self.prefill.rooms is not None
        self.server = await self.prefill.rooms.listen("127.0.0.1")
        info = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port_of(self.server), "bootstrap_room": 7}
        self.request = {"token_ids": [1, 2, 3], "bootstrap_info": info}
        return self

    async def __aexit__(self, *args: object) -> None:
        self.server.close()
        await asyncio.sleep(0.02)  # for connections that close

    def computing(self) -> Any:
        return self.prefill.computing(self.request, self._cancel)

    def reading(self) -> asyncio.Task[None]:
        reading = self.decode.read(self.request, [1, 2, 3], salt="s", is_stopped=lambda: self.is_stopped)
        return asyncio.ensure_future(reading)

    async def until(self, condition: Any) -> None:
        for _ in range(1000):
            if condition():
                return
            await asyncio.sleep(0.005)
        raise AssertionError("it has not come")

    def _cancel(self) -> None:
        self.num_cancelled += 1


def test_a_decode_worker_reads_until_the_prefill_worker_has_written_all() -> None:
    """Also one that comes before the front end's request to the prefill worker, and one that comes afterwards."""

    async def run() -> None:
        async with Room() as room:
            early = room.reading()
            await room.until(lambda: room.decode.engine.asked > 2)  # type: ignore[attr-defined]
            with room.computing():
                await asyncio.sleep(0.1)
                assert not early.done()
            await asyncio.wait_for(early, 5)
            await asyncio.wait_for(room.reading(), 1)
            assert room.num_cancelled == 0

    asyncio.run(run())


def test_whoever_leaves_a_room_ends_what_the_other_does_for_it() -> None:
    """All blocks are there, or the client has left: the prompt is computed no further."""

    async def run(*, has_all: bool) -> None:
        async with Room(num_looks=3 if has_all else 10**9) as room:
            with room.computing():
                reading = room.reading()
                await room.until(lambda: room.decode.engine.asked > 2)  # type: ignore[attr-defined]
                room.is_stopped = not has_all
                await asyncio.wait_for(reading, 5)
                await room.until(lambda: room.num_cancelled)
            assert room.num_cancelled == 1

    for has_all in (True, False):
        asyncio.run(run(has_all=has_all))


def test_a_prompt_whose_decode_worker_left_before_it_began_is_not_computed() -> None:
    async def run() -> None:
        async with Room() as room:
            assert room.prefill.passed_on(room.request) is None
            reading = room.reading()
            await room.until(lambda: room.decode.engine.asked > 2)  # type: ignore[attr-defined]
            assert room.prefill.passed_on(room.request) is None
            room.is_stopped = True
            await asyncio.wait_for(reading, 5)
            await room.until(lambda: room.prefill.passed_on(room.request) is not None)
            others = room.request | {"bootstrap_info": room.request["bootstrap_info"] | {"bootstrap_room": 8}}
            assert room.prefill.passed_on(others) is None

    asyncio.run(run())


def test_a_prompt_that_begins_late_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its decode worker waited for it in vain, and has begun alone."""
    monkeypatch.setattr(rooms, "_BEGINS_S", 0.05)

    async def run() -> None:
        async with Room() as room:
            await asyncio.wait_for(room.reading(), 5)
            assert room.prefill.passed_on(room.request) is None

    asyncio.run(run())


def test_the_oldest_room_is_forgotten_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "_MAX_ROOMS", 2)
    ours = rooms.Rooms("ours")
    for number in (1, 2, 3, 3):
        with ours.computing(number, lambda: None):
            pass
    assert [*ours._rooms] == [2, 3]


def test_a_room_tells_of_each_block_once() -> None:
    """However many come at a time: a line has a hundred at most."""
    told: list[RemoteBlock] = []
    blocks = [RemoteBlock(key="ff", is_state=False, groups=1, address=n, num_bytes=1, checksum=2) for n in range(230)]
    sender: Any = SimpleNamespace(metadata=b"here")
    receiver: Any = SimpleNamespace(learn=lambda metadata, new: told.extend(new))

    async def run() -> None:
        async with Room() as room:
            ours = rooms.Rooms("ours", sender)
            server = await ours.listen("127.0.0.1")
            room.request["bootstrap_info"]["bootstrap_port"] = port_of(server)
            async with rooms.visiting(room.request["bootstrap_info"], "ours", receiver) as ended:
                with ours.computing(7, lambda: None):
                    for stop in (1, 3, 230):
                        ours._room(7).add(blocks[len(told) : stop])
                        await room.until(lambda stop=stop: len(told) == stop)
                await asyncio.wait_for(ended, 5)
            server.close()

    asyncio.run(run())
    assert told == blocks


def test_a_decode_worker_goes_on_alone_without_the_prefill_worker() -> None:
    """Nobody listens, or the connection breaks in the middle of a line."""

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)
        writer.write(b'{"engine": "ours"}\n{"err')
        writer.close()

    async def run() -> None:
        async with Room() as room:
            server = await asyncio.start_server(cut, "127.0.0.1", 0)
            room.request["bootstrap_info"]["bootstrap_port"] = port_of(server)
            await asyncio.wait_for(room.reading(), 5)
            server.close()
            await asyncio.wait_for(room.reading(), 5)

    asyncio.run(run())


@pytest.mark.parametrize("kind", [QueueFullError, RequestError])
def test_what_a_prefill_worker_refuses_is_refused_by_name(kind: type[RequestError]) -> None:
    """So a decode worker computes no prompts for which the prefill workers' queues are full."""

    async def run() -> None:
        async with Room() as room:
            reading = room.reading()
            with pytest.raises(kind), room.computing():
                raise kind("64 wait")
            with pytest.raises(RequestError, match="64 wait") as found:
                await asyncio.wait_for(reading, 5)
            assert type(found.value) is kind

    asyncio.run(run())


def test_a_decode_worker_takes_prompts_of_its_own_engine_alone() -> None:
    async def run() -> None:
        expected = r"prefill worker: expected one with the engine and .* theirs, found ours"
        async with Room(engine="theirs") as room:
            with room.computing():
                reading = room.reading()
            with pytest.raises(RequestError, match=expected):
                await asyncio.wait_for(reading, 5)

    asyncio.run(run())
    worker = hand_over("decode")
    assert worker.taken({"token_ids": [1], "bootstrap_info": {}}) == {"token_ids": [1]}
    assert asyncio.run(worker.given([1], salt="", reason="stop")) == {}


@pytest.fixture
def over_nixl(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[BlockSender, BlockReceiver]]:
    """Memory of two workers, for four blocks of 100 bytes."""
    pytest.importorskip("nixl_cu13", reason="needs the extra 'nixl'")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    sender, receiver = BlockSender(450), BlockReceiver(100)
    yield sender, receiver
    receiver.close()
    sender.close()


@pytest.mark.parametrize("is_late", [False, True], ids=["as they come", "all at once"])
def test_a_decode_worker_learns_of_blocks_in_memory(
    over_nixl: tuple[BlockSender, BlockReceiver], monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """They are held until some time after the end of the room, whenever the decode worker comes."""
    sender, receiver = over_nixl
    monkeypatch.setattr(rooms, "_HELD_S", 0.5)
    monkeypatch.setattr(nixl_blocks, "_ROOM_S", 0.1)
    ours, part = Block(key=b"key", is_state=False, groups=1), bytearray(100)

    def is_held() -> bool:
        others = [Block(key=b"%d" % number, is_state=False, groups=1) for number in range(8)]
        return not all(sender.write(other, [bytes(100)]) for other in others)

    async def run() -> None:
        async with Room(sender=sender, receiver=receiver) as room:
            early = None if is_late else room.reading()
            with room.computing():
                await room.prefill.read(room.request, [1, 2, 3], salt="s", is_stopped=lambda: False)
                assert await asyncio.to_thread(sender.write, ours, [bytes(range(100))])
                await room.until(lambda: is_late or receiver.find(b"key"))
                await asyncio.sleep(0)
            await asyncio.wait_for(early or room.reading(), 5)
            assert receiver.find(b"key") == [ours]
            assert await asyncio.to_thread(is_held)
            assert await asyncio.to_thread(receiver.read, ours, [memoryview(part)]) and part == bytes(range(100))
            await asyncio.sleep(0.6)
            assert not await asyncio.to_thread(is_held)
            assert room.prefill.rooms is not None and room.prefill.rooms._rooms[7].blocks == []

    asyncio.run(run())


def test_workers_get_blocks_in_the_same_way(over_nixl: tuple[BlockSender, BlockReceiver]) -> None:
    async def run() -> None:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"sender": over_nixl[0]}, "ours, found ours over NIXL"),
            ({"receiver": over_nixl[1]}, "ours over NIXL, found ours"),
        ]
        for blocks, expected in cases:
            async with Room(**blocks) as room:
                with room.computing():
                    reading = room.reading()
                with pytest.raises(RequestError, match=expected):
                    await asyncio.wait_for(reading, 5)

    asyncio.run(run())


def test_nixl_needs_its_package_and_memory_of_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands' tests have the other refusals."""
    runtime = RuntimeConfig(host_cache_bytes=1 << 20)
    monkeypatch.setattr(nixl_blocks, "find_spec", {}.get)
    with pytest.raises(ConfigError, match="NIXL: expected the packages of the extra 'nixl', found no nixl_cu13"):
        runtime_of("decode", runtime, "nixl")
    nodes = runtime.replaced(nnodes=2, master_addr="10.0.0.1")
    with pytest.raises(ConfigError, match="--transfer-backend nixl: expected ranks on one node, found 2 nodes"):
        runtime_of("prefill", nodes, "nixl")
    monkeypatch.setattr(nixl_blocks, "find_spec", lambda name: name)
    assert runtime_of("prefill", runtime, "nixl") is runtime
    with pytest.raises(ConfigError, match="--transfer-bytes: expected 4 blocks of 100 bytes or more, found 399 bytes"):
        _blocks("prefill", 399, "name", 100)


def test_a_role_needs_the_directory_that_both_share() -> None:
    plain = RuntimeConfig()
    assert runtime_of("both", plain) is plain
    with pytest.raises(ConfigError, match="--role decode: expected --disk-cache-dir as well, found none"):
        runtime_of("decode", plain)
    shared = RuntimeConfig(disk_cache_dir="/disk")
    assert [runtime_of(role, shared).publish_prompts for role in ("prefill", "decode")] == [True, False]
    assert runtime_of("decode", shared.replaced(publish_prompts=True)).publish_prompts
