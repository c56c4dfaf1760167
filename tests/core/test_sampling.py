"""The table of sampling parameters, and the classes that list its rows for their readers."""

import hashlib
import json
from dataclasses import MISSING, asdict, fields
from typing import Any

import click
import pytest
from click.testing import CliRunner
from pydantic import BaseModel

from dflash_trt.cli.sampling_options import sampling_options
from dflash_trt.core.checked_values import FLOAT32_TINY, INT32_MAX
from dflash_trt.core.errors import RequestError
from dflash_trt.core.sampling import (
    MAX_SEED,
    SAMPLING_FIELDS,
    STEP_SAMPLING_FIELDS,
    SamplingColumns,
    SamplingParams,
    StepSampling,
    sample_seed,
)
from dflash_trt.core.step_spec import STEP_INPUTS


def test_what_a_step_reads_of_a_request_is_the_tables() -> None:
    names = [row.name for row in STEP_SAMPLING_FIELDS]
    assert [(item.name, item.default) for item in fields(StepSampling)] == [
        (row.name, row.off) for row in STEP_SAMPLING_FIELDS
    ]
    assert [item.name for item in fields(SamplingColumns)] == names
    inputs = {tensor.name: tensor for tensor in STEP_INPUTS}
    for row in STEP_SAMPLING_FIELDS:
        tensor = inputs[row.name]
        assert (tensor.dtype, tensor.axes, tensor.padding) == (row.dtype, ("R",), row.off)


def test_every_parameter_has_a_default_of_its_own_type_that_its_reader_leaves_alone() -> None:
    assert SAMPLING_FIELDS
    for row in SAMPLING_FIELDS:
        assert row.default is not MISSING and row.read(row.default) == row.default
        assert row.default is None or isinstance(row.default, tuple if row.is_list else row.kind)


BOUNDS: dict[str, tuple[Any, Any, Any, Any]] = {  # lowest, highest, and the nearest that are refused
    "max_new_tokens": (1, 2**40, 0, None),
    "temperature": (0.0, 1e4, -1e-9, 1e4 + 1e-6),
    "top_k": (0, INT32_MAX, -1, None),
    "top_p": (FLOAT32_TINY, 1.0, 0.0, 1.0 + 1e-9),
    "min_p": (0.0, 1.0, -1e-9, 1.0 + 1e-9),
    "repetition_penalty": (0.01, 100.0, 0.0099, 100.1),
    "presence_penalty": (-2.0, 2.0, -2.1, 2.1),
    "frequency_penalty": (-2.0, 2.0, -2.1, 2.1),
    "logit_bias": (((3, -100.0),), ((3, 100.0),), ((3, -100.1),), ((3, 100.1),)),
    "min_tokens": (0, 128, -1, None),
    "seed": (0, MAX_SEED, -1, MAX_SEED + 1),
    "stop_token_ids": ((0,), (2**40,), (-1,), None),
    "top_logprobs": (0, 20, -1, 21),
    "prompt_logprobs": (0, 20, -1, 21),
    "n": (1, 128, 0, 129),
    "stop": (("x",), ("x" * 256,) * 64, ("x" * 257,), ("x",) * 65),
    "bad_words": (("x",), ("x" * 256,) * 64, ("x" * 257,), ("x",) * 65),
    "json_schema": ("{}", '{"a":"' + "x" * (2**20 - 8) + '"}', "[]", '{"a":"' + "x" * (2**20 - 7) + '"}'),
    "regex": ("x", "x" * 2**20, "", "x" * (2**20 + 1)),
    "choice": ((), ("x" * 2**19,) * 2, ("",), ("x", "x" * 2**20)),
    "grammar": ("x", "x" * 2**20, "", "x" * (2**20 + 1)),
}


def test_so_many_tokens_may_have_a_bias_and_no_more() -> None:
    biases = dict.fromkeys(range(513), 1.0)
    with pytest.raises(RequestError, match="at most 512 tokens"):
        SamplingParams(logit_bias=biases)
    del biases[7]
    assert len(SamplingParams(logit_bias=biases).logit_bias) == 512


@pytest.mark.parametrize("name", BOUNDS)
def test_a_parameter_may_reach_its_bounds_and_no_further(name: str) -> None:
    lowest, highest, *refused = BOUNDS[name]
    others = {"logprobs": True} if name == "top_logprobs" else {}
    for value in (lowest, highest):
        assert getattr(SamplingParams(**{name: value}, **others), name) == value
    for value in refused:
        if value is not None:
            with pytest.raises(RequestError, match=f"sampling {name}: expected"):
                SamplingParams(**{name: value}, **others)


