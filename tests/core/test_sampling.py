"""The table of sampling parameters, and the classes that list its rows for their readers."""

from dataclasses import MISSING, fields

import click
import pytest
from click.testing import CliRunner

from dflash_trt.cli.sampling_options import sampling_options
from dflash_trt.core.sampling import (
    SAMPLING_FIELDS,
    STEP_SAMPLING_FIELDS,
    SamplingColumns,
    SamplingParams,
    StepSampling,
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
