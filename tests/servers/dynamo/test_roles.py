"""Prompts computed by one worker and answered by another, behind Dynamo's own router of prefill workers."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trt import SamplingParams
from dflash_trt.core.errors import ConfigError, RequestError
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.servers.dynamo.roles import HandOver, runtime_of
from dflash_trt.serving.llm import LLM
from scripts import prefill_apart
from tests.servers.dynamo.serving import Server, free_ports, serving

PREFILL, DECODE = 0, 1
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


def test_a_decode_worker_goes_on_where_a_prefill_worker_was(demo: Path, offline: LLM, tmp_path: Path) -> None:
    """Texts are those of one engine, and so are accepted drafts, from the first request on. Short prompts stay away."""
    options = ("--prefill-workers", "1", "--host-cache-bytes", "64MiB", "--draft-length", "7")
    options += ("--prefill-min-tokens", "197")
    with serving(demo, tmp_path, *options) as server:
        for tag, fields in {"greedy": {"temperature": 0}, "sampled": {"temperature": 0.9, "seed": 4}}.items():
            prompt = prompt_of(offline, tag)
            sampling = SamplingParams(max_new_tokens=24, ignore_eos=True, **fields)
            offline.generate([prompt], SamplingParams(max_new_tokens=1))  # its beginning is cached, as the worker's
            (expected,) = offline.generate([prompt], sampling)
            before = server.metric(LOADED, DECODE)
            assert answer(server, prompt, **fields) == (expected.text, 6 * 32, expected.num_accepted_tokens)
            assert server.metric(LOADED, DECODE) == before + 6
        assert server.metric(LOADED, PREFILL) == 0 and server.metric(SAVED, PREFILL) == 12
        short = prompt_of(offline, "short")[:-1]
        (expected,) = offline.generate([short], SamplingParams(max_new_tokens=24, ignore_eos=True))
        assert answer(server, short, temperature=0)[:2] == (expected.text, 0)
        assert server.metric("dflash_trt:output_tokens_total", PREFILL) == 2, "one token of each long prompt"
        _kill_and_go_on(server, offline)
        state = {*tmp_path.glob("dflash-trt-serve-*")}
        assert len(state) == 1 and [*next(iter(state)).glob("prefixes/*/??/*.pages")]
    assert not [*tmp_path.glob("dflash-trt-serve-*")], "nothing is left of the prompts"


def test_both_ways_are_measured(demo: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["script", demo, "--seconds", 1, "--rounds", 1, "--port", free_ports(3)]
    monkeypatch.setattr(sys, "argv", [*map(str, words)])
    prefill_apart.main()
    rows = [line.split("|") for line in capfd.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[1].strip() for row in rows] == ["workers", "together", "apart"]
    assert all(float(cell) > 0 for row in rows[1:] for cell in row[2:-1])


def _kill_and_go_on(server: Server, offline: LLM) -> None:
    """Both workers in turn: requests fail meanwhile or are served, and the same texts come afterwards."""
    prompt = prompt_of(offline, "killed")
    expected = answer(server, prompt, temperature=0)[0]
    for role in (PREFILL, DECODE):
        port = server.port + 1 + role
        (victim,) = [process for process in server.workers() if port in {place.port for place in _listening(process)}]
        os.kill(victim.pid, signal.SIGKILL)
        server.wait_until(lambda: server.answers() == 200)
        assert answer(server, prompt, temperature=0)[0] == expected


def _listening(process: Any) -> list[Any]:
    return [entry.laddr for entry in process.net_connections("tcp") if entry.status == "LISTEN"]


# A worker's part of it


class Engine:
    """What a LocalEngine tells of its directory."""

    prefix_root = "ours"

    def __init__(self) -> None:
        self.asked = 0

    def prefix_keys(self, token_ids: list[int], *, salt: str) -> list[bytes]:
        assert (token_ids, salt) == ([1, 2, 3], "s")
        return [b"key"]

    def has_kept(self, keys: list[bytes]) -> bool:
        assert keys == [b"key"]
        self.asked += 1
        return self.asked == 3


def test_a_prefill_worker_gives_one_token_once_the_prompt_is_written() -> None:
    engine: Any = Engine()
    hand_over = HandOver("prefill", engine)
    request = {"token_ids": [1, 2, 3], "stop_conditions": {"max_tokens": 90, "min_tokens": 5}, "priority": 1}
    assert hand_over.taken(request) == request | {"stop_conditions": {"max_tokens": 1, "ignore_eos": True}}
    given = asyncio.run(hand_over.given([1, 2, 3], salt="s"))
    assert given == {"disaggregated_params": {"engine": "ours"}} and engine.asked == 3


def test_a_prefill_worker_passes_short_prompts_on() -> None:
    """It asks its engine for nothing."""
    short, at_limit = {"token_ids": [1, 2]}, {"token_ids": [1, 2, 3]}
    hand_over = HandOver("prefill", SimpleNamespace(prefix_root="ours"), 3)  # type: ignore[arg-type]
    given = hand_over.passed_on(short)
    assert given is not None and (given["finish_reason"], len(given["token_ids"])) == ("length", 1)
    assert given["disaggregated_params"] == {"engine": "ours"} and hand_over.passed_on(at_limit) is None
    assert hand_over.passed_on(at_limit | {"output_options": {"logprobs": 1}}) is None
    assert hand_over.passed_on(at_limit | {"output_options": {"prompt_logprobs": 0}}) == given
    assert HandOver("decode", SimpleNamespace(), 3).passed_on(short) is None  # type: ignore[arg-type]


def test_a_decode_worker_takes_prompts_of_its_own_engine_alone() -> None:
    hand_over = HandOver("decode", SimpleNamespace(prefix_root="ours"))  # type: ignore[arg-type]
    for result in ({}, {"prefill_result": None}, {"prefill_result": {"disaggregated_params": {"engine": "ours"}}}):
        assert hand_over.taken({"token_ids": [1], **result}) == {"token_ids": [1]}
    with pytest.raises(RequestError, match=r"prefill worker: expected one with the engine and .* ours, found theirs"):
        hand_over.taken({"prefill_result": {"disaggregated_params": {"engine": "theirs"}}})
    assert asyncio.run(hand_over.given([1], salt="")) == {}


def test_a_role_needs_the_directory_that_both_share() -> None:
    plain = RuntimeConfig()
    assert runtime_of("both", plain) is plain
    with pytest.raises(ConfigError, match="--role decode: expected --disk-cache-dir as well, found none"):
        runtime_of("decode", plain)
    shared = RuntimeConfig(disk_cache_dir="/disk")
    assert [runtime_of(role, shared).publish_prompts for role in ("prefill", "decode")] == [True, False]
