"""Every option of a command, set to something else than its default, arrives where the work is done.

The tests compare all arguments of that call, and fail for an option of the command that they do not set.
"""

import hashlib
import json
import shlex
import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest

from dflash_trt.bench.conversation import Conversation
from dflash_trt.cli import plan_advice, plan_sweep
from dflash_trt.cli.bench import bench
from dflash_trt.cli.build import build
from dflash_trt.cli.doctor import doctor
from dflash_trt.cli.eval import evaluate
from dflash_trt.cli.inspect import inspect
from dflash_trt.cli.plan import plan
from dflash_trt.cli.ranks import ranks
from dflash_trt.cli.run import run
from dflash_trt.cli.runtime_options import settings_line
from dflash_trt.cli.serve import serve, worker
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.exit_codes import ExitCode
from dflash_trt.core.quantization import QuantizationConfig
from dflash_trt.core.request import SamplingParams
from dflash_trt.core.runtime_config import NODES, RuntimeConfig
from dflash_trt.core.sampling import SAMPLING_FIELDS
from dflash_trt.servers.triton.settings import ModelSettings
from dflash_trt.serving.llm import LLM
from tests.cli.calls import RecordedError, Recorder, options_never_set

# Of every field of RuntimeConfig the words of a command line, and the value that arrives.
RUNTIME: dict[str, tuple[list[str], Any]] = {
    "device": (["--device", "cpu"], "cpu"),
    "use_drafter": (["--no-drafter"], False),
    "adaptive_draft_length": (["--adaptive"], True),
    "draft_length": (["--draft-length", "2"], {1: 2}),
    "ngram": (["--ngram"], True),
    "draft_window": (["--draft-window", "100"], 100),
    "enable_prefix_caching": (["--no-prefix-caching"], False),
    "num_state_snapshots": (["--num-state-snapshots", "5"], 5),
    "overlap_scheduling": (["--overlap"], True),
    "deterministic": (["--deterministic"], True),
    "kv_cache_bytes": (["--kv-cache-bytes", "4096"], 4096),
    "host_cache_bytes": (["--host-cache-bytes", "1MiB"], 1 << 20),
    "disk_cache_dir": (["--disk-cache-dir", "/disk"], "/disk"),
    "disk_cache_bytes": (["--disk-cache-bytes", "2GB"], 2 * 10**9),
    "publish_prompts": (["--publish-prompts"], True),
    "kv_cache_free_memory_fraction": (["--kv-cache-free-memory-fraction", "0.25"], 0.25),
    "num_threads": (["--num-threads", "3"], 3),
    "nnodes": (["--nnodes", "2"], 2),
    "master_addr": (["--master-addr", "10.0.0.1"], "10.0.0.1"),
    "master_port": (["--master-port", "29777"], 29777),
    "plugin_library": (["--plugin-library", "/p.so"], "/p.so"),
    "max_queue_len": (["--max-queue-len", "9"], 9),
    "seed": (["--seed", "7"], 7),
}
SAMPLING = ["--max-new-tokens", "9", "--temperature", "0.5", "--top-k", "4", "--top-p", "0.75", "--min-p", "0.125"]
SAMPLING += ["--repetition-penalty", "1.5", "--presence-penalty", "0.5", "--frequency-penalty", "-0.5"]
SAMPLING += ["--logit-bias", "7=-2.5", "--logit-bias", "3=1", "--bad-word", "c", "--min-tokens", "2"]
SAMPLING += ["--seed", "6", "--stop", "a", "--stop", "b", "--stop-token-id", "7", "--ignore-eos", "--logprobs"]
SAMPLING += ["--top-logprobs", "3", "--prompt-logprobs", "2", "--n", "5"]
SAMPLING += ["--choice", "c", "--choice", "d"]
# At most one of these and --choice may be given.
GRAMMARS = {"json_schema": "{}", "regex": "a+", "grammar": "start: /a/"}
OF_NODES = [word for name in NODES for word in RUNTIME[name][0]]
OVER_NIXL = ["--transfer-backend", "nixl", "--transfer-bytes", "3MiB"]
CALLBACKS = {"before_load": None, "on_progress": None}
LLM_DEFAULTS = {"scheduler_config": None, "draft_length_policy": None, "fields": {}} | CALLBACKS


def runtime_cases(*without: str) -> list[tuple[list[str], RuntimeConfig]]:
    """Options of every field but those, and what they make: as many command lines as options exclude each other."""
    assert set(RUNTIME) == set(RuntimeConfig.model_fields)
    apart = (
        {
            "use_drafter",
            "num_state_snapshots",
            "host_cache_bytes",
            "disk_cache_dir",
            "disk_cache_bytes",
            "publish_prompts",
        },
        {"kv_cache_free_memory_fraction", "ngram"},
    )
    cases = []
    for part in (set(RUNTIME).difference(*apart), *apart):
        names = [name for name in RUNTIME if name in part and name not in without]
        if names:
            words = [word for name in names for word in RUNTIME[name][0]]
            cases.append((words, RuntimeConfig(**{name: RUNTIME[name][1] for name in names})))
    return cases


class RecordingLLM:
    """Records how it is opened and what it is asked for."""

    opened: Recorder
    asked: Recorder
    page_plan = "no pages"
    config = RuntimeConfig()
    chat_template_options: Mapping[str, Any] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(RecordedError):
            type(self).opened(self, *args, **kwargs)

    codec = "a tokenizer"

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return type(self).asked(self, *args, **kwargs)

    def __enter__(self) -> "RecordingLLM":
        return self

    def __exit__(self, *exception: object) -> None: ...


@pytest.fixture
def llm(monkeypatch) -> type[RecordingLLM]:
    recording = type("Recording", (RecordingLLM,), {"opened": Recorder(LLM.__init__), "asked": Recorder(LLM.generate)})
    monkeypatch.setattr("dflash_trt.serving.llm.LLM", recording)
    return recording


def opened(llm: type[RecordingLLM]) -> dict[str, Any]:
    """Without the callbacks, which test_refused_before_load.py and test_terminal.py see called."""
    return {name: value for name, value in llm.opened.arguments.items() if name != "self"} | CALLBACKS


OF_RUN = runtime_cases("seed")  # --seed is the sampling seed


