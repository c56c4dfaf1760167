"""Samples joined to one answer, sizes that are refused, and connections that are limited; without a front end."""

import asyncio
import json
import resource
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="needs the extra 'serve'")

from dflash_trt.core.errors import RequestError
from dflash_trt.core.sampling import sample_seed
from dflash_trt.engine_dir.template_renderer import max_conversation_bytes
from dflash_trt.servers.dynamo import connections
from dflash_trt.servers.dynamo.answers import as_error_object, joined
from dflash_trt.servers.dynamo.api_fields import CHAT, COMPLETIONS, RESPONSES, check_prompt, read_api_request
from dflash_trt.servers.dynamo.connections import Connections, max_connections, raise_file_limit
from dflash_trt.servers.dynamo.event_streams import StreamError, closed_events, joined_events
from dflash_trt.servers.dynamo.settings import PromptLimits


def usage(prompt: int, new: int, accepted: int | None = None) -> dict[str, Any]:
    found = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    if accepted is None:
        return found
    return found | {"completion_tokens_details": {"accepted_prediction_tokens": accepted, "reasoning_tokens": None}}


def speculation(steps: int, drafts: int, accepted: list[int], length: float | None) -> dict[str, Any]:
    return {
        "num_spec_tokens": 2,
        "num_spec_steps": steps,
        "num_draft_tokens": drafts,
        "num_accepted_draft_tokens": sum(accepted),
        "mean_acceptance_length": length,
        "draft_acceptance_rate": sum(accepted) / drafts if drafts else None,
        "acceptance_histogram": [accepted.count(number) for number in range(3)],
        "per_step_accepted": accepted,
        "per_step_drafted": [2] * steps,
    }


def answer(name: str, told: dict[str, Any], used: dict[str, Any], **nvext: Any) -> dict[str, Any]:
    choices = [{"index": 0, "text": name}]
    return {"id": name, "choices": choices, "usage": used, "nvext": {"engine_data": told} | nvext}


def test_samples_are_joined_with_the_sums_of_what_they_did() -> None:
    first = {"metrics": {"speculative_decoding": speculation(3, 6, [2, 0, 1], 2.0)}, "prompt_logprobs": [None]}
    second = {"metrics": {"speculative_decoding": speculation(1, 2, [1], 3.0)}}
    nothing = {"metrics": {"speculative_decoding": speculation(0, 0, [], None)}}
    told = [answer(*given) for given in zip("abc", (first, second, nothing),
            (usage(9, 5, 3), usage(9, 4, 1), usage(9, 1)), strict=True)]  # fmt: skip
    found = joined(told, keeps_engine_data=False)
    expected = speculation(4, 8, [2, 0, 1, 1], 9 / 4)
    assert found == {
        "id": "a",
        "choices": [{"index": index, "text": text} for index, text in enumerate("abc")],
        "usage": usage(9, 10, 4),
        "metrics": {"speculative_decoding": expected},
        "prompt_logprobs": [None],
    }
    of_none = [answer("a", nothing, usage(9, 1, 0)), answer("b", nothing, usage(9, 2, 0))]
    assert joined(of_none, keeps_engine_data=False)["usage"] == usage(9, 3, 0), "0 accepted, not an unknown number"
    nothings = joined([told[2], told[2]], keeps_engine_data=False)["metrics"]["speculative_decoding"]
    assert (nothings["mean_acceptance_length"], nothings["draft_acceptance_rate"]) == (None, None)


def test_what_a_worker_tells_is_lifted_and_kept_where_it_is_asked_for() -> None:
    told = {"metrics": {"speculative_decoding": {}}}
    one = answer("a", told, usage(1, 1), timing=5)
    assert joined([one], keeps_engine_data=False)["nvext"] == {"timing": 5}
    assert joined([one], keeps_engine_data=True)["nvext"] == {"engine_data": told, "timing": 5}
    assert "nvext" not in joined([answer("a", told, usage(1, 1))], keeps_engine_data=False)
    for other in ({"choices": []}, {"choices": [], "nvext": None}, {"choices": [], "nvext": {"timing": 5}}):
        assert joined([other], keeps_engine_data=False) == other


