"""Structured output of a real engine, for each K: valid by jsonschema and re, and equal."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from pydantic import BaseModel, ConfigDict, Field

import dflash_trt.demo
from dflash_trt.backends.torch import sampling as torch_sampling
from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import RequestError
from dflash_trt.core.request import GenerationOutput, SamplingParams
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.serving.llm import LLM
from tests.factories import make_target, make_zlab_drafter
from tests.serving.schemas import random_schema

REGEXES = (
    "[a-z]{3,9}(-[0-9]{1,4}){2}",
    "(yes|no|maybe)+!",
    r"\d{4}/\d{2}/\d{2}",
    "[^a]{5}",
    'a"b\\\\c?',
    "(é|ü|日本|🙂){2,4}",
    "x*y{0,3}",
)
CHOICES = ("yes", "no", "yes and no", 'a "quoted" one', "new\nline", "日本🙂")
GRAMMAR = 'start: "(" start ")" | "[" (start ("," start)?)? "]" | "x"'
BY_K = (0, 3, 7)


def build(target: Path, drafter: Path, output: Path) -> Path:
    config = BuildConfig(
        target=str(target), drafter=str(drafter), dtype="float32", max_seq_len=512, max_batch_size=16, page_size=8,
        max_num_tokens=256,
    )  # fmt: skip
    build_engine(config, output, base_dir=output.parent, overwrite=False, command=["test"], progress=lambda _: None)
    return output


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer of 260 tokens, in a vocabulary of 272."""
    path = tmp_path_factory.mktemp("structured")
    target = make_target(path / "target")
    return build(target, make_zlab_drafter(path / "drafter", target_dir=target, block_size=8), path / "engine")


@pytest.fixture(scope="module")
def llm(engine_dir: Path) -> Iterator[LLM]:
    with LLM(engine_dir) as llm:
        yield llm


def generate(engine_dir: Path, samplings: Sequence[SamplingParams], **settings: Any) -> list[GenerationOutput]:
    with LLM(engine_dir, **settings) as llm:
        outputs = llm.generate([f"Number {i}: " for i in range(len(samplings))], samplings)
        llm.check_integrity()
    return outputs


def texts(outputs: Sequence[GenerationOutput]) -> list[tuple[Any, ...]]:
    assert {output.finish_reason for output in outputs} <= {"stop", "length"}, [output.error for output in outputs]
    return [(output.token_ids, output.finish_reason) for output in outputs]


def check(schema: dict[str, Any], text: str) -> None:
    """Raises ValidationError."""
    Draft202012Validator(schema).validate(json.loads(text))


def prove(engine_dir: Path, seeds: Sequence[int], *, max_new_tokens: int) -> float:
    """Every finished text is valid, and equal for each K; returns the fraction that finished."""
    schemas = [random_schema(seed) for seed in seeds]
    samplings = [
        SamplingParams(json_schema=schema, max_new_tokens=max_new_tokens, temperature=float(seed % 3 > 0), seed=seed)
        for seed, schema in zip(seeds, schemas, strict=True)
    ]
    outputs = {k: generate(engine_dir, samplings, draft_length=k) for k in BY_K}
    for k in BY_K[1:]:
        assert texts(outputs[k]) == texts(outputs[0])
    finished = [(i, output) for i, output in enumerate(outputs[7]) if output.finish_reason == "stop"]
    for i, output in finished:
        assert output.text is not None
        check(schemas[i], output.text)
    assert sum(output.num_accepted_tokens for output in outputs[7]) > 0
    return len(finished) / len(schemas)


def test_outputs_for_random_schemas_are_valid_and_equal_for_every_k(engine_dir: Path) -> None:
    assert prove(engine_dir, range(20), max_new_tokens=120) > 0.6  # measured: 0.90


@pytest.mark.slow
def test_outputs_for_a_thousand_schemas_are_valid_and_equal_for_every_k(tmp_path: Path) -> None:
    demo = Path(dflash_trt.demo.__file__).parent
    engine_dir = build(demo / "target", demo / "drafter", tmp_path / "engine")
    assert prove(engine_dir, range(1000), max_new_tokens=200) > 0.9  # measured: 0.972