@pytest.mark.parametrize(("words", "config"), OF_RUN)
def test_every_option_of_run_reaches_the_engine(llm, invoke, words, config) -> None:
    prompts = ["--prompt", "x", "--prompt", "y", "--chat", "--system", "Be brief."]
    prompts += ["--chat-template-option", "thinks=false", "--chat-template-option", "effort=low"]
    result = invoke("run", "dir", *prompts, *words, *SAMPLING, "--json")
    assert (result.exit_code, result.stderr) == (1, "error: recorded\n")
    assert opened(llm) == LLM_DEFAULTS | {"engine_dir": Path("dir"), "config": config}
    system = {"role": "system", "content": "Be brief."}
    own = {"thinks": False, "effort": "low"}
    conversations = [
        {"messages": [system, {"role": "user", "content": text}], "chat_template_kwargs": own} for text in ("x", "y")
    ]
    sampling = SamplingParams(
        max_new_tokens=9,
        temperature=0.5,
        top_k=4,
        top_p=0.75,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias=((3, 1.0), (7, -2.5)),
        bad_words=("c",),
        min_tokens=2,
        seed=6,
        stop=("a", "b"),
        stop_token_ids=(7,),
        ignore_eos=True,
        logprobs=True,
        top_logprobs=3,
        prompt_logprobs=2,
        n=5,
        choice=("c", "d"),
    )
    left = {row.name for row in SAMPLING_FIELDS if getattr(sampling, row.name) == row.default}
    assert left == set(GRAMMARS)
    arguments = llm.asked.arguments
    assert callable(arguments.pop("on_output"))
    assert arguments.pop("self") is not None
    samplings = {"sampling_params": [sampling, sampling]}
    assert arguments == {"prompts": conversations, "reports_drafts": False} | samplings
    assert invoke("run", "dir", "--prompt", "x", "--show-drafts").stderr.endswith("error: recorded\n")
    assert llm.asked.arguments["reports_drafts"] is True


@pytest.mark.parametrize(("name", "text"), GRAMMARS.items())
@pytest.mark.parametrize("comes_from_file", [False, True])
def test_a_grammar_reaches_the_engine(llm, invoke, tmp_path, name, text, comes_from_file) -> None:
    word = text
    if comes_from_file:
        (tmp_path / "file").write_text(text)
        word = f"@{tmp_path / 'file'}"
    result = invoke("run", "dir", "--prompt", "x", f"--{name.replace('_', '-')}", word, "--json")
    if comes_from_file and name == "regex":
        text = word  # an expression is short: the words of the command line are the expression
    assert (result.exit_code, result.stderr) == (1, "error: recorded\n")
    assert llm.asked.arguments["sampling_params"] == [SamplingParams(**{name: text})]


def test_a_grammar_of_a_row_replaces_that_of_the_command_line(llm, invoke, tmp_path) -> None:
    rows = [{"prompt": "x", "json_schema": {"type": "null"}}, {"prompt": "y"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    invoke("run", "dir", "--input-file", str(tmp_path / "rows.jsonl"), "--regex", "a+", "--json")
    of_row = SamplingParams(json_schema='{"type": "null"}')
    assert llm.asked.arguments["sampling_params"] == [of_row, SamplingParams(regex="a+")]


def test_a_file_with_a_grammar_that_is_not_there_is_a_usage_error(llm, invoke) -> None:
    result = invoke("run", "dir", "--prompt", "x", "--grammar", "@/nowhere/at/all")
    assert result.exit_code == 2 and "'/nowhere/at/all' cannot be read" in result.stderr


def test_a_run_says_its_settings_and_its_pages_once(llm, invoke) -> None:
    lines = invoke("run", "dir", "--prompt", "x").stderr.splitlines()
    assert lines[1:] == ["K/V: no pages", "error: recorded"]
    assert lines[0] == "settings: --device auto"


def test_options_of_the_chat_template_are_told_where_there_are_conversations(llm, invoke, monkeypatch) -> None:
    monkeypatch.setattr(llm, "chat_template_options", {"a": True, "b": "built"})
    words = ("run", "dir", "--prompt", "x")
    assert "chat template" not in invoke(*words).stderr
    told = invoke(*words, "--chat", "--chat-template-option", "b=told").stderr.splitlines()
    assert [line for line in told if "chat template" in line] == ['chat template: a=true, b="told"']


def test_settings_are_shown_as_the_options_that_ask_for_them(llm, invoke) -> None:
    words = ["--device", "cpu", "--draft-length", "1:7,16:5", "--no-prefix-caching", "--no-overlap", "--deterministic"]
    words += ["--kv-cache-bytes", "3000000000", "--plugin-library", "/a b/plugin.so"]
    invoke("run", "dir", "--prompt", "x", *words)
    config = opened(llm)["config"]
    options = shlex.split(settings_line(config).removeprefix("settings: "))
    assert sorted(options) == sorted(words)
    invoke("run", "dir", "--prompt", "x", *options)
    assert opened(llm)["config"] == config


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("8GB", 8 * 10**9), ("7.5GiB", 15 * 2**29), ("12", 12), ("2m", 2 * 10**6)]
)
def test_memory_is_told_with_a_unit(llm, invoke, text, num_bytes) -> None:
    invoke("run", "dir", "--prompt", "x", "--kv-cache-bytes", text)
    assert opened(llm)["config"].kv_cache_bytes == RuntimeConfig(kv_cache_bytes=text).kv_cache_bytes == num_bytes
    parameters = {"engine_dir": "x", "kv_cache_bytes": text}
    assert ModelSettings.from_parameters(parameters).runtime.kv_cache_bytes == num_bytes


@pytest.mark.parametrize("text", ["8 gigabytes", "", "-1", "1e9", "0"])
def test_a_size_that_is_none_is_refused(invoke, text) -> None:
    result = invoke("run", "dir", "--prompt", "x", "--kv-cache-bytes", text)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--kv-cache-bytes: expected " in result.stderr


@pytest.mark.parametrize(("words", "value"), [([], None), (["--overlap"], True), (["--no-overlap"], False)])
def test_a_setting_that_the_engine_may_choose_has_a_flag_for_each_value(llm, invoke, words, value) -> None:
    invoke("run", "dir", "--prompt", "x", *words)
    assert opened(llm)["config"].overlap_scheduling is value


