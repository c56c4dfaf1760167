"""Many streams at once, some of which leave: tokens, pages, processes and metrics afterwards."""

import random
import subprocess
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from dflash_trt import SamplingParams
from scripts.triton_server.launcher import ServerProcess
from tests.triton_server.clients import Answer, GrpcStream, as_list, counter, sse, until
from tests.triton_server.conftest import ENVIRONMENT, ROOT

NUM_STREAMS = 32
MAX_TOKENS = 120
_COUNTERS = (
    "requests_total",
    "output_tokens_total",
    "draft_tokens_total",
    "accepted_tokens_total",
    "verify_blocks_total",
    "queue_time_seconds_count",
    "time_to_first_token_seconds_count",
    "acceptance_length_count",
)


@dataclass(frozen=True, kw_only=True)
class Visitor:
    """One client. `leaves_after` responses it goes away, how `leaves_by` says; None stays to the end."""

    prompt: str
    seed: int | None
    transport: str
    leaves_after: int | None

    @property
    def fields(self) -> dict[str, Any]:
        sampled = {} if self.seed is None else {"temperature": 1.0, "seed": self.seed}
        return {"text_input": self.prompt, "max_tokens": MAX_TOKENS, "stream": True, "end_id": -1} | sampled

    @property
    def sampling(self) -> SamplingParams:
        temperature = 0.0 if self.seed is None else 1.0
        return SamplingParams(max_new_tokens=MAX_TOKENS, temperature=temperature, seed=self.seed, ignore_eos=True)


def visitors() -> list[Visitor]:
    chance = random.Random(1)
    return [
        Visitor(
            prompt="".join(chance.choices("abcdefgh (){}:\n", k=chance.randint(1, 60))),
            seed=None if i % 2 else chance.randrange(1000),
            transport="grpc" if i % 3 else "sse",
            leaves_after=chance.randint(1, 12) if i % 4 == 0 else None,
        )
        for i in range(NUM_STREAMS)
    ]


def visit(server: ServerProcess, tritonclient: Any, visitor: Visitor) -> Answer:
    if visitor.transport == "grpc":
        connection = GrpcStream(tritonclient, server, **visitor.fields)
        if visitor.leaves_after is None:
            answer = connection.rest()
            connection.close()
            return answer
        answer = Answer([connection.next() for _ in range(visitor.leaves_after)])
        connection.cancel()
        return answer
    with sse(server, **visitor.fields) as responses:
        if visitor.leaves_after is None:
            return Answer(list(responses))
        return Answer([next(responses) for _ in range(visitor.leaves_after)])


def test_every_stream_gets_its_own_tokens_and_nothing_is_left(server, offline, tritonclient) -> None:
    everybody = visitors()
    expected = offline.generate([visitor.prompt for visitor in everybody], [visitor.sampling for visitor in everybody])
    members = len(server.members())
    before = {name: counter(server, name) for name in _COUNTERS}

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = list(pool.map(lambda visitor: visit(server, tritonclient, visitor), everybody))

    for visitor, answer, output in zip(everybody, answers, expected, strict=True):
        got = answer.token_ids
        if visitor.leaves_after is None:
            assert got == list(output.token_ids), visitor
            assert answer.text == output.text
            assert answer.last["total_draft_tokens"] == output.num_draft_tokens
        else:
            assert got == list(output.token_ids[: len(got)]), visitor
            assert got
    assert len({tuple(answer.token_ids) for answer in answers}) > NUM_STREAMS // 2, "the streams are not told apart"

    until(lambda: counter(server, "requests_total") == before["requests_total"] + NUM_STREAMS, "all have ended")
    until(lambda: counter(server, "pages_in_use") == 0, "all pages are free")
    assert counter(server, "requests_running") == counter(server, "requests_waiting") == 0
    assert len(server.members()) == members

    grown = {name: counter(server, name) - count for name, count in before.items()}
    stayed = [answer for visitor, answer in zip(everybody, answers, strict=True) if visitor.leaves_after is None]
    seen = sum(len(answer.token_ids) for answer in answers)
    assert seen <= grown["output_tokens_total"] <= NUM_STREAMS * MAX_TOKENS
    assert grown["draft_tokens_total"] >= sum(answer.last["total_draft_tokens"] for answer in stayed)
    assert grown["queue_time_seconds_count"] == NUM_STREAMS
    assert grown["time_to_first_token_seconds_count"] == NUM_STREAMS
    assert grown["accepted_tokens_total"] <= grown["draft_tokens_total"]
    assert counter(server, "requests_total", finish_reason="cancelled") > 0