def free_and_constrained() -> list[SamplingParams]:
    """Each kind of constraint, greedy and sampled, and free requests among them."""
    samplings = [SamplingParams(regex=regex, max_new_tokens=60, seed=i) for i, regex in enumerate(REGEXES)]
    samplings += [SamplingParams(choice=CHOICES, temperature=2.0, max_new_tokens=60, seed=seed) for seed in range(5)]
    samplings += [SamplingParams(grammar=GRAMMAR, temperature=1.0, max_new_tokens=60, seed=seed) for seed in range(3)]
    for place in (2, 7, 11, 16):
        samplings.insert(place, SamplingParams(max_new_tokens=30, temperature=float(place % 2), seed=place))
    return samplings


@pytest.fixture(scope="module")
def alone(engine_dir: Path) -> list[GenerationOutput]:
    """One token at a time, each request by itself."""
    samplings = free_and_constrained()
    with LLM(engine_dir, draft_length=0, enable_prefix_caching=False) as llm:
        return [llm.generate(f"Number {i}: ", sampling) for i, sampling in enumerate(samplings)]


@pytest.mark.parametrize("overlap_scheduling", [False, True], ids=["plain", "chained"])
@pytest.mark.parametrize("num_draft_tokens", BY_K)
def test_each_text_is_that_of_the_request_alone(engine_dir, alone, num_draft_tokens, overlap_scheduling) -> None:
    samplings = free_and_constrained()
    settings = {"draft_length": num_draft_tokens, "overlap_scheduling": overlap_scheduling}
    assert texts(generate(engine_dir, samplings, **settings)) == texts(alone)


def test_finished_texts_match_their_expression_or_are_one_of_the_choices(alone) -> None:
    pairs = list(zip(free_and_constrained(), alone, strict=True))
    finished = [(sampling, output) for sampling, output in pairs if output.finish_reason == "stop"]
    expressions = [(sampling.regex, output.text) for sampling, output in finished if sampling.regex]
    assert len(expressions) >= 5 and all(re.fullmatch(regex, text) for regex, text in expressions)
    chosen = {output.text for sampling, output in pairs if sampling.choice}
    assert chosen <= set(CHOICES) and len(chosen) > 1
    nested = [output.text for sampling, output in finished if sampling.grammar]
    assert nested and all(text.count("(") == text.count(")") for text in nested)


def test_a_corrupted_mask_is_noticed(engine_dir, alone, monkeypatch) -> None:
    """The negative control: masks of a verify block one row too early."""
    right = torch_sampling.masked_scores
    monkeypatch.setattr(
        torch_sampling, "masked_scores", lambda scores, masks: right(scores.roll(-1, 0), masks).roll(1, 0)
    )
    outputs = generate(engine_dir, free_and_constrained(), draft_length=3)
    assert any(output.finish_reason == "error" for output in outputs)
    errors = [output.error for output in outputs if output.error]
    assert all("expected tokens that it allows, found" in error for error in errors)


def test_preemption_and_prefix_hits_change_no_text(engine_dir: Path) -> None:
    samplings = [
        SamplingParams(regex="[a-z ]{50,60}", max_new_tokens=70, temperature=float(seed % 2), seed=seed)
        for seed in range(16)
    ]
    roomy = texts(generate(engine_dir, samplings, draft_length=0, enable_prefix_caching=False))
    with LLM(engine_dir, kv_cache_bytes=800 * 2**10) as llm:
        for _ in range(2):
            assert texts(llm.generate([f"Number {i}: " for i in range(16)], samplings)) == roomy
        llm.check_integrity()
        scheduler = llm.statistics.scheduler
    assert scheduler is not None
    assert scheduler.num_preemptions > 0 and scheduler.num_prefix_hit_tokens > 0


def test_a_cancelled_request_leaves_the_others_alone(llm: LLM, alone) -> None:
    samplings = free_and_constrained()
    streams = [llm.submit(f"Number {i}: ", sampling) for i, sampling in enumerate(samplings)]
    extra = llm.submit("x", SamplingParams(regex="a*b", max_new_tokens=400))
    for _ in zip(extra, range(3), strict=False):
        pass
    extra.cancel()
    assert texts([stream.result(timeout_s=60) for stream in streams]) == texts(alone)
    llm.check_integrity()


