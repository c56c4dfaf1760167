"""Engines of backend tensorrt_llm, over a stand-in of the package in an environment of its own, and over a server."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dflash_trt.cli.main import cli
from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import ConfigError, EngineDirError, RequestError
from dflash_trt.core.request import GenerationOutput, SamplingParams
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.servers.dynamo.prefix_events import PrefixEvents
from dflash_trt.servers.dynamo.service import EngineService, open_service
from dflash_trt.serving.llm import LLM
from dflash_trt.serving.tensorrt_llm.engine import PYTHON, URL
from scripts import trtllm_check
from tests.factories import make_eagle3_head, make_target, make_zlab_drafter
from tests.serving.trtllm_environment import stand_in_python
from tests.serving.trtllm_server import _Server, trtllm_server
from tests.serving.trtllm_stand_in.tensorrt_llm import Model

PROMPTS = [[5, 17, 80, 33, 9], [200, 41, 7], [100, 101, 102, 103]]
LONG = SamplingParams(max_new_tokens=100, ignore_eos=True)


def build(base: Path, name: str, **fields: Any) -> EngineDir:
    config = BuildConfig(target="target", drafter="drafter", max_seq_len=128, max_batch_size=4, **fields)
    return build_engine(
        config, base / name, base_dir=base, overwrite=False, command=("build",), progress=lambda report: None
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("trtllm")
    make_zlab_drafter(base / "drafter", target_dir=make_target(base / "target"))
    return base


@pytest.fixture(scope="module")
def engine(base: Path) -> EngineDir:
    return build(base, "engine", backend="tensorrt_llm")


@pytest.fixture(scope="module")
def torch_llm(base: Path) -> Iterator[LLM]:
    """The torch backend, in float32."""
    with LLM(build(base, "torch", dtype="float32").path, device="cpu", num_threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(torch_llm: LLM) -> list[GenerationOutput]:
    return torch_llm.generate(PROMPTS)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter of another environment, which has the stand-in, and transformers for it, but no dflash-trt."""
    return stand_in_python(tmp_path_factory.mktemp("environment") / "venv")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "told.jsonl"


def open_llm(engine: EngineDir, python: str, log: Path, **settings: Any) -> LLM:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PYTHON, python)
        patch.setenv("STAND_IN_LOG", str(log))
        patch.delenv("PYTHONPATH", raising=False)  # the other interpreter finds its own
        return LLM(engine.path, **settings)


@pytest.fixture(scope="module")
def llm(engine: EngineDir, python: str, log: Path) -> Iterator[LLM]:
    """K = 2 of the drafter's 3, and settings that become arguments."""
    with open_llm(engine, python, log, draft_length=2, overlap_scheduling=False, kv_cache_bytes=1 << 20) as llm:
        yield llm


@pytest.fixture(scope="module")
def undrafted(engine: EngineDir, python: str, log: Path) -> Iterator[LLM]:
    with open_llm(engine, python, log.with_name("undrafted.jsonl"), use_drafter=False) as llm:
        yield llm


def told(log: Path, key: str) -> list[Any]:
    return [line[key] for line in map(json.loads, log.read_text().splitlines()) if key in line]


def wait_for(condition: Any) -> None:
    end_s = time.monotonic() + 10
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.01)
    assert condition()


def test_requests_are_answered_with_the_tokens_and_the_text_of_the_torch_backend(
    llm: LLM, expected: list[GenerationOutput]
) -> None:
    outputs = llm.generate(PROMPTS)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert [output.text for output in outputs] == [output.text for output in expected]
    assert [output.finish_reason for output in outputs] == [output.finish_reason for output in expected]
    assert llm.statistics.num_requests == len(PROMPTS) and llm.statistics.scheduler is None
    llm.check_integrity()


def test_acceptance_is_counted_from_iterations(llm: LLM) -> None:
    output = llm.generate([PROMPTS[0]], SamplingParams(max_new_tokens=14, ignore_eos=True))[0]
    sizes = [len(event.token_ids) for event in output.steps]
    assert sizes == [1, 1, 2, 3, 1, 2, 3, 1]  # as the stand-in plays them, for K = 2
    assert (output.num_verify_steps, output.num_draft_tokens, output.num_accepted_tokens) == (7, 14, 6)
    assert output.acceptance_length == 13 / 7


