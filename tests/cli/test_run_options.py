"""What `run` prints as it comes."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_trt import RuntimeConfig, SamplingParams
from dflash_trt.cli.run_options import RunOptions

OPTIONS = RunOptions(
    engine_dir=Path("engine"),
    prompts=("a",),
    input_file=None,
    output_file=None,
    resume=False,
    trace_file=None,
    overwrite=False,
    chat=False,
    system=None,
    chat_template_options=(),
    stream=None,
    as_json=False,
    sampling=SamplingParams(),
    runtime=RuntimeConfig(),
)
OF_TWO = SamplingParams(n=2, temperature=0.8)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_one_sample_of_one_prompt_streams_to_a_terminal(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert OPTIONS.streams(1) == is_terminal
    assert not OPTIONS.streams(2)
    assert not replace(OPTIONS, sampling=OF_TWO).streams(1)
    for other in ({"as_json": True}, {"output_file": Path("out")}, {"input_file": Path("in")}):
        assert not replace(OPTIONS, **other).streams(1)


@pytest.mark.parametrize("said", [True, False])
def test_what_is_said_holds_everywhere(monkeypatch: pytest.MonkeyPatch, said: bool) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: not said)
    assert replace(OPTIONS, stream=said, sampling=OF_TWO).streams(2) == said