def test_no_option_of_run_is_left_out_here() -> None:
    """What concerns files and the terminal is for test_run.py."""
    chat = ["--chat", "--system", "s", "--chat-template-option", "a=1"]
    cases = [["dir", "--prompt", "x", *chat, *words, *SAMPLING] for words, _ in OF_RUN]
    cases += [["dir", "--prompt", "x", f"--{name.replace('_', '-')}", text] for name, text in GRAMMARS.items()]
    rows = {"columns", "split", "categories", "num_prompts"}  # test_prompt_source.py
    files = {
        "input_file",
        *rows,
        "output_file",
        "overwrite",
        "resume",
        "trace_file",
        "stream",
        "show_drafts",
        "as_json",
    }
    assert options_never_set(run, ["dir"], *cases) == {"engine_dir"} | files


PROMPTS = [{"prompt": text} for text in ("x", "y", "z")]


@pytest.fixture
def rows(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(prompt | {"max_new_tokens": 99}) + "\n" for prompt in PROMPTS))
    return path


def recorded(monkeypatch, module: str, name: str) -> Recorder:
    function = getattr(__import__(module, fromlist=[name]), name)
    recorder = Recorder(function)
    monkeypatch.setattr(f"{module}.{name}", recorder)
    return recorder


LOAD = ["--concurrency", "2", "--concurrency", "3", "--max-new-tokens", "9", "--requests-per-client", "5"]
LOAD += ["--rounds", "7"]
LOAD_ARGUMENTS = {"concurrencies": (2, 3), "max_new_tokens": 9, "requests_per_client": 5, "num_rounds": 7}
DECIDED = (
    "enable_prefix_caching",
    "num_state_snapshots",
    "host_cache_bytes",
    "disk_cache_dir",
    "disk_cache_bytes",
    "publish_prompts",
    *NODES,
    "max_queue_len",
    "seed",
    "use_drafter",
    "adaptive_draft_length",
)
COMPARED = (*DECIDED, "draft_length", "overlap_scheduling")
MEASUREMENTS = [
    (
        ("speedup", "dflash_trt.bench.speedup", "compare"),
        [
            *("--max-new-tokens", "9", "--concurrency", "3", "--rounds", "7"),
            *("--temperature", "0.5", "--temperature", "0", "--temperature", "0.5"),  # each once
        ],
        {
            "sampling": SamplingParams(max_new_tokens=9, ignore_eos=True),
            "temperatures": (0.5, 0.0),
            "concurrency": 3,
            "num_rounds": 7,
        },
        DECIDED,
    ),
    (
        ("throughput", "dflash_trt.bench.throughput", "compare_policies"),
        [*LOAD, "--fixed-lengths", "0", "--fixed-lengths", "3"],
        LOAD_ARGUMENTS | {"fixed_lengths": (0, 3)},
        COMPARED,
    ),
]


@pytest.mark.parametrize(
    ("names", "words", "expected", "decided"), MEASUREMENTS, ids=[names[0] for names, *_ in MEASUREMENTS]
)
def test_every_option_of_a_measurement_reaches_it(names, words, expected, decided, rows, invoke, monkeypatch) -> None:
    subcommand, module, function = names
    measurement = recorded(monkeypatch, module, function)
    cases = runtime_cases(*decided)
    for runtime, config in cases:
        ran = invoke("bench", subcommand, "dir", "--input-file", rows, *words, *runtime)
        assert ran.stderr == "error: recorded\n"
        assert callable(measurement.arguments.pop("progress"))
        if subcommand == "speedup":
            conversations = [Conversation(prompt=row["prompt"]) for row in PROMPTS]
            given: dict[str, Any] = {"engine_dirs": {"dir": Path("dir")}, "conversations": conversations}
        else:
            given = {"engine_dir": Path("dir"), "prompts": PROMPTS}
        assert measurement.arguments == expected | given | {"config": config}
    minimal = ["dir", "--input-file", "rows"]
    never_set = options_never_set(
        bench.commands[subcommand], minimal, *([*minimal, *words, *runtime] for runtime, _ in cases)
    )
    of_rows = {"input_file", "columns", "split", "categories", "num_prompts"}  # test_prompt_source.py
    of_report = {"csv_path", "figure", "as_json", "machine", "baseline", "min_acceptance_ratio"}  # tests/bench
    assert never_set - of_report - of_rows == {"sources" if subcommand == "speedup" else "engine_dir"}


def test_every_option_of_bench_host_reaches_it(invoke, monkeypatch) -> None:
    measure = recorded(monkeypatch, "dflash_trt.bench.host", "measure_host")
    words = ["--requests", "3", "--steps", "5", "--draft-length", "2", "--prompt-tokens", "9", "--ranks", "4"]
    assert invoke("bench", "host", *words).stderr == "error: recorded\n"
    sizes = {"num_requests": 3, "num_steps": 5, "num_draft_tokens": 2, "num_prompt_tokens": 9, "num_ranks": 4}
    assert measure.arguments == {**sizes, "is_chained": True}
    assert options_never_set(bench.commands["host"], [], words) == {"csv_path", "as_json"}


def test_every_option_of_bench_machine_reaches_it(invoke, monkeypatch, tmp_path) -> None:
    """What it writes is in tests/bench/test_machine.py."""
    import torch

    measure = recorded(monkeypatch, "dflash_trt.bench.machine", "measure_machine")
    threads: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    words = ["--name", "n", "--device", "cpu", "--num-threads", "3", "--output", str(tmp_path / "machine.json")]
    assert invoke("bench", "machine", *words).stderr == "error: recorded\n"
    assert callable(measure.arguments.pop("progress"))
    assert measure.arguments == {"name": "n", "device": torch.device("cpu")} and threads == [3]
    assert options_never_set(bench.commands["machine"], [], words) == set()