def test_a_complete_text_ends_whatever_ends_the_model(llm: LLM) -> None:
    """With a stop token that the grammar lacks, with none, and behind a text that may go on."""
    for fields in ({"ignore_eos": True}, {"stop_token_ids": (5,)}, {}):
        output = llm.generate("x", SamplingParams(regex="ab{2}c", max_new_tokens=9, **fields))
        assert (output.text, output.finish_reason, len(output.token_ids)) == ("abbc", "stop", 4)
    open_ended = [
        llm.generate("x", SamplingParams(regex="ab*", max_new_tokens=9, ignore_eos=eos)) for eos in (True, False)
    ]
    assert open_ended[0].text == "a" + "b" * 8 and open_ended[0].finish_reason == "length"
    assert re.fullmatch("ab*", open_ended[1].text or "")
    (bracket,) = llm.codec.encode("]") if llm.codec else ()
    cut = llm.generate("x", SamplingParams(regex=r"a\]b", max_new_tokens=9, stop_token_ids=(bracket,)))
    assert (cut.text, cut.finish_reason) == ("a]", "stop")


def test_an_expression_that_only_the_empty_text_matches_gives_it(llm: LLM) -> None:
    for ignores in (False, True):
        output = llm.generate("x", SamplingParams(regex="a{0}", max_new_tokens=9, ignore_eos=ignores))
        assert (output.text, output.finish_reason) == ("", "stop")


def test_a_class_of_pydantic_is_a_schema(llm: LLM) -> None:
    class Answer(BaseModel):
        model_config = ConfigDict(extra="forbid", json_schema_extra={"x-guidance": {"whitespace_flexible": False}})
        yes: bool
        weight: int = Field(ge=0, le=9)

    output = llm.generate("x", SamplingParams(json_schema=Answer, max_new_tokens=200, temperature=1.0, seed=1))
    assert Answer.model_validate_json(output.text or "").weight < 10
    with pytest.raises(ValidationError):
        check(Answer.model_json_schema(), '{"yes": 3, "weight": 1}')


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json_schema": {"type": "nope"}}, "sampling json_schema: .*Invalid type: nope"),
        ({"json_schema": {"if": {}}}, r"sampling json_schema: .*Unimplemented keys: \[\"if\"\]"),
        ({"json_schema": {"enum": []}}, "sampling json_schema: .*Unsatisfiable"),
        ({"regex": "["}, "sampling regex: .*unclosed character class"),
        ({"regex": "a(?=b)"}, "sampling regex: .*look-around"),
        ({"grammar": "start: other"}, "sampling grammar: .*unknown name"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(llm: LLM, fields, message) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate("x", SamplingParams(**fields))
    output, free = llm.generate(["x", "y"], [SamplingParams(**fields), SamplingParams(max_new_tokens=2)])
    assert (output.finish_reason, free.finish_reason) == ("error", "length")
    assert output.error and re.search(message, output.error)


def test_an_engine_without_a_tokenizer_refuses_every_constraint(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", tokenizer=False)
    engine_dir = build(target, make_zlab_drafter(tmp_path / "drafter", target_dir=target), tmp_path / "engine")
    with LLM(engine_dir) as llm, pytest.raises(RequestError, match=r"sampling regex: .*no tokenizer"):
        llm.generate([1, 2, 3], SamplingParams(regex="a"))


def test_temperature_one_gives_the_masked_distribution_for_every_k(engine_dir: Path) -> None:
    """Against the target's own logits, of two letters behind each other, in the cells of their table."""
    letters, num = "abc", 400
    samplings = [SamplingParams(regex="[abc]{2}", temperature=1.0, max_new_tokens=4, seed=seed) for seed in range(num)]
    with LLM(engine_dir, draft_length=0) as llm:
        assert llm.codec is not None
        prompt = llm.codec.encode("x")
        ids = [llm.codec.encode(letter)[0] for letter in letters]
    executor = TorchExecutor.open(EngineDir.open(engine_dir), RuntimeConfig())
    logits = {first: executor.target_logits([*prompt, *first])[-1] for first in [(), *((i,) for i in ids)]}
    first = logits[()][ids].softmax(0)
    expected = torch.stack([p * logits[(i,)][ids].softmax(0) for p, i in zip(first, ids, strict=True)]).flatten() * num
    for k in (0, 3):
        with LLM(engine_dir, draft_length=k) as llm:
            outputs = llm.generate(["x"] * num, samplings)
        found = [letters.index(text[0]) * 3 + letters.index(text[1]) for output in outputs if (text := output.text)]
        counts = torch.bincount(torch.tensor(found), minlength=9)
        likely = expected > 5
        statistic = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
        assert len(found) == num and likely.sum() >= 4
        assert statistic < 4 * likely.sum(), k  # 8 degrees of freedom: 36 is exceeded once in 50 000