def test_without_departures_the_metrics_are_the_sum_of_the_answers(server, tritonclient) -> None:
    names = [*_COUNTERS, "responses_total", "prompt_tokens_total"]
    before = {name: counter(server, name) for name in names}
    positions = {i: counter(server, "draft_tokens_at_position_total", position=str(i)) for i in (1, 2, 3)}
    staying = [Visitor(prompt=f"x = {i}", seed=i, transport="sse", leaves_after=None) for i in range(8)]
    with ThreadPoolExecutor(len(staying)) as pool:
        answers = list(pool.map(lambda visitor: visit(server, tritonclient, visitor), staying))
    until(lambda: counter(server, "requests_total") == before["requests_total"] + len(staying), "all have ended")
    grown = {name: counter(server, name) - before[name] for name in names}
    lasts = [answer.last for answer in answers]
    assert grown["output_tokens_total"] == sum(last["num_output_tokens"] for last in lasts)
    assert grown["prompt_tokens_total"] == sum(last["num_input_tokens"] for last in lasts)
    assert grown["draft_tokens_total"] == sum(last["total_draft_tokens"] for last in lasts)
    assert grown["accepted_tokens_total"] == sum(last["total_accepted_draft_tokens"] for last in lasts)
    assert grown["verify_blocks_total"] == sum(last["num_verify_steps"] for last in lasts)
    assert grown["responses_total"] == sum(len(answer.responses) for answer in answers)
    at = {i: counter(server, "draft_tokens_at_position_total", position=str(i)) - positions[i] for i in positions}
    assert at[1] == grown["verify_blocks_total"]
    assert sum(at.values()) == grown["draft_tokens_total"]


@pytest.mark.parametrize("how", ["cancel", "disconnect"])
def test_whoever_leaves_frees_the_pages_at_once(server, tritonclient, how) -> None:
    """`pages_in_use` is published twice a second; the engine itself is watched in test_service.py."""
    fields = {"text_input": "while True:", "max_tokens": 2000, "stream": True, "end_id": -1}
    until(lambda: counter(server, "pages_in_use") == 0, "nothing runs")
    cancelled = counter(server, "requests_total", finish_reason="cancelled")
    if how == "disconnect":
        with sse(server, **fields) as responses:
            assert as_list(next(responses)["output_ids"])
    else:
        connection = GrpcStream(tritonclient, server, **fields)
        connection.next()
        connection.cancel()
    until(
        lambda: counter(server, "requests_total", finish_reason="cancelled") == cancelled + 1,
        "it is cancelled",
        timeout_s=10,
    )
    assert counter(server, "pages_in_use") == 0


def test_a_killed_client_is_noticed(server) -> None:
    program = """
        import sys, time, types
        sys.path.insert(0, sys.argv[1])
        import tritonclient.grpc
        from tests.triton_server.clients import GrpcStream
        server = types.SimpleNamespace(grpc_port=int(sys.argv[2]))
        client = types.SimpleNamespace(grpc=tritonclient.grpc)
        stream = GrpcStream(client, server, text_input="x", max_tokens=2000, stream=True, end_id=-1)
        stream.next()
        print("streaming", flush=True)
        time.sleep(60)
    """
    cancelled = counter(server, "requests_total", finish_reason="cancelled")
    client = subprocess.Popen(
        [ENVIRONMENT / "bin" / "python", "-c", textwrap.dedent(program), ROOT, str(server.grpc_port)],
        stdout=subprocess.PIPE,
    )
    assert client.stdout is not None
    assert client.stdout.readline() == b"streaming\n"
    client.kill()
    client.wait()
    client.stdout.close()
    until(lambda: counter(server, "requests_total", finish_reason="cancelled") == cancelled + 1, "it is cancelled")
    until(lambda: counter(server, "pages_in_use") == 0, "its pages are free")