BUILD = ["--target", "t", "--drafter", "d", "--max-batch-size", "3", "--max-seq-len", "77", "--max-num-tokens", "55"]
BUILD += ["--max-draft-len", "2", "--page-size", "4", "--quantization", "fp8", "--drafter-quantization", "nvfp4"]
BUILD += ["--head-quantization", "int8"]
BUILD += ["--kv-cache", "fp8", "--drafter-override", "block_size=4", "--chat-template-option", "thinks=false"]
BUILD += ["--draft-window", "44"]
KERNELS = ["--compile-for", "sm_90a,sm_103a"]  # not for plan
TENSORRT = ["--target", "t", "--backend", "tensorrt", "--dtype", "float16", "--plugin-library", "/p"]
COLLECTIVES = ["--target", "t", "--backend", "tensorrt", "--collectives", "plugin", "--deterministic"]
POSITIONS = ["--target", "t", "--tp-size", "2", "--dcp-size", "2"]
QUANTIZATION = QuantizationConfig(target="fp8", drafter="nvfp4", lm_head="int8", kv_cache="fp8")
BUILT = BuildConfig(
    target="t",
    drafter="d",
    drafter_overrides={"block_size": 4},
    draft_window=44,
    chat_template_options={"thinks": False},
    max_batch_size=3,
    max_seq_len=77,
    max_num_tokens=55,
    max_draft_len=2,
    page_size=4,
    tp_size=2,
    ep_size=2,
    attention_dp=True,
    quantization=QUANTIZATION,
    compile_for=("sm_90a", "sm_103a"),
)
BUILT_WITH_COLLECTIVES = BuildConfig(target="t", backend="tensorrt", collectives="plugin", deterministic=True)
BUILT_WITH_POSITIONS = BuildConfig(target="t", tp_size=2, dcp_size=2)
BUILT_BY_TENSORRT = BuildConfig(target="t", backend="tensorrt", dtype="float16", plugin_library="/p")


def test_every_option_of_build_reaches_it(invoke, monkeypatch) -> None:
    builder = recorded(monkeypatch, "dflash_trt.compile.build", "build_engine")
    words = ["build", *BUILD, *KERNELS, "--tp-size", "2", "--ep-size", "2", "--attention-dp", "-o", "out"]
    for more, overwrite in (([], False), (["--overwrite"], True)):
        assert invoke(*words, *more).stderr == "error: recorded\n"
        for callback in ("progress", "on_plan", "warn"):
            assert callable(builder.arguments.pop(callback))
        assert builder.arguments == {
            "config": BUILT,
            "output": Path("out"),
            "base_dir": Path.cwd(),
            "overwrite": overwrite,
            "command": ["dflash-trt", *words, *more],
        }
    assert invoke("build", *POSITIONS, "-o", "out").stderr == "error: recorded\n"
    assert builder.arguments["config"] == BUILT_WITH_POSITIONS


def test_every_option_of_a_check_reaches_it(invoke, monkeypatch) -> None:
    checker = recorded(monkeypatch, "dflash_trt.compile.tensorrt_check", "check_config")
    for word, is_full in (("--check", False), ("--check=kinds", False), ("--check=full", True)):
        assert invoke("build", word, *TENSORRT).stderr == "error: recorded\n"
        assert callable(checker.arguments.pop("progress"))
        assert checker.arguments == {"config": BUILT_BY_TENSORRT, "base_dir": Path.cwd(), "is_full": is_full}
    assert invoke("build", *COLLECTIVES, "--check").stderr == "error: recorded\n"
    assert checker.arguments["config"] == BUILT_WITH_COLLECTIVES


def test_paths_of_flags_beside_a_yaml_file_are_relative_to_where_the_command_runs(
    invoke, monkeypatch, tmp_path
) -> None:
    checker = recorded(monkeypatch, "dflash_trt.compile.tensorrt_check", "check_config")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "pair.yaml").write_text("target: other\ndrafter: d\nbackend: tensorrt\n")
    monkeypatch.chdir(tmp_path)
    words = ["configs/pair.yaml", "--target", "t", "--plugin-library", "p", "--check"]
    assert invoke("build", *words).stderr == "error: recorded\n"
    config = checker.arguments["config"]
    assert (config.target, config.plugin_library) == (str(tmp_path / "t"), str(tmp_path / "p"))
    assert (config.drafter, checker.arguments["base_dir"]) == ("d", tmp_path / "configs")


def test_no_option_of_build_is_left_out_here() -> None:
    ranks = ["--tp-size", "2", "--ep-size", "2", "--attention-dp"]
    cases = ([*BUILD, *KERNELS, *ranks, "-o", "out", "--overwrite"], [*TENSORRT, "--check"], COLLECTIVES, POSITIONS)
    assert options_never_set(build, [], *cases) == {"config_file", "as_json"}
    fields = BuildConfig(target="default")
    for name in BuildConfig.model_fields:
        built = (BUILT, BUILT_BY_TENSORRT, BUILT_WITH_COLLECTIVES, BUILT_WITH_POSITIONS)
        values = [getattr(config, name) for config in built]
        assert any(value != getattr(fields, name) for value in values), name


def test_every_option_of_plan_reaches_it(invoke, monkeypatch) -> None:
    """Those of the engine are the same as of `build`."""
    from dflash_trt.plan.gpus import gpu_of

    monkeypatch.setattr("dflash_trt.checkpoint.pair.read_pair", lambda *paths, **overrides: (paths, overrides))
    import_module("dflash_trt.plan.remedies")  # before the recorder is there, or it would keep it
    monkeypatch.setattr("dflash_trt.checkpoint.specs.with_draft_window", lambda pair, window: (pair, window))
    planner = recorded(monkeypatch, "dflash_trt.plan.planning", "plan_engine")
    ranks = ["--tp-size", "2", "--ep-size", "2", "--attention-dp"]
    pair = ((Path.cwd() / "t", Path.cwd() / "d"), {"drafter_overrides": BUILT.drafter_overrides})
    assert invoke("plan", *BUILD, *ranks, "--gpu", "b300").stderr == "error: recorded\n"
    assert planner.arguments == {
        "config": BUILT.model_copy(update={"compile_for": ()}),
        "pair": (pair, 44),
        "gpu": gpu_of("b300"),
    }
    others = ((TENSORRT, BUILT_BY_TENSORRT), (COLLECTIVES, BUILT_WITH_COLLECTIVES), (POSITIONS, BUILT_WITH_POSITIONS))
    for words, config in others:
        assert invoke("plan", *words, "--gpu", "b300").stderr == "error: recorded\n"
        assert planner.arguments["config"] == config
    cases = (["--gpu", "b300", *words] for words in ([*BUILD, *ranks], TENSORRT, COLLECTIVES, POSITIONS))
    of_the_report = {"sources", "acceptance_lengths", "concurrencies", "contexts", "as_json"}  # test_plan.py has them
    of_the_report |= {"machine", "sweep", *plan_sweep.OPTIONS.flags}  # test_plan_sweep.py has these
    of_the_report |= {*plan_advice.OPTIONS.flags}  # test_plan_advice.py
    assert options_never_set(plan, ["--gpu", "h200"], *cases) == of_the_report
    unset = {"config_file", "output", "checked_layers", "compile_for", "overwrite", "as_json"}
    assert {item.name for item in build.params} - unset <= {item.name for item in plan.params}