def test_settings_become_arguments_with_absolute_paths(llm: LLM, engine: EngineDir, log: Path) -> None:
    (args,) = told(log, "llm_args")
    assert args["model"] == str(engine.path / "target")
    assert args["speculative_config"]["speculative_model"] == str(engine.path / "drafter")
    assert args["speculative_config"]["max_draft_len"] == 2 == llm.config.max_draft_tokens
    assert args["disable_overlap_scheduler"] is True and args["kv_cache_config"]["max_gpu_total_bytes"] == 1 << 20
    assert not llm.config.enable_prefix_caching and llm.page_plan is None


def test_a_stop_token_ends_a_request_and_is_its_last_token(llm: LLM, expected: list[GenerationOutput]) -> None:
    tokens = expected[0].token_ids
    stop = tokens[4]
    output = llm.generate([PROMPTS[0]], SamplingParams(stop_token_ids=(stop,)))[0]
    assert output.finish_reason == "stop"
    assert output.token_ids == tokens[: tokens.index(stop) + 1]


def test_cancelling_and_stop_strings_abort_there(llm: LLM, log: Path) -> None:
    num_aborts = len(told(log, "abort"))
    stream = llm.submit(PROMPTS[0], LONG)
    assert stream.take() is not None
    stream.cancel()
    assert stream.result().finish_reason == "cancelled" and len(stream.result().token_ids) < 100
    wait_for(lambda: len(told(log, "abort")) == num_aborts + 1)
    whole = llm.generate([PROMPTS[1]], LONG)[0]
    assert whole.text is not None and whole.finish_reason == "length"
    word = whole.text[3:5]
    cut = llm.generate([PROMPTS[1]], SamplingParams(max_new_tokens=100, ignore_eos=True, stop=(word,)))[0]
    assert (cut.finish_reason, cut.text) == ("stop", whole.text[: whole.text.index(word)])
    wait_for(lambda: len(told(log, "abort")) == num_aborts + 2)


def test_a_request_that_it_refuses_fails_alone(llm: LLM) -> None:
    bad, good = llm.generate([[6, 6, 6], PROMPTS[0]])
    assert bad.finish_reason == "error" and bad.error == "ValueError: a prompt that TensorRT-LLM refuses"
    assert good.error is None


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ALWAYS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"json_schema": SCHEMA},
    {"regex": "[a-z]{3,9}(-[0-9]{1,4}){2}"},
    {"choice": ("yes", "no", 'a "quoted" one')},
    {"grammar": 'start: "(" start ")" | "[" (start ("," start)?)? "]" | "x"'},
]
UNDRAFTED: list[dict[str, Any]] = [
    {"logit_bias": {7: 5.0, 40: -3.0}},
    {"bad_words": ("a", "é", "zz")},
    {"logit_bias": {3: 90.0}, "min_tokens": 5},  # which would end at once
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": 2},
]


