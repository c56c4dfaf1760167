"""Outputs that do not depend on how steps grouped the tokens."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.core.logprobs import TopTokens
from dflash_trt.core.request import GenerationOutput, RequestStatistics, TokenEvent
from dflash_trt.serving.detokenizer import ByteDetokenizer
from dflash_trt.serving.output_processor import OutputProcessor
from dflash_trt.serving.text import TextCodec
from tests.scheduler.driver import make_request
from tests.serving.tokenizers import write_byte_fallback

END = TokenEvent(request_id="r", token_ids=(), finish_reason="length")


def process(
    codec: TextCodec, groups: Sequence[Sequence[int]], *, stop: tuple[str, ...] = ()
) -> tuple[GenerationOutput, list[str]]:
    """The output, and the text of each chunk."""
    output_processor = OutputProcessor(make_request("r", stop=stop), codec.detokenizer(), arrived_s=10.0)
    texts = []
    for number, group in enumerate(groups):
        event = TokenEvent(request_id="r", token_ids=tuple(group), logprobs=tuple(float(token) for token in group))
        chunk = output_processor.read([(event, 11.0 + number)])
        texts.append(chunk.text or "" if chunk is not None else "")
        if output_processor.early_end is not None:
            break
    last = output_processor.read([(END, 20.0)])
    assert last is not None and last.output is not None
    return last.output, [*texts, last.text or ""]


def test_a_stop_string_cuts_text_and_tokens_and_may_lie_across_steps(codec: TextCodec) -> None:
    token_ids = codec.encode("one two three four")
    ends = [len(codec.decode(token_ids[:n])) for n in range(len(token_ids) + 1)]
    num_kept = next(n for n in range(len(ends)) if ends[n] >= len("one two thr"))
    output, texts = process(codec, [[token] for token in token_ids], stop=("wo thr",))
    assert output.text == "one t" == "".join(texts)
    assert list(output.token_ids) == token_ids[:num_kept]
    assert len(output.logprobs) == num_kept
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("num_together", [1, 2, 3, 100])
def test_times_are_those_of_the_engine_however_late_the_events_are_read(codec: TextCodec, num_together: int) -> None:
    token_ids = codec.encode("one two three four")
    events = [(TokenEvent(request_id="r", token_ids=(token,)), 11.0 + i) for i, token in enumerate(token_ids)]
    output_processor = OutputProcessor(make_request("r", stop=("wo thr",)), codec.detokenizer(), arrived_s=10.0)
    for start in range(0, len(events), num_together):
        output_processor.read(events[start : start + num_together])
    last = output_processor.read([(END, 40.0)])
    assert last is not None and last.output is not None and 1 < len(last.output.token_ids) < len(token_ids)
    assert last.output.time_to_first_token_s == 1.0
    assert last.output.total_s == len(last.output.token_ids)  # its last token came so long after the request


def test_a_stop_string_cuts_the_likely_tokens_with_the_tokens(codec: TextCodec) -> None:
    token_ids = codec.encode("one two three four")
    top = TopTokens(np.array([[token] for token in token_ids]), np.zeros((len(token_ids), 1), np.float32))
    output_processor = OutputProcessor(make_request("r", stop=("wo thr",)), codec.detokenizer(), arrived_s=10.0)
    output_processor.read([(TokenEvent(request_id="r", token_ids=tuple(token_ids), top=top), 11.0)])
    last = output_processor.read([(END, 20.0)])
    assert last is not None and last.output is not None
    found = [row[0].token_id for row in last.output.top_logprobs]
    assert found == list(last.output.token_ids) and len(found) < len(token_ids)


def test_each_chunk_has_the_likely_tokens_of_its_own(codec: TextCodec) -> None:
    output_processor = OutputProcessor(replace(make_request("r"), sample_index=2), codec.detokenizer(), arrived_s=10.0)
    chunks = []
    for token in (5, 6, 7):
        top = TopTokens(np.array([[token]]), np.zeros((1, 1), np.float32))
        event = TokenEvent(request_id="r", token_ids=(token,), top=top)
        chunks.append(output_processor.read([(event, 11.0)]))
    chunks.append(output_processor.read([(END, 20.0)]))
    assert all(chunk is not None for chunk in chunks)
    found = [[row[0].token_id for row in chunk.top_logprobs] for chunk in chunks if chunk is not None]
    assert found == [[5], [6], [7], []]
    assert {chunk.sample_index for chunk in chunks if chunk is not None} == {2}


def test_a_text_whose_end_cannot_be_made_is_an_error(codec: TextCodec, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ByteDetokenizer):
        def flush(self) -> str:
            raise ValueError("no such end")

    output_processor = OutputProcessor(make_request("r"), Broken(lambda token: b"x"), arrived_s=10.0)
    output_processor.read([(TokenEvent(request_id="r", token_ids=(1,)), 11.0)])
    last = output_processor.read([(END, 20.0)])
    assert last is not None and last.output is not None
    assert (last.output.finish_reason, last.output.error) == ("error", "ValueError: no such end")
    assert (last.output.text, last.output.token_ids) == ("x", (1,))
    assert "could not be turned into text" in caplog.text


def test_a_stop_string_that_only_the_end_completes_does_not_hide_another_end(tmp_path: Path) -> None:
    codec = TextCodec.open(write_byte_fallback(tmp_path))
    stop = ("\N{REPLACEMENT CHARACTER}",)
    output_processor = OutputProcessor(make_request("r", stop=stop), codec.detokenizer(), arrived_s=10.0)
    output_processor.read([(TokenEvent(request_id="r", token_ids=(3 + 0xE4,)), 11.0)])
    last = output_processor.read([(END._replace(finish_reason="error", error="lost"), 20.0)])
    assert last is not None and last.output is not None
    assert (last.output.finish_reason, last.output.error, last.output.text) == ("error", "lost", "")


def test_a_stop_string_in_a_run_of_bytes_ends_the_text_at_its_last_byte(tmp_path: Path) -> None:
    """The run is held, because a later byte may make all of it invalid; the stop string stands there now."""
    codec = TextCodec.open(write_byte_fallback(tmp_path))
    run = [3 + byte for byte in "你é🙂".encode()]
    output, texts = process(codec, [[token] for token in run], stop=("é",))
    assert list(output.token_ids) == run[:5]
    assert output.text == "你" == "".join(texts)
    assert output.finish_reason == "stop"


def test_a_stop_string_that_the_end_of_the_text_completes_is_why_it_stopped(tmp_path: Path) -> None:
    codec = TextCodec.open(write_byte_fallback(tmp_path))
    output, texts = process(codec, [[3 + 0xE4]], stop=("\N{REPLACEMENT CHARACTER}",))
    assert output.text == "" == "".join(texts)
    assert output.finish_reason == "stop"


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(0, 399), max_size=25),
    st.lists(st.integers(1, 6), min_size=25, max_size=25),
    st.sampled_from([(), ("e",), ("a", "th"), ("\N{REPLACEMENT CHARACTER}",)]),
)
def test_grouping_changes_nothing(
    codec: TextCodec, token_ids: list[int], sizes: list[int], stop: tuple[str, ...]
) -> None:
    groups, rest = [], token_ids
    for size in sizes:
        groups.append(rest[:size])
        rest = rest[size:]
    one_by_one, texts = process(codec, [[token] for token in token_ids], stop=stop)
    grouped, grouped_texts = process(codec, [group for group in groups if group], stop=stop)
    assert (grouped.text, grouped.token_ids, grouped.logprobs) == (
        one_by_one.text,
        one_by_one.token_ids,
        one_by_one.logprobs,
    )
    assert "".join(texts) == one_by_one.text
    assert "".join(grouped_texts) == one_by_one.text


def test_steps_are_kept_as_they_were_emitted_and_cut(codec: TextCodec) -> None:
    token_ids = codec.encode("one two three four")
    output, _ = process(codec, [token_ids[:2], token_ids[2:]], stop=("three",))
    assert sum((step.token_ids for step in output.steps), ()) == output.token_ids
    assert [len(step.logprobs) for step in output.steps] == [len(step.token_ids) for step in output.steps]


def test_counts_and_times_are_filled_in() -> None:
    request = make_request("r", prompt=(1, 2, 3, 4))
    output_processor = OutputProcessor(request, None, arrived_s=10.0)
    output_processor.read([(TokenEvent(request_id="r", token_ids=(5,)), 12.0)])
    event = TokenEvent(request_id="r", token_ids=(6, 7, 8), num_candidates=4, num_accepted=2)
    last = TokenEvent(request_id="r", token_ids=(9,), num_candidates=3, num_accepted=3)
    refused = TokenEvent(request_id="r", token_ids=(10,), num_candidates=2, num_accepted=0)
    chunk = output_processor.read([(event, 13.0), (last, 15.0), (refused, 15.5)])
    assert chunk is not None
    assert (chunk.token_ids, chunk.num_draft_tokens, chunk.num_accepted_tokens) == ((6, 7, 8, 9, 10), 9, 5)
    statistics = RequestStatistics(queue_time_s=0.5, num_prefix_hit_tokens=2, num_preemptions=1)
    output_processor.read([(END._replace(statistics=statistics), 16.0)])
    output = output_processor.output
    assert output is not None
    assert output.text is None
    assert output.token_ids == (5, 6, 7, 8, 9, 10)
    assert output.num_prompt_tokens == 4
    assert output.num_verify_steps == 3
    assert output.num_draft_tokens == 9
    assert output.num_accepted_tokens == 5
    assert output.num_emitted_by_verify == 8, "the step's own count, though one of its steps was cut"
    assert output.acceptance_length == 8 / 3
    assert output.time_to_first_token_s == 2.0
    assert output.total_s == 6.0
    assert output.inter_token_latency_s == 0.8
    assert output.statistics == statistics


def test_steps_can_be_left_out() -> None:
    output_processor = OutputProcessor(make_request("r"), None, arrived_s=0.0, records_steps=False)
    output_processor.read([(TokenEvent(request_id="r", token_ids=(5,)), 1.0), (END, 2.0)])
    output = output_processor.output
    assert output is not None and output.steps == () and output.token_ids == (5,)