def test_every_option_of_doctor_reaches_it(invoke, monkeypatch) -> None:
    reporter = recorded(monkeypatch, "dflash_trt.doctor.report", "make_report")
    words = ["--time-limit", "2.5", "--full"]
    assert invoke("doctor", *words).stderr == "error: recorded\n"
    assert reporter.arguments == {"time_limit_s": 2.5, "is_full": True}
    assert options_never_set(doctor, [], words) == {"as_json"}


def test_every_option_of_eval_reaches_the_comparison(engine_dir, rows, invoke, monkeypatch) -> None:
    measurement = recorded(monkeypatch, "dflash_trt.cli.eval", "_measure")
    words = [engine_dir, "--against", engine_dir, "--input-file", rows]
    assert invoke("eval", *words, "--num-prompts", "2").stderr == "error: recorded\n"
    jobs = measurement.arguments["jobs"]
    assert [job.prompt for job in jobs] == PROMPTS[:2]
    assert [job.sampling.max_new_tokens for job in jobs] == [99, 99], "rows win"
    rows.write_text('{"prompt": "x"}\n')
    assert invoke("eval", *words, "--max-new-tokens", "5").stderr == "error: recorded\n"
    assert [job.sampling.max_new_tokens for job in measurement.arguments["jobs"]] == [5]
    cases = runtime_cases("seed", *NODES)  # texts are greedy
    monkeypatch.setattr("dflash_trt.executor.opening._check_plugin_library", lambda engine, library: None)
    monkeypatch.setattr("dflash_trt.executor.opening._check_snapshots", lambda config, **_: None)
    for runtime, config in cases:
        assert invoke("eval", *words, *runtime).stderr == "error: recorded\n"
        assert measurement.arguments["config"] == config
    gates = {"max_kl", "min_acceptance_ratio", "min_agreement"}  # test_eval.py has them
    rest = [*map(str, words), "--num-prompts", "2", "--max-new-tokens", "5"]
    never_set = options_never_set(
        evaluate, ["dir", "--against", "x", "--input-file", "y"], *([*rest, *runtime] for runtime, _ in cases)
    )
    of_rows = {"columns", "split", "categories"}  # test_prompt_source.py
    assert never_set == gates | of_rows | {"as_json", "csv_path", "figure"}


def test_verify_hashes_reaches_the_reader_and_the_report(engine_dir, tmp_path, invoke, monkeypatch) -> None:
    """Every file counts as large here."""
    monkeypatch.setattr("dflash_trt.engine_dir.opening.MAX_ALWAYS_HASHED_BYTES", 0)
    for words, is_verified in (([], False), (["--verify-hashes"], True)):
        result = invoke("inspect", engine_dir, "--json", *words)
        files = json.loads(result.stdout)["files"]
        assert {entry["is_hash_verified"] for entry in files.values()} == {is_verified}
        text = invoke("inspect", engine_dir, *words).stdout
        assert ("size and sha256" in text, "size (--verify-hashes" in text) == (is_verified, not is_verified)
    corrupted = shutil.copytree(engine_dir, tmp_path / "corrupted")
    weights = bytearray((corrupted / "rank0.safetensors").read_bytes())
    weights[-1] ^= 1
    (corrupted / "rank0.safetensors").write_bytes(weights)
    assert invoke("inspect", corrupted).exit_code == 0
    refused = invoke("inspect", corrupted, "--verify-hashes")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "rank0.safetensors: expected sha256" in refused.stderr
    assert options_never_set(inspect, ["dir"], ["dir", "--verify-hashes", "--json"]) == {"engine_dir"}