def assert_equal_outputs(ours: list[GenerationOutput], theirs: list[GenerationOutput]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert_equal_prompts(one.prompt_logprobs, other.prompt_logprobs)
        assert one.error is None and one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        for row, expected in zip(one.top_logprobs, other.top_logprobs, strict=True):
            assert [entry.token_id for entry in row] == [entry.token_id for entry in expected]
            assert [entry.logprob for entry in row] == pytest.approx([entry.logprob for entry in expected], abs=1e-4)


def assert_equal_prompts(ours: Any, theirs: Any) -> None:
    if theirs is None:
        assert ours is None
        return
    assert ours[0] is theirs[0] is None and len(ours) == len(theirs) > 1
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        assert one.token_id == other.token_id and one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [entry.token_id for entry in one.top_logprobs] == [entry.token_id for entry in other.top_logprobs]
        values = [[entry.logprob for entry in entries.top_logprobs] for entries in (one, other)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)


@pytest.mark.parametrize("sampling", ALWAYS)
def test_penalties_and_structured_output_beside_drafts_are_those_of_the_torch_backend(
    llm: LLM, torch_llm: LLM, sampling: dict[str, Any]
) -> None:
    params = SamplingParams(max_new_tokens=40, **sampling)
    theirs = torch_llm.generate(PROMPTS, params)
    assert_equal_outputs(llm.generate(PROMPTS, params), theirs)
    assert [output.token_ids for output in theirs] != [
        output.token_ids for output in torch_llm.generate(PROMPTS, SamplingParams(max_new_tokens=40))
    ]
    llm.check_integrity()


@pytest.mark.parametrize("sampling", [*ALWAYS, *UNDRAFTED])
def test_without_drafts_every_parameter_is_that_of_the_torch_backend(
    undrafted: LLM, torch_llm: LLM, sampling: dict[str, Any]
) -> None:
    params = SamplingParams(max_new_tokens=30, **sampling)
    outputs = undrafted.generate(PROMPTS, params)
    assert_equal_outputs(outputs, torch_llm.generate(PROMPTS, params))
    assert not any(output.num_verify_steps for output in outputs)


@pytest.mark.parametrize(("sampling", "name"), [(sampling, next(iter(sampling))) for sampling in UNDRAFTED])
def test_what_tensorrt_llm_does_not_do_while_it_drafts_is_refused_by_name(
    llm: LLM, sampling: dict[str, Any], name: str
) -> None:
    with pytest.raises(RequestError, match=f"sampling {name}: expected"):
        llm.generate(PROMPTS[0], SamplingParams(**sampling))


@pytest.mark.parametrize(
    "setting",
    [
        {"adaptive_draft_length": True},
        {"ngram": True},
        {"deterministic": True},
        {"num_threads": 2},
        {"device": "cpu"},
        {"draft_length": {1: 2, 4: 1}},
    ],
)
def test_settings_that_it_lacks_are_refused_before_anything_starts(
    engine: EngineDir, monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any]
) -> None:
    monkeypatch.setenv(PYTHON, "/nowhere/python")
    with pytest.raises(ConfigError, match=f"{next(iter(setting))}: expected"):
        LLM(engine.path, RuntimeConfig(**setting))


