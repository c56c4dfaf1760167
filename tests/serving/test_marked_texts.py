"""Drafts that a request reports: those that its steps verified, and a text marked by where its tokens come from."""

from pathlib import Path
from typing import Any

import pytest

import dflash_trt.demo
from dflash_trt.core.request import GenerationOutput, TokenEvent
from dflash_trt.core.sampling import SamplingParams
from dflash_trt.scheduler import ngram_index
from dflash_trt.serving.detokenizer import ByteDetokenizer
from dflash_trt.serving.llm import LLM
from dflash_trt.serving.marked_texts import DraftMarker, MarkedText, marked_texts
from tests.engine_dir.building import build

DEMO = Path(dflash_trt.demo.__file__).parent
PROMPTS = ["def merge(left, right):\n", "import os\n", "class Reader:\n    def __init__(self, path):\n"]
GREEDY = SamplingParams(max_new_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo pair, of whose drafts some are accepted."""
    fields = {"target": str(DEMO / "target"), "drafter": str(DEMO / "drafter"), "max_seq_len": 96}
    return build(DEMO, tmp_path_factory.mktemp("marked") / "engine", **fields).path


@pytest.mark.parametrize(
    "options",
    [{}, {"overlap_scheduling": True}, {"draft_length": 2}, {"adaptive_draft_length": True}, {"ngram": True}],
    ids=str,
)
def test_reported_drafts_are_those_that_the_next_step_verified(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Greedily: the accepted ones are the text, and the first that was not accepted is not."""
    monkeypatch.setattr(ngram_index, "MIN_MATCH", 1)
    num_rejected = num_accepted = num_from_texts = 0
    with LLM(engine_dir, **options) as llm:
        for output in llm.generate(PROMPTS, GREEDY, reports_drafts=True):
            drafts: tuple[int, ...] = ()
            for event in output.steps:
                drafts = event.ngram_draft_token_ids or drafts
                num_from_texts += len(event.ngram_draft_token_ids)
                assert len(drafts) >= event.num_candidates
                count = min(event.num_accepted, len(event.token_ids))
                assert drafts[:count] == event.token_ids[:count]
                if count < min(event.num_candidates, len(event.token_ids)):
                    assert drafts[count] != event.token_ids[count]
                    num_rejected += 1
                num_accepted += count
                drafts = event.draft_token_ids
    assert num_rejected and num_accepted
    assert (num_from_texts > 0) == ("ngram" in options)


def test_marks_leave_the_text_as_it_is_and_count_every_draft(engine_dir: Path) -> None:
    with LLM(engine_dir) as llm:
        plain = llm.generate(PROMPTS, GREEDY)
        outputs = llm.generate(PROMPTS, GREEDY, reports_drafts=True)
        assert llm.codec is not None
        for output, other in zip(outputs, plain, strict=True):
            assert not any(event.draft_token_ids for event in other.steps)
            texts = list(marked_texts(output, llm.codec))
            assert "".join(text.text for text in texts if text.origin != "rejected") == output.text == other.text
        (sampled,) = llm.generate(PROMPTS[:1], SamplingParams(max_new_tokens=9, temperature=1.0), reports_drafts=True)
        texts = list(marked_texts(sampled, llm.codec))
        assert "".join(text.text for text in texts if text.origin != "rejected") == sampled.text


def test_a_stream_has_the_same_marks_as_the_whole_output(engine_dir: Path) -> None:
    with LLM(engine_dir) as llm:
        assert llm.codec is not None
        marker, texts = DraftMarker(llm.codec), []
        for chunk in llm.stream(PROMPTS[0], GREEDY, reports_drafts=True):
            texts += marker.push(chunk.steps)
            if chunk.output is not None:
                assert [*texts, *marker.flush()] == list(marked_texts(chunk.output, llm.codec))


class ByteCodec:
    """Token i is the byte i."""

    def detokenizer(self) -> ByteDetokenizer:
        return ByteDetokenizer(lambda token_id: bytes([token_id]))


def test_a_rejected_draft_within_a_character_completes_it_in_its_own_way() -> None:
    """The target writes an e with an accent, of two bytes; the drafter had the first, and another accent."""
    accented, other = "\u00e9".encode(), "\u00e8".encode()
    marker = DraftMarker(ByteCodec())  # type: ignore[arg-type]
    texts = list(marker.mark(accented, other, 1))
    assert texts == [MarkedText("\u00e8", "rejected"), MarkedText("\u00e9", "target")]
    assert list(marker.mark(accented[:1], (), 0)) == []
    assert list(marker.flush()) == [MarkedText("\ufffd", "target")]


class Codec:
    """Token i is the letter i."""

    def detokenizer(self) -> "Codec":
        return self

    def push(self, token_ids: tuple[int, ...]) -> str:
        return "".join(map(chr, token_ids))

    def flush(self) -> str:
        return ""


def step(text: str, drafts: str, *, accepted: int = 0, candidates: int = 0) -> TokenEvent:
    counts = {"num_candidates": candidates, "num_accepted": accepted, "draft_token_ids": tuple(map(ord, drafts))}
    return TokenEvent("r", tuple(map(ord, text)), **counts)  # type: ignore[arg-type]


def test_a_step_is_its_accepted_drafts_the_refused_ones_and_the_targets_own_token() -> None:
    steps = (
        step("a", "bcx"),
        step("bcd", "yz", accepted=2, candidates=3),
        step("e", "fg", candidates=1),  # of its two drafts one is verified
        step("fgh", "ij", accepted=2, candidates=2),
        step("i", "kl", accepted=2, candidates=2),  # cut within its accepted drafts
    )
    fields: dict[str, Any] = dict.fromkeys(GenerationOutput.__dataclass_fields__)
    output = GenerationOutput(**fields | {"steps": steps})
    assert list(marked_texts(output, Codec())) == [  # type: ignore[arg-type]
        *(MarkedText("a", "target"), MarkedText("bc", "accepted"), MarkedText("x", "rejected")),
        *(MarkedText("d", "target"), MarkedText("y", "rejected"), MarkedText("e", "target")),
        *(MarkedText("fg", "accepted"), MarkedText("h", "target"), MarkedText("i", "accepted")),
    ]


def test_a_rejected_text_stays_on_its_line() -> None:
    assert MarkedText("a\n    b\n", "rejected").shown == "a\u23ceb\u23ce"
    assert MarkedText("a\n    b\n", "accepted").shown == "a\n    b\n"