MODEL = ["--model-name", "m", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
OF_MODEL = {"model_name": "m", "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


def test_every_option_of_serve_reaches_the_supervisor(engine_dir, invoke, monkeypatch) -> None:
    from dflash_trt.servers.dynamo.settings import PageSettings, WorkerSettings
    from dflash_trt.servers.dynamo.supervisor import Service

    supervisor = recorded(monkeypatch, "dflash_trt.servers.dynamo.supervisor", "Supervisor")
    monkeypatch.setattr("dflash_trt.cli.serve._check_ports", lambda service: None)
    monkeypatch.setattr("dflash_trt.servers.dynamo.roles.check_nixl", lambda: None)
    words = ["--host", "::1", "--port", "4567", "--router-mode", "random", "--migration-limit", "2", *MODEL]
    words += ["--metrics-port", "1234", "--no-ui"]
    cases = runtime_cases(*NODES)
    for runtime, config in cases:
        assert invoke("serve", engine_dir, "--replicas", "3", *words, *runtime).stderr == "error: recorded\n"
        expected = Service(
            worker=WorkerSettings(engine_dir=engine_dir.resolve(), runtime=config, num_replicas=3, **OF_MODEL),
            num_replicas=3,
            host="::1",
            port=4567,
            first_metrics_port=1234,
            frontend_arguments=("--router-mode", "random", "--migration-limit", "2"),
        )
        assert supervisor.arguments["service"] == expected
    assert invoke("serve", engine_dir, "--gpus", "3,1").stderr == "error: recorded\n"
    service = supervisor.arguments["service"]
    assert (service.gpus, service.num_replicas, service.worker.model_name) == (((3,), (1,)), 2, engine_dir.name)
    assert (service.port, service.first_metrics_port) == (8000, 8001)
    assert service.frontend_arguments[:2] == ("--router-mode", "kv")
    shown = {"model": engine_dir.name, "has_drafter": True, "reports_drafts": True}
    assert service.page == PageSettings(has_chat_template=False, is_chat_model=False, **shown)
    assert invoke("serve", engine_dir, "--no-drafter").stderr == "error: recorded\n"
    assert not supervisor.arguments["service"].page.has_drafter
    more = [["dir", "--replicas", "3", *words, *runtime] for runtime, _ in cases]
    apart = ["--prefill-workers", "2", "--prefill-min-tokens", "7", "--host-cache-bytes", "1MiB"]
    for replicas, num_replicas in (([], 3), (["--replicas", "5"], 5), (["--gpus", "0,1,2,3"], 4)):
        assert invoke("serve", engine_dir, *apart, *replicas).stderr == "error: recorded\n"
        service = supervisor.arguments["service"]
        assert (service.num_prefill_workers, service.worker.prefill_min_tokens) == (2, 7)
        assert service.num_replicas == num_replicas
    assert invoke("serve", engine_dir, *apart, *OVER_NIXL).stderr == "error: recorded\n"
    told = supervisor.arguments["service"].worker
    assert (told.transfer_backend, told.transfer_bytes) == ("nixl", 3 << 20)
    for words, num_replicas in ((["--replicas", "2"], 2), (["--gpus", "0,1,2"], 2), ([], 1)):
        assert invoke("serve", engine_dir, "--baseline-replica", *words).stderr == "error: recorded\n"
        service = supervisor.arguments["service"]
        assert (service.num_replicas, service.num_workers) == (num_replicas, num_replicas + 1)
        assert service.worker.num_replicas == num_replicas + 1, "they share the machine"
        assert service.frontend_arguments[1] == ("kv" if num_replicas > 1 else "round-robin"), "a model of its own"
        assert service.baseline == service.page.baseline == f"{engine_dir.name}-no-drafter"
    more += [["dir", "--gpus", "3,1", *apart, *OVER_NIXL], ["dir", *OF_NODES], ["dir", "--baseline-replica"]]
    assert options_never_set(serve, ["dir"], *more) == {"engine_dir"}


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["--prefill-workers", "1"], "--prefill-workers: expected --host-cache-bytes as well, found none."),
        (["--prefill-min-tokens", "1"], "--prefill-min-tokens: expected --prefill-workers as well, found none."),
        (["--transfer-backend", "nixl"], "--transfer-backend: expected --prefill-workers as well, found none."),
        (
            ["--prefill-workers", "1", "--host-cache-bytes", "1MiB", "--transfer-bytes", "1GB"],
            "--transfer-bytes: expected --transfer-backend nixl as well, found none.",
        ),
        (
            ["--prefill-workers", "1", "--host-cache-bytes", "1MiB", "--disk-cache-dir", "/disk", *OVER_NIXL],
            "--transfer-backend nixl: expected no --disk-cache-dir, found /disk.",
        ),
        (
            ["--prefill-workers", "2", "--replicas", "2", "--host-cache-bytes", "1MiB"],
            "--prefill-workers: expected more than 2 replicas, the others decode, found 2.",
        ),
        (["--baseline-replica", "--no-drafter"], "expected a drafter to compare with, found --no-drafter."),
        (
            ["--baseline-replica", "--gpus", "0"],
            "expected GPUs for two replicas, found for one. Name more with --gpus.",
        ),
    ],
)
def test_replicas_without_what_they_need_are_refused(engine_dir, invoke, words, refusal) -> None:
    refused = invoke("serve", engine_dir, *words)
    assert (refused.exit_code, refused.stdout) == (2, "") and refusal in refused.stderr


def test_an_engine_without_a_drafter_is_no_replica_to_compare_with(target, tmp_path, invoke) -> None:
    engine = tmp_path / "engine"
    assert invoke("build", "--target", target, "-o", engine, "--max-seq-len", "96").exit_code == 0
    refused = invoke("serve", engine, "--baseline-replica")
    assert "expected a drafter to compare with, found an engine without one." in refused.stderr


@pytest.fixture
def two_ranks(target, drafter, tmp_path, invoke) -> Path:
    engine = tmp_path / "engine"
    words = ["--target", target, "--drafter", drafter, "-o", engine, "--max-seq-len", "96", "--tp-size", "2"]
    assert invoke("build", *words).exit_code == 0
    return engine


def test_servers_get_the_nodes_of_their_one_engine(two_ranks, engine_dir, invoke, monkeypatch) -> None:
    supervisor = recorded(monkeypatch, "dflash_trt.servers.dynamo.supervisor", "Supervisor")
    worker_process = recorded(monkeypatch, "dflash_trt.servers.dynamo.contract", "run_worker")
    monkeypatch.setattr("dflash_trt.cli.serve._check_ports", lambda service: None)
    runtime = RuntimeConfig(**{name: RUNTIME[name][1] for name in NODES})
    for gpus, groups in (([], ()), (["--gpus", "3"], ((3,),))):
        assert invoke("serve", two_ranks, *OF_NODES, *gpus).stderr == "error: recorded\n"
        service = supervisor.arguments["service"]
        assert (service.worker.runtime, service.num_replicas, service.gpus) == (runtime, 1, groups)
    assert invoke("worker", two_ranks, *OF_NODES, "--discovery-backend", "kubernetes").stderr == "error: recorded\n"
    assert worker_process.arguments["settings"].runtime == runtime
    for words, refusal in (
        (["--replicas", "2"], "--nnodes: expected one replica, which has 2 nodes, found 2"),
        (["--gpus", "0,1"], "--nnodes: expected one replica, which has 2 nodes, found 2"),
    ):
        refused = invoke("serve", two_ranks, *OF_NODES, *words)
        assert refused.exit_code == 2 and refusal in refused.stderr
    for command in ("serve", "worker"):
        refused = invoke(command, engine_dir, *OF_NODES)
        assert refused.exit_code == 2
        assert "--nnodes: expected a divisor of 1, the engine's ranks, found 2" in refused.stderr


def test_every_option_of_ranks_reaches_the_node(engine_dir, invoke, monkeypatch) -> None:
    nodes: list[Any] = []

    def run(node: Any) -> None:
        nodes.append(node)

    monkeypatch.setattr("dflash_trt.executor.ranks.node.Node.run", run)
    words = ["--nnodes", "3", "--node-rank", "2", "--master-addr", "10.0.0.1", "--master-port", "29777"]
    assert invoke("ranks", engine_dir, *words).stderr == "node 0 has closed the engine\n"
    [node] = nodes
    assert (node.engine.path, node.nnodes, node.node_rank) == (engine_dir, 3, 2)
    assert (node.master_addr, node.master_port) == ("10.0.0.1", 29777)
    minimal = ["dir", "--nnodes", "2", "--node-rank", "1", "--master-addr", "x"]
    assert options_never_set(ranks, minimal, ["dir", *words]) == {"engine_dir"}