@pytest.mark.parametrize(
    ("found", "message", "code"),
    [
        ({"message": "no", "code": 429}, "no", 429),
        ({"error": {"message": "no", "code": 404}, "code": 429}, "no", 404),
        ({"message": "no", "code": 12}, "no", 500),
        ({"message": "no"}, "no", 500),
        ({"other": 1}, "{'other': 1}", 500),
        ("no", "no", 500),
        ({"error": "no", "code": 429}, "no", 500),
    ],
)
def test_an_error_has_openais_form(found: Any, message: str, code: int) -> None:
    kind = {404: "Not Found", 429: "Too Many Requests", 500: "Internal Server Error"}[code]
    assert as_error_object(found, 500) == {"error": {"message": message, "type": kind, "param": None, "code": code}}


def stream(name: str, texts: str, used: dict[str, Any] | None, *, is_done: bool = True) -> Any:
    async def events() -> Any:
        for text in texts:
            chunk = {"id": name, "choices": [{"index": 0, "text": text}]}
            yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
            await asyncio.sleep(0)
        if used is not None:
            yield b"data: " + json.dumps({"id": name, "choices": [], "usage": used}).encode() + b"\n\n"
        if is_done:
            yield b"data: [DONE]\n\n"

    return events()


def test_streams_are_joined_under_one_id_with_one_usage_at_the_end() -> None:
    async def read(*samples: Any) -> list[Any]:
        found = joined_events(samples, keeps_engine_data=False)
        return [json.loads(event.removeprefix(b"data: ")) async for event in found]

    *chunks, last = asyncio.run(read(stream("x", "abc", usage(9, 3)), stream("y", "d", usage(9, 1))))
    texts = ["", ""]
    for chunk in chunks:
        ((choice),) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == ["abc", "d"]
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 13)
    assert len(asyncio.run(read(stream("x", "abc", None), stream("y", "d", None)))) == 4
    with pytest.raises(StreamError):
        asyncio.run(read(stream("x", "abc", None), stream("y", "d", None, is_done=False)))


def test_a_stream_that_is_left_is_closed_at_once() -> None:
    ended: list[bool] = []

    async def whole() -> Any:
        try:
            yield b"data: 1"
            yield b"data: 2"
        finally:
            ended.append(True)

    async def leave() -> None:
        source = whole()
        closed = closed_events(source, is_response=False)
        assert await anext(closed) == b"data: 1\n\n"
        await closed.aclose()
        assert ended == [True] and source.ag_frame is None

    asyncio.run(leave())


def test_a_prompt_of_the_greatest_size_is_taken() -> None:
    limits = PromptLimits(max_tokens=50, max_text_bytes=1000, vocab_size=9)
    for prompt in ([1] * 50, [[1] * 50, [2]], "x" * 1000, ["x" * 1000, "é" * 500], None, [0, 8]):
        check_prompt(COMPLETIONS, {"prompt": prompt}, limits)
    limit = max_conversation_bytes(1000)
    assert limit is not None
    for path, field in ((CHAT, "messages"), (RESPONSES, "input"), (RESPONSES, "instructions"), (CHAT, "tools")):
        others = len(json.dumps([""] + [None] * 4))
        check_prompt(path, {field: "x" * (limit - others), "user": "y" * 99}, limits)
        with pytest.raises(RequestError, match=f"at most {limit} bytes"):
            check_prompt(path, {field: "x" * (limit - others + 1)}, limits)


@pytest.mark.parametrize(
    ("prompt", "found"), [([1, 9], "9"), ([-1], "-1"), ([[1], [2, 1.5]], "1.5"), ([True], "True"), ([None], "None")]
)
def test_a_token_id_out_of_range_is_refused_as_by_the_engine(prompt: Any, found: str) -> None:
    limits = PromptLimits(max_tokens=50, max_text_bytes=1000, vocab_size=9)
    with pytest.raises(RequestError, match=f"^prompt token: expected an integer from 0 to 8, found {found}. Encode"):
        check_prompt(COMPLETIONS, {"prompt": prompt}, limits)


