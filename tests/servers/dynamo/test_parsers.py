"""Dynamo's parsers of tool calls and reasoning, over the worker class with an engine that says what it is told to."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from dflash_trt.servers.dynamo.environment import event_addresses, local_environment
from dflash_trt.servers.dynamo.settings import write_card
from tests.servers.dynamo.serving import free_ports

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"name": "get_weather", "arguments": {"city": "Oslo"}}


@pytest.fixture(scope="module")
def client(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    from dflash_trt.engine_dir import EngineDir
    from dflash_trt.servers.dynamo.event_broker import EventBroker

    state = tmp_path_factory.mktemp("parsers")
    for name in ("registrations", "card"):
        (state / name).mkdir()
    write_card(EngineDir.open(demo), state / "card")
    port = free_ports(2)
    environment = local_environment(state) | {"HOME": str(state), "DYN_SYSTEM_PORT": str(port + 1)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    worker = ["tests.servers.dynamo.scripted_worker", str(state / "card"), "hermes", "qwen3"]
    front_end = ["dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    front_end += ["--discovery-backend", "file", "--event-plane", "zmq"]
    with EventBroker(*event_addresses(state)):
        processes = [
            subprocess.Popen([sys.executable, "-m", *words], env=environment, stdout=sys.stderr)
            for words in (worker, front_end)
        ]
        try:
            _wait(f"http://127.0.0.1:{port}")
            with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
                yield client
        finally:
            for process in processes:
                process.terminate()
            assert [process.wait(20) for process in processes] == [0, 0]


def _wait(url: str) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        try:
            if httpx.get(f"{url}/v1/models", timeout=5).json()["data"]:
                return
        except (httpx.HTTPError, ValueError, KeyError):
            pass
        time.sleep(0.2)
    raise AssertionError("the front end does not know the model")


def asked(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    return client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": f"say:{text}:end"}], max_tokens=200, **fields
    )


def test_a_tool_call_is_parsed(client: openai.OpenAI) -> None:
    choice = asked(client, f"<tool_call>{json.dumps(CALL)}</tool_call>", tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (CALL["name"], CALL["arguments"])


def test_a_streamed_tool_call_is_parsed(client: openai.OpenAI) -> None:
    stream = asked(client, f"<tool_call>{json.dumps(CALL)}</tool_call>", tools=TOOLS, stream=True)
    pieces = [call.function for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(piece.name or "" for piece in pieces) == CALL["name"]
    assert json.loads("".join(piece.arguments or "" for piece in pieces)) == CALL["arguments"]


def test_reasoning_is_apart_from_the_answer(client: openai.OpenAI) -> None:
    message = asked(client, "<think>two and two</think>four").choices[0].message
    assert (message.model_extra["reasoning_content"], message.content) == ("two and two", "four")


def test_a_text_without_either_is_the_answer(client: openai.OpenAI) -> None:
    assert asked(client, "four", tools=TOOLS).choices[0].message.content == "four"
