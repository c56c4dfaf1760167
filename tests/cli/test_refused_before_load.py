"""What options, prompts, manifest and device say is refused before weights are read, and leaves no file behind."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dflash_trt import LLM
from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.core.errors import ConfigError, DFlashError
from tests.cli.conftest import Invoke


@pytest.fixture(autouse=True)
def nothing_is_loaded(engine_dir: Path, plain_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines are built; from now on an executor that opens is a failure. There is no GPU."""

    def load(*args: Any, **options: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(TorchExecutor, "open", load)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture(scope="module")
def plain_engine(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a drafter."""
    from dflash_trt.compile.build import build_engine
    from dflash_trt.core.config import BuildConfig

    output = tmp_path_factory.mktemp("engines") / "plain"
    config = BuildConfig(target=str(target), dtype="float32", max_seq_len=96)
    build_engine(config, output, base_dir=output, overwrite=False, command=["test"], progress=lambda _: None)
    return output


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands run: a file of rows, one of old results, one whose rows are all wrong."""
    good, long = {"prompt": "a"}, {"prompt": "x" * 2000}
    (tmp_path / "rows.jsonl").write_text(json.dumps(good) + "\n")
    (tmp_path / "long.jsonl").write_text(f"{json.dumps(long)}\n{json.dumps(good | {'top_p': 7})}\n")
    (tmp_path / "old.jsonl").write_text("old results\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


P = ["--prompt", "a"]
ROWS = ["--input-file", "rows.jsonl"]
USAGE = [
    ([*P, "--max-new-tokens", "0"], "max_new_tokens: expected an integer of 1 or more, found 0"),
    ([*P, "--temperature", "-1"], "temperature: expected 0 (greedy) to 10000, found -1"),
    ([*P, "--device", "tpu"], "'tpu' is not one of 'auto', 'cpu', 'cuda'"),
    ([*P, "--device", "cuda"], "--device: expected a CUDA GPU that PyTorch can use, found none"),
    ([*P, "--draft-length", "9"], "--draft-length: expected 0 to 3"),
    ([*P, "--draft-length", "1:9"], "--draft-length: expected 0 to 3"),
    ([*P, "--plugin-library", "/p.so"], "--plugin-library: expected an engine with TensorRT plugins"),
    (["--input-file", "none.jsonl"], "none.jsonl: expected a JSONL file"),
    ([*ROWS, "--output-file", "old.jsonl"], "--output-file: expected a new file, found old.jsonl. Pass --overwrite"),
    ([*ROWS, "--trace-file", "old.jsonl"], "--trace-file: expected a new file, found old.jsonl. Pass --overwrite"),
    ([*ROWS, "--output-file", "none/new.jsonl"], "none/new.jsonl: expected a file to write"),
    ([*ROWS, "--trace-file", "none/new.jsonl"], "none/new.jsonl: expected a file to write"),
    ([*ROWS, "--output-file", "./rows.jsonl", "--overwrite"], "--input-file and --output-file name the same file"),
    ([*ROWS, "--output-file", "new", "--trace-file", "new"], "--output-file and --trace-file name the same file"),
]
REFUSED = [
    (["--prompt", ""], "expected at least 1 token, found 0"),
    (["--prompt", "x" * 2000], "found 2000"),
    (["--prompt", "x" * 96], "expected at most 95 tokens (max_seq_len - 1), found 96"),
    (["--prompt", "a", "--chat"], "expected a tokenizer with a chat template, found none"),
    (["--input-file", "long.jsonl"], "2 of 2 requests failed"),
    (["--input-file", "long.jsonl", "--output-file", "new.jsonl"], "sampling top_p: expected a number in (0, 1]"),
]
NO_DRAFTER = [["--adaptive"], ["--draft-length", "1:1"], ["--draft-length", "1"], ["--draft-window", "9"], ["--ngram"]]


def test_a_run_that_nothing_refuses_loads(engine_dir: Path, directory: Path, invoke: Invoke) -> None:
    """So the others would."""
    for words in (P, ROWS, [*ROWS, "--output-file", "old.jsonl", "--overwrite"]):
        with pytest.raises(AssertionError, match="weights were read"):
            invoke("run", engine_dir, *words)


@pytest.mark.parametrize(
    ("words", "said", "code"), [*((*case, 2) for case in USAGE), *((*case, 3) for case in REFUSED)]
)
def test_run_refuses_before_the_load(
    engine_dir: Path, directory: Path, invoke: Invoke, words: list[str], said: str, code: int
) -> None:
    result = invoke("run", engine_dir, *words)
    assert (result.exit_code, result.stdout) == (code, "")
    assert said in result.stderr
    assert {path.name for path in directory.iterdir()} == {"rows.jsonl", "long.jsonl", "old.jsonl"}
    assert (directory / "old.jsonl").read_text() == "old results\n"


@pytest.mark.parametrize("words", NO_DRAFTER)
def test_drafting_without_a_drafter_is_refused(plain_engine: Path, invoke: Invoke, words: list[str]) -> None:
    for command in (
        ["run", plain_engine, *P],
        ["deploy", "triton", plain_engine, "-o", plain_engine.parent / "models"],
    ):
        result = invoke(*command, *words)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"{words[0]}: expected an engine with a drafter, found one without" in result.stderr
    assert not (plain_engine.parent / "models").exists()


def test_drafts_are_not_shown_without_a_drafter(plain_engine: Path, invoke: Invoke) -> None:
    result = invoke("run", plain_engine, *P, "--show-drafts")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--show-drafts: expected an engine with a drafter, found one without" in result.stderr


def test_pages_that_cannot_fit_and_a_missing_engine_are_refused(engine_dir: Path, invoke: Invoke) -> None:
    result = invoke("run", engine_dir, *P, "--kv-cache-bytes", "1")
    assert result.exit_code == 1
    assert "K/V pages: expected room for one sequence of max_seq_len 96" in result.stderr
    result = invoke("run", engine_dir / "none", *P)
    assert result.exit_code == 1
    assert "expected an engine directory, found nothing at that path" in result.stderr


@pytest.mark.parametrize("fields", [{"draft_length": 9}, {"device": "cuda"}, {"no_such": 1}, {"max_queue_len": 0}])
def test_llm_refuses_before_the_load(engine_dir: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LLM(engine_dir, **fields)


def test_a_caller_may_refuse_before_the_load(engine_dir: Path) -> None:
    """By what it finds out about its prompts."""
    with pytest.raises(DFlashError, match="at most 95 tokens"):
        LLM(engine_dir, before_load=lambda reader: reader.read("x" * 96))
    with pytest.raises(AssertionError, match="weights were read"):
        LLM(engine_dir, before_load=lambda reader: reader.read("x" * 95))


@pytest.mark.parametrize("words", [["--json-schema", '{"type": 1}'], ["--regex", "(a"], ["--grammar", "x"]])
def test_a_constraint_is_compiled_before_the_load(engine_dir: Path, invoke: Invoke, words: list[str]) -> None:
    result = invoke("run", engine_dir, *P, *words)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "expected one that llguidance compiles" in result.stderr


@pytest.mark.parametrize(
    ("rows", "words", "said"),
    [
        ("rows.jsonl", ["--draft-length", "9"], "--draft-length: expected 0 to 3"),
        ("rows.jsonl", ["--device", "cuda"], "--device: expected a CUDA GPU"),
        ("long.jsonl", [], "sampling top_p: expected a number in (0, 1]"),
        ("long.jsonl", ["--num-prompts", "1"], "prompts: 1: prompt: expected at most"),
        ("none.jsonl", [], "none.jsonl: expected a JSONL file"),
    ],
)
def test_eval_refuses_before_the_load(
    engine_dir: Path, directory: Path, invoke: Invoke, rows: str, words: list[str], said: str
) -> None:
    result = invoke("eval", engine_dir, "--against", engine_dir, "--input-file", rows, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr and "generating" not in result.stderr


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_a_parser_that_dynamo_does_not_have_is_refused_with_those_that_it_has(invoke, engine_dir, command) -> None:
    pytest.importorskip("dynamo.common.backend", reason="needs the extra 'serve'")
    result = invoke(command, engine_dir, "--tool-call-parser", "nonsense", "--reasoning-parser", "nothing")
    assert result.exit_code == 2
    assert re.search(r"--tool-call-parser: expected one of .*hermes.*, found 'nonsense'", result.stderr)
    assert re.search(r"--reasoning-parser: expected one of .*qwen3.*, found 'nothing'", result.stderr)