def test_a_replica_has_a_gpu_for_each_of_its_ranks(two_ranks, invoke, monkeypatch) -> None:
    engine = two_ranks
    supervisor = recorded(monkeypatch, "dflash_trt.servers.dynamo.supervisor", "Supervisor")
    monkeypatch.setattr("dflash_trt.cli.serve._check_ports", lambda service: None)
    for gpus, groups in (("1,0", ((1, 0),)), ("3,1,0,2", ((3, 1), (0, 2)))):
        assert invoke("serve", engine, "--gpus", gpus).stderr == "error: recorded\n"
        service = supervisor.arguments["service"]
        assert (service.gpus, service.num_replicas, service.worker.num_replicas) == (groups, len(groups), len(groups))
        mode = "kv" if len(groups) > 1 else "round-robin"
        assert service.frontend_arguments == ("--router-mode", mode, "--migration-limit", "0")
    refused = invoke("serve", engine, "--gpus", "0,1,2")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--gpus: expected distinct indices, 2 for each replica, found 0,1,2" in refused.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--gpus", "0,x"], "--gpus: expected distinct indices, found 0,x. Write --gpus 0,1 for example."),
        (["--gpus", "1,1"], "--gpus: expected distinct indices, found 1,1. Write --gpus 0,1 for example."),
        (["--gpus", "1", "--replicas", "2"], "--replicas and --gpus are mutually exclusive"),
        (["--port", "40000"], "metrics of the replicas: expected ports up to 32767, found 40001. Pass --metrics-port."),
        (["--draft-length", "4"], "--draft-length: expected 0 to 3, this engine's max_draft_len, found 4."),
    ],
)
def test_serve_refuses_what_it_cannot_start(engine_dir, invoke, words, text) -> None:
    refused = invoke("serve", engine_dir, *words)
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"error: {text}")


def test_serve_refuses_a_port_in_use(engine_dir, invoke) -> None:
    with socket.socket() as taken:
        for port in range(21000, 22000):  # metrics have no port that the system would choose
            with suppress(OSError):
                taken.bind(("127.0.0.1", port))
                break
        others = {"--port": 30001, "--metrics-port": 30002}
        for option in others:
            ports = [str(word) for pair in (others | {option: port}).items() for word in pair]
            refused = invoke("serve", engine_dir, *ports)
            assert refused.exit_code == 2
            assert f"127.0.0.1:{port} free" in refused.stderr


def test_the_last_port_of_metrics_may_be_used(engine_dir, invoke, monkeypatch) -> None:
    supervisor = recorded(monkeypatch, "dflash_trt.servers.dynamo.supervisor", "Supervisor")
    monkeypatch.setattr("dflash_trt.cli.serve._check_ports", lambda service: None)
    assert invoke("serve", engine_dir, "--metrics-port", "32767").stderr == "error: recorded\n"
    assert supervisor.arguments["service"].metrics_port(0) == 32767
    for second in (["--replicas", "2"], ["--baseline-replica"], ["--gpus", "0,1"]):
        refused = invoke("serve", engine_dir, "--metrics-port", "32767", *second)
        assert refused.exit_code == 2 and "found 32768" in refused.stderr


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_commands_of_an_extra_name_it(engine_dir, invoke, monkeypatch, command) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused = invoke(command, engine_dir)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "pip install 'dflash-trt[serve]'" in refused.stderr


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_an_engine_without_a_model_card_is_to_be_built_again(engine_dir, invoke, tmp_path, command) -> None:
    old = shutil.copytree(engine_dir, tmp_path / "old")
    manifest = json.loads((old / "config.json").read_text())
    del manifest["files"]["tokenizer/config.json"]
    (old / "tokenizer" / "config.json").unlink()
    (old / "config.json").write_text(json.dumps(manifest))
    provenance = json.loads((old / "provenance.json").read_text())
    provenance["config_sha256"] = hashlib.sha256((old / "config.json").read_bytes()).hexdigest()
    (old / "provenance.json").write_text(json.dumps(provenance))
    refused = invoke(command, old)
    assert refused.exit_code == 1
    assert "Build the engine again with this version of dflash-trt." in refused.stderr


def test_every_option_of_worker_reaches_it(engine_dir, invoke, monkeypatch) -> None:
    from dflash_trt.servers.dynamo.settings import WorkerSettings

    worker_process = recorded(monkeypatch, "dflash_trt.servers.dynamo.contract", "run_worker")
    monkeypatch.setattr("dflash_trt.servers.dynamo.roles.check_nixl", lambda: None)
    words = ["--namespace", "n", "--discovery-backend", "kubernetes", "--request-plane", "nats", *MODEL]
    words += ["--event-plane", "nats", "--host", "127.0.0.1"]
    cases = runtime_cases(*NODES)
    for runtime, config in cases:
        assert invoke("worker", engine_dir, *words, *runtime).stderr == "error: recorded\n"
        assert worker_process.arguments["settings"] == WorkerSettings(
            engine_dir=engine_dir.resolve(),
            runtime=config,
            namespace="n",
            discovery_backend="kubernetes",
            request_plane="nats",
            event_plane="nats",
            host="127.0.0.1",
            **OF_MODEL,
        )
    tiers = ["--disk-cache-dir", "/disk", "--host-cache-bytes", "1MiB"]
    pod = ["--discovery-backend", "kubernetes"]
    shared = ["--role", "prefill", "--prefill-min-tokens", "7", *tiers, *pod]
    assert invoke("worker", engine_dir, *shared).stderr == "error: recorded\n"
    settings = worker_process.arguments["settings"]
    assert (settings.role, settings.prefill_min_tokens, settings.host) == ("prefill", 7, None)
    defaults = {name: field.default for name, field in WorkerSettings.model_fields.items()}
    helps = " ".join(option.help or "" for option in worker.params)
    assert f"that answers them.  [default: {defaults['prefill_min_tokens']}]" in helps
    assert f"where there is any.  [default: {defaults['transfer_backend']}]" in helps
    assert "that NIXL reads.  [default: 1GiB]" in helps and defaults["transfer_bytes"] == 1 << 30
    over_nixl = ["--role", "prefill", *tiers[2:], *pod, *OVER_NIXL]
    assert invoke("worker", engine_dir, *over_nixl).stderr == "error: recorded\n"
    settings = worker_process.arguments["settings"]
    assert (settings.transfer_backend, settings.transfer_bytes) == ("nixl", 3 << 20)
    for unfit, refusal in (
        ([*pod, "--role", "decode"], "--role decode: expected --disk-cache-dir as well, found none."),
        (["--role", "decode", *shared[2:]], "--prefill-min-tokens: expected --role prefill as well, found none."),
        (["--role", "decode", *over_nixl[2:]], "--transfer-bytes: expected --role prefill as well, found none."),
        ([*pod, *OVER_NIXL[:2]], "--transfer-backend: expected --role decode or prefill as well, found none."),
        (
            [*pod, "--role", "decode", *OVER_NIXL[:2]],
            "--transfer-backend nixl: expected --host-cache-bytes as well, found none.",
        ),
        ([*over_nixl, *tiers[:2]], "--transfer-backend nixl: expected no --disk-cache-dir, found /disk."),
        ([*over_nixl[:-1], "much"], "'much' is not a number of bytes, such as 8000000000, 8GB or 7.5GiB"),
    ):
        refused = invoke("worker", engine_dir, *unfit)
        assert refused.exit_code == 2 and refusal in refused.stderr
    more = [["dir", *words, *runtime] for runtime, _ in cases]
    assert options_never_set(worker, ["dir"], *more, ["dir", *shared, *OVER_NIXL], ["dir", *OF_NODES]) == {"engine_dir"}