def test_each_sample_is_a_request_with_its_seed() -> None:
    def bodies(path: str = COMPLETIONS, **fields: Any) -> list[dict[str, Any]]:
        read = read_api_request(path, {"prompt": "x", **fields}, has_tool_call_parser=False)
        return [{name: value for name, value in body.items() if name != "nvext"} for body in read.bodies]

    assert bodies(n=1, seed=5) == [{"prompt": "x", "n": 1, "seed": 5}]
    assert bodies(n=3) == [{"prompt": "x"}] * 3
    assert bodies(n=3, seed=5) == [{"prompt": "x", "seed": sample_seed(5, index)} for index in range(3)]
    assert bodies(user="me", store=False, suffix="") == [{"prompt": "x"}]


def test_what_the_worker_reads_goes_among_the_annotations() -> None:
    fields = {"prompt": "x", "logit_bias": {"5": 1}, "stream": True}
    fields["nvext"] = {"annotations": ["mine"], "extra_fields": ["timing"]}
    read = read_api_request(COMPLETIONS, fields, has_tool_call_parser=False)
    (body,) = read.bodies
    assert (read.is_stream, read.wants_engine_data) == (True, False)
    mine, ours = body["nvext"]["annotations"]
    assert (mine, json.loads(ours.removeprefix("dflash-trt:"))) == ("mine", {"logit_bias": {"5": 1}})
    assert body["nvext"]["extra_fields"] == ["timing", "engine_data"] and "logit_bias" not in body
    fields["nvext"] = {"extra_fields": ["engine_data"]}
    read = read_api_request(COMPLETIONS, fields, has_tool_call_parser=False)
    assert read.wants_engine_data and read.bodies[0]["nvext"]["extra_fields"] == ["engine_data"]
    labelled = {"input": "x", "user": "me"}
    assert read_api_request(RESPONSES, labelled, has_tool_call_parser=False).bodies == (labelled,)


class Handler:
    def __init__(self) -> None:
        self.transport: Any = "open"

    def force_close(self) -> None:
        self.transport = None


class Transport(asyncio.WriteTransport):
    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.sent.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True


class Listener:
    """aiohttp's server, as far as connections are concerned."""

    def __init__(self) -> None:
        self.connections: list[Handler] = []

    def __call__(self) -> Handler:
        self.connections.append(Handler())
        return self.connections[-1]


def test_a_new_connection_takes_the_place_of_the_one_that_was_idle_for_longest() -> None:
    limited, listener = Connections(2), Listener()
    accept: Any = limited.accepting(listener)
    first, second = accept(), accept()
    with limited.busy(first):
        third = accept()
        assert [handler.transport for handler in (first, second, third)] == ["open", None, "open"]
        with limited.busy(third):
            transport = Transport()
            accept().connection_made(transport)
            head, _, body = b"".join(transport.sent).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ") and f"Content-Length: {len(body)}".encode() in head
            assert json.loads(body)["error"]["code"] == 503 and transport.is_closed
        assert len(listener.connections) == 3
        accept()
        assert third.transport is None
    accept()
    assert first.transport is None


def test_connections_are_half_of_the_files_that_are_left() -> None:
    assert [max_connections(number) for number in (0, 256, 259, 1000, 10**6)] == [1, 1, 1, 372, 4096]


def test_as_many_files_are_opened_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 256))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append((kind, limits)))
    assert (raise_file_limit(), asked) == (256, [(resource.RLIMIT_NOFILE, (256, 256))])

    def refuse(kind: int, limits: Any) -> None:
        raise ValueError("not allowed")

    monkeypatch.setattr(connections, "resource", SimpleNamespace(**vars(resource) | {"setrlimit": refuse}))
    assert raise_file_limit() == 64