def test_without_tensorrt_llm_the_command_of_its_container_is_shown(
    engine: EngineDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineDirError) as raised:
        LLM(engine.path)
    assert "expected the package tensorrt_llm, found ModuleNotFoundError" in str(raised.value)
    assert f"-w {engine.path} nvcr.io/nvidia/tensorrt-llm/release" in str(raised.value)
    assert "trtllm-serve serve target --config llm_args.yaml" in str(raised.value)
    monkeypatch.setenv(PYTHON, "/nowhere/python")
    with pytest.raises(EngineDirError, match="TensorRT-LLM: expected a Python, found /nowhere/python"):
        LLM(engine.path)
    monkeypatch.setenv(URL, "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=f"expected one of it and {URL}, found both"):
        LLM(engine.path)
    monkeypatch.setenv(PYTHON, "")  # as good as none
    with pytest.raises(EngineDirError, match=r"http://127\.0\.0\.1:9"):
        LLM(engine.path)


@pytest.fixture(scope="module")
def model(engine: EngineDir) -> Model:
    return Model(str(engine.path / "target"), max_draft_len=3)


def speculative_config(engine: EngineDir) -> Any:
    assert engine.manifest.tensorrt_llm is not None
    return engine.manifest.tensorrt_llm.llm_args["speculative_config"]


@pytest.fixture
def server(model: Model, engine: EngineDir, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Server]:
    with trtllm_server(model, speculative_config(engine)) as (url, server):
        monkeypatch.setenv(URL, url)
        yield server


def test_a_running_server_answers_with_the_same_tokens(
    engine: EngineDir, server: _Server, expected: list[GenerationOutput]
) -> None:
    with LLM(engine.path) as llm:
        outputs = llm.generate(PROMPTS)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
        assert llm.generate(PROMPTS[0], SamplingParams(max_new_tokens=10, ignore_eos=True)).acceptance_length == 9 / 4
        bad = llm.generate([[6, 6, 6]])[0]
        assert bad.finish_reason == "error" and bad.error is not None and "status 400" in bad.error
        stream = llm.submit(PROMPTS[0], LONG)
        assert stream.take() is not None
        stream.cancel()
        assert stream.result().finish_reason == "cancelled"
        wait_for(lambda: server.num_hung_up == 1)
    with pytest.raises(ConfigError, match="draft_length: expected nothing, for the server is started, found 2"):
        LLM(engine.path, draft_length=2)


def test_an_eagle3_engine_runs_requests_as_a_dflash_engine_does(
    base: Path, python: str, log: Path, torch_llm: LLM
) -> None:
    make_eagle3_head(base / "eagle3", target_dir=base / "target")
    config = BuildConfig(target="target", drafter="eagle3", max_seq_len=128, max_batch_size=4, backend="tensorrt_llm")
    engine = build_engine(
        config, base / "eagle3-engine", base_dir=base, overwrite=False, command=("build",), progress=lambda _: None
    )
    own_log = log.with_name("eagle3.jsonl")
    params = SamplingParams(max_new_tokens=40, regex="[a-z]{3,9}(-[0-9]{1,4}){2}")
    with open_llm(engine, python, own_log, draft_length=5) as llm:
        assert_equal_outputs(llm.generate(PROMPTS), torch_llm.generate(PROMPTS))
        assert_equal_outputs(llm.generate(PROMPTS, params), torch_llm.generate(PROMPTS, params))
    (args,) = told(own_log, "llm_args")
    assert args["speculative_config"]["max_draft_len"] == 5 and args["speculative_config"]["decoding_type"] == "Eagle3"


@pytest.mark.parametrize("sampling", ALWAYS)
def test_a_running_server_takes_them_beside_drafts(
    engine: EngineDir, server: _Server, torch_llm: LLM, sampling: dict[str, Any]
) -> None:
    params = SamplingParams(max_new_tokens=30, **sampling)
    with LLM(engine.path) as llm:
        assert_equal_outputs(llm.generate(PROMPTS, params), torch_llm.generate(PROMPTS, params))
        with pytest.raises(RequestError, match=r"sampling logprobs: expected False while TensorRT-LLM drafts"):
            llm.generate(PROMPTS[0], SamplingParams(logprobs=True))


def test_a_running_server_without_drafts_takes_biases_and_log_probabilities(
    base: Path, model: Model, torch_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = BuildConfig(target="target", drafter=None, max_seq_len=128, max_batch_size=4, backend="tensorrt_llm")
    engine = build_engine(
        config, base / "plain", base_dir=base, overwrite=False, command=("build",), progress=lambda report: None
    )
    with trtllm_server(model, None) as (url, _):
        monkeypatch.setenv(URL, url)
        with LLM(engine.path) as llm:
            for sampling in ({"logit_bias": {7: 5.0}}, {"logprobs": True}):
                params = SamplingParams(max_new_tokens=20, **sampling)
                assert_equal_outputs(llm.generate(PROMPTS, params), torch_llm.generate(PROMPTS, params))
            for name, value in {"min_tokens": 2, "bad_words": ("a",)}.items():
                with pytest.raises(RequestError, match=f"sampling {name}: expected"):
                    llm.generate(PROMPTS[0], SamplingParams(**{name: value}))
            with pytest.raises(RequestError, match="sampling prompt_logprobs: expected None, for the completions"):
                llm.generate(PROMPTS[0], SamplingParams(prompt_logprobs=0))
            with pytest.raises(RequestError, match="sampling top_logprobs: expected 0, for the completions"):
                llm.generate(PROMPTS[0], SamplingParams(logprobs=True, top_logprobs=1))


def test_a_worker_of_dynamo_serves_it_without_pages(engine: EngineDir, server: _Server) -> None:
    from tests.servers.dynamo.test_request_fields import request

    asked = request(token_ids=PROMPTS[0], stop_conditions={"max_tokens": 6, "ignore_eos": True})
    asked["sampling_options"]["temperature"] = 0.0

    async def answer(service: EngineService) -> list[dict[str, Any]]:
        return [chunk async for chunk in service.generate(asked, "id", lambda: False)]

    service, limits = open_service(engine, RuntimeConfig(), PrefixEvents())
    try:
        chunks = asyncio.run(answer(service))
    finally:
        service.close()
    with LLM(engine.path) as llm:
        expected = llm.generate(PROMPTS[0], SamplingParams(max_new_tokens=6, ignore_eos=True))
    assert tuple(token for chunk in chunks for token in chunk["token_ids"]) == expected.token_ids
    assert chunks[-1]["finish_reason"] == "length"
    assert (limits.max_seq_len, limits.page_size, limits.num_pages) == (128, None, None)


def test_nothing_at_the_url_is_an_error_that_says_how_to_start_it(
    engine: EngineDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URL, "http://127.0.0.1:9")
    with pytest.raises(EngineDirError, match="expected a running trtllm-serve, found ConnectionRefusedError"):
        LLM(engine.path)


def test_run_prints_what_the_server_generates(
    engine: EngineDir, server: _Server, expected: list[GenerationOutput], tmp_path: Path
) -> None:
    rows = "".join(json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in PROMPTS)
    (tmp_path / "rows.jsonl").write_text(rows)
    words = ["run", engine.path, "--input-file", tmp_path / "rows.jsonl", "--json", "--trace-file", tmp_path / "trace"]
    result = CliRunner().invoke(cli, [*map(str, words)])
    assert result.exit_code == 0, result.output
    steps = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    assert any(step["num_candidates"] for step in steps)
    assert not any(step["num_candidates"] and "draft_token_ids" in step for step in steps)  # it does not say them
    document = json.loads(result.stdout)
    assert [row["text"] for row in document["outputs"]] == [output.text for output in expected]
    assert document["kv_pages"] is None and document["summary"]["acceptance_length"] > 1


@pytest.mark.slow  # starts the stand-in once more
def test_the_check_of_an_engine_prints_one_line_of_json(
    engine: EngineDir, python: str, log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Texts of float32 against those of bfloat16, which part at ties."""
    monkeypatch.setenv(PYTHON, python)
    monkeypatch.setenv("STAND_IN_LOG", str(log))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert trtllm_check.main([str(engine.path), "--max-new-tokens", "6", "--min-common-prefix", "0.1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["tensorrt_llm_version"], report["num_prompts"], report["errors"]) == ("1.4.0rc1", 4, [])
    assert report["acceptance_length"] == 5 / 3 and report["torch_acceptance_length"] >= 1
    assert 0.1 <= report["common_prefix_fraction"] <= 1
    record = engine.manifest.tensorrt_llm
    assert record is not None
    wrong = record.model_copy(update={"llm_args": {**record.llm_args, "max_batchsize": 1}})
    odd = EngineDir(engine.path, engine.manifest.model_copy(update={"tensorrt_llm": wrong}))
    with pytest.raises(EngineDirError, match=r"expected those of TorchLlmArgs, found TypeError: .*max_batchsize"):
        trtllm_check.validated_version(odd, python)


def test_a_common_prefix_ends_at_the_first_difference() -> None:
    fraction = trtllm_check.common_prefix_fraction
    assert (fraction([1, 2, 3], [1, 2, 3]), fraction([1, 2], [1, 3]), fraction([1], [1, 2])) == (1, 0.5, 0.5)


def test_a_process_that_ends_fails_its_requests_and_the_engine(
    engine: EngineDir, python: str, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PYTHON, python)
    monkeypatch.setenv("STAND_IN_LOG", str(log.with_name("ended.jsonl")))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with LLM(engine.path) as llm:
        stream = llm.submit(PROMPTS[0], LONG)
        assert stream.take() is not None
        os.kill(llm._engine._link._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        output = stream.result()
        assert (output.finish_reason, output.error) == ("error", "the process of TensorRT-LLM has ended")
        assert llm.failure == "the process of TensorRT-LLM has ended"
        with pytest.raises(RequestError, match="the engine has failed"):
            llm.generate(PROMPTS[0])