def test_a_worker_of_etcd_needs_an_address_and_says_whom_it_serves(engine_dir, invoke, monkeypatch) -> None:
    monkeypatch.delenv("DYN_TCP_RPC_HOST", raising=False)
    recorded(monkeypatch, "dflash_trt.servers.dynamo.contract", "run_worker")
    refused = invoke("worker", engine_dir)
    assert refused.exit_code == 2
    assert "--discovery-backend etcd: expected --host as well, found none. Pass an address" in refused.stderr
    served = invoke("worker", engine_dir, "--host", "127.0.0.1", "--event-plane", "nats").stderr
    assert served == "--host 127.0.0.1: only a front end on this machine reaches this worker\nerror: recorded\n"


def test_a_worker_that_ends_without_a_signal_has_failed(engine_dir, invoke, monkeypatch) -> None:
    """Dynamo ends it when its lease has expired; a process manager is to start it again."""
    pod = ["--discovery-backend", "kubernetes"]
    for code, expected in ((ExitCode.DONE, ExitCode.FAILED), (ExitCode.ENGINE_LOST, ExitCode.ENGINE_LOST)):
        monkeypatch.setattr("dflash_trt.servers.dynamo.contract.run_worker", lambda settings, code=code: code)
        ended = invoke("worker", engine_dir, *pod)
        assert ended.exit_code == expected
        assert ("registration: expected one that lasts" in ended.stderr) == (expected == ExitCode.FAILED)


def test_every_command_with_options_is_here() -> None:
    """A new command gets a test of its own beside these. `deploy triton` is in tests/triton_server/test_model.py, the
    others of `deploy` are in test_deploy_tensorrt_llm.py, `recipes` in test_recipes.py, `bench serve` in
    test_bench_serve.py, `show-drafts` in test_show_drafts.py, `build-plugin` in test_build_plugin.py.
    """
    from dflash_trt.cli.main import cli

    known = {"bench", "build", "deploy", "doctor", "eval", "inspect", "plan", "recipes", "run", "serve", "worker"}
    assert set(cli.commands) == known | {"ranks", "show-drafts", "build-plugin"}
    assert set(bench.commands) == {"host", "machine", "serve", "speedup", "throughput"}
    assert isinstance(cli.commands["deploy"], click.Group)
    assert set(cli.commands["deploy"].commands) == {"mpi", "slurm", "triton"}


def test_eval_generates_greedily_as_its_rows_say(engine_dir, tmp_path, llm, invoke) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "x", "ignore_eos": true, "temperature": 1.0}\n{"prompt": "y"}\n')
    words = ["--against", engine_dir, "--input-file", rows, "--max-new-tokens", "5"]
    assert invoke("eval", engine_dir, *words).stderr.endswith("error: recorded\n")
    sampling = llm.asked.arguments["sampling_params"]
    assert sampling == [SamplingParams(max_new_tokens=5, ignore_eos=True), SamplingParams(max_new_tokens=5)]


def test_eval_opens_engines_as_it_was_told_to_generate_and_to_score(engine_dir, rows, llm, invoke, monkeypatch) -> None:
    words = ["--against", engine_dir, "--input-file", rows, "--num-threads", "1", "--kv-cache-bytes", str(1 << 22)]
    told = RuntimeConfig(num_threads=1, kv_cache_bytes=1 << 22)
    invoke("eval", engine_dir, *words, "--adaptive")
    assert opened(llm)["config"] == told.replaced(adaptive_draft_length=True)
    monkeypatch.setattr("dflash_trt.cli.eval._generate", lambda engine, jobs, config: [])
    opening = recorded(monkeypatch, "dflash_trt.executor.opening", "open_executor")
    invoke("eval", engine_dir, *words, "--adaptive")
    assert opening.arguments["config"] == told.replaced(use_drafter=False)


def test_eval_compares_each_side_with_its_own_texts(engine_dir, rows, tmp_path, invoke, monkeypatch) -> None:
    copy = shutil.copytree(engine_dir, tmp_path / "copy")
    monkeypatch.setattr("dflash_trt.cli.eval._generate", lambda engine, jobs, config: [engine.path])
    monkeypatch.setattr("dflash_trt.cli.eval._logits_of", lambda engine, config, stack: engine.path)
    monkeypatch.setattr("dflash_trt.bench.comparison.scores_of_logits", lambda logits: ("scores of", logits))
    comparison = recorded(monkeypatch, "dflash_trt.bench.comparison", "compare")
    invoke("eval", copy, "--against", engine_dir, "--input-file", rows)
    arguments = comparison.arguments
    assert (arguments["baseline_outputs"], arguments["candidate_outputs"]) == ([engine_dir], [copy])
    assert (arguments["baseline_logits"], arguments["candidate_scores"]) == (engine_dir, ("scores of", copy))
    assert [len(prompt) for prompt in arguments["prompts"]] == [1, 1, 1]