def test_the_defaults_are_greedy_and_change_nothing() -> None:
    params = asdict(SamplingParams())
    assert {name for name in params if name not in BOUNDS} == {"ignore_eos", "logprobs"}
    assert (params.pop("max_new_tokens"), params.pop("top_p"), params.pop("repetition_penalty")) == (128, 1.0, 1.0)
    assert params.pop("n") == 1 and not any(params.values())
    none = {name for name, value in params.items() if value is None}
    assert none == {"seed", "prompt_logprobs", "json_schema", "regex", "grammar"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"top_logprobs": 1}, "top_logprobs: expected 0 without logprobs, found 1. Set logprobs as well"),
        ({"min_tokens": 4, "max_new_tokens": 3}, "min_tokens: expected at most max_new_tokens 3, found 4"),
        ({"regex": "a", "choice": ["b"]}, "at most one of json_schema, regex, choice, grammar, found regex and choice"),
        ({"json_schema": "{", "regex": ""}, "2 problems"),
        ({"tempature": 1}, "'tempature' is no sampling parameter. Did you mean 'temperature'?"),
    ],
)
def test_parameters_that_contradict_each_other_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**fields)
    assert said in str(error.value)
    SamplingParams(min_tokens=3, max_new_tokens=3, logprobs=True, top_logprobs=1, regex="a")


def test_a_schema_may_be_an_object_a_text_or_a_class() -> None:
    class Answer(BaseModel):
        name: str

    assert SamplingParams(json_schema={"type": "object"}).json_schema == '{"type": "object"}'
    of_class = SamplingParams(json_schema=Answer).json_schema  # type: ignore[arg-type]
    assert json.loads(str(of_class)) == Answer.model_json_schema()
    assert SamplingParams(json_schema="{}").grammar_field == "json_schema"
    assert [SamplingParams(**{name: "a"}).grammar_field for name in ("regex", "grammar")] == ["regex", "grammar"]
    assert SamplingParams(choice=["a"]).grammar_field == "choice" and SamplingParams().grammar_field is None


def test_each_sample_has_a_seed_of_its_own_and_the_first_that_of_its_request() -> None:
    seeds = {(seed, index): sample_seed(seed, index) for seed in range(8) for index in range(1, 20)}
    assert [sample_seed(seed, 0) for seed in (0, 5, MAX_SEED)] == [0, 5, MAX_SEED]
    assert len(set(seeds.values())) == len(seeds) and all(0 <= seed <= MAX_SEED for seed in seeds.values())
    assert max(seeds.values()) > 2**62, "of all 63 bits"
    assert sample_seed(7, 1) == int(hashlib.sha256(b"7/1").hexdigest()[:16], 16) // 2


def test_drafts_have_random_numbers_of_their_own_only_where_something_is_drawn() -> None:
    drawn = SamplingParams(temperature=0.5)
    streams = [
        StepSampling.of(params, seed=1, shares_noise=shares_noise).draft_stream
        for params in (drawn, SamplingParams(temperature=0.5, top_k=1), SamplingParams())
        for shares_noise in (True, False)
    ]
    assert streams == [0, 1, 0, 0, 0, 0]
    assert StepSampling.of(drawn, seed=1).draft_stream == 0


def test_a_step_gets_the_values_of_a_request_and_its_resolved_seed() -> None:
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, seed=None, stop="x")
    assert StepSampling.of(params, seed=8) == StepSampling(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, seed=8)


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"min_p": 1.0}])
def test_a_request_whose_filters_leave_one_token_is_greedy(filters: dict[str, float]) -> None:
    assert StepSampling.of(SamplingParams(temperature=0.9, **filters), seed=8).temperature == 0.0
    assert StepSampling.of(SamplingParams(temperature=0.9, top_k=2, min_p=0.99), seed=8).temperature == 0.9


def test_filters_are_idle_at_the_values_that_keep_every_token_or_one_alone() -> None:
    rows = {row.name: row for row in SAMPLING_FIELDS}
    idle = {"top_k": (0, 1), "top_p": (1.0,), "min_p": (0.0,)}
    assert {name for name, row in rows.items() if row.idle} == set(idle)
    for name, values in idle.items():
        assert not any(rows[name].is_filter(value) for value in values)
    assert rows["top_k"].is_filter(2) and rows["top_p"].is_filter(0.5) and rows["min_p"].is_filter(0.5)
    assert not rows["temperature"].is_filter(2.0)


def test_the_options_of_a_command_are_the_table_with_its_help() -> None:
    @click.command()
    @sampling_options
    def command(**options: object) -> None:
        assert SamplingParams(**options) == SamplingParams()  # type: ignore[arg-type]

    runner = CliRunner()
    assert runner.invoke(command, [], catch_exceptions=False).exit_code == 0
    words = " ".join(runner.invoke(command, ["--help"], terminal_width=500).output.split())
    assert all(row.help in words for row in SAMPLING_FIELDS)
