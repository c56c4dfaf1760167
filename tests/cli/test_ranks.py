"""An engine of two ranks from the command line: built, run and compared like any other."""

import json
from pathlib import Path

import pytest

from dflash_trt.cli.main import cli
from tests.cli.conftest import Invoke

GREEDY = ["--max-new-tokens", "12", "--ignore-eos", "--device", "cpu"]


@pytest.fixture(scope="module")
def two_ranks(target: Path, drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from click.testing import CliRunner

    output = tmp_path_factory.mktemp("engines") / "two-ranks"
    words = ["build", "--target", target, "--drafter", drafter, "-o", output, "--dtype", "float32", "--tp-size", "2"]
    result = CliRunner().invoke(cli, [*map(str, words), "--max-seq-len", "96"])
    assert result.exit_code == 0, result.output
    assert "rank1.safetensors" in result.stdout
    return output


def test_the_text_is_that_of_one_rank(two_ranks: Path, engine_dir: Path, invoke: Invoke) -> None:
    words = ["--prompt", "def f", "--prompt", "class", *GREEDY]
    result = invoke("run", two_ranks, *words)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == invoke("run", engine_dir, *words).stdout
    assert "K/V: on each of 2 ranks " in result.stderr


def test_json_is_not_disturbed_by_the_workers(two_ranks: Path, invoke: Invoke) -> None:
    result = invoke("run", two_ranks, "--prompt", "def f", *GREEDY, "--no-drafter", "--json")
    assert result.stderr == ""
    document = json.loads(result.stdout)
    assert document["kv_pages"]["num_ranks"] == 2
    assert document["outputs"][0]["num_output_tokens"] == 12


def test_two_ranks_lose_nothing_against_one(two_ranks: Path, engine_dir: Path, tmp_path: Path, invoke: Invoke) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "def f"}) + "\n")
    words = ["--input-file", prompts, "--max-new-tokens", "12", "--min-agreement", "1.0", "--max-kl", "1e-6"]
    result = invoke("eval", two_ranks, "--against", engine_dir, *words)
    assert result.exit_code == 0, result.stdout


def test_a_number_of_ranks_that_does_not_divide_the_heads_is_refused(
    target: Path, drafter: Path, tmp_path: Path, invoke: Invoke
) -> None:
    result = invoke("build", "--target", target, "--drafter", drafter, "-o", tmp_path / "e", "--tp-size", "3")
    assert result.exit_code == 2
    assert "mapping tp_size: expected a divisor or a multiple of target num_kv_heads 2, found 3" in result.stderr


def test_collectives_of_plugins_need_their_backend(target: Path, tmp_path: Path, invoke: Invoke) -> None:
    words = ["build", "--target", target, "-o", tmp_path / "e", "--tp-size", "2", "--collectives", "plugin"]
    result = invoke(*words)
    assert result.exit_code == 2
    assert "collectives plugin needs backend tensorrt" in result.stderr


@pytest.mark.parametrize("command", ["eval", "bench speedup", "bench throughput", "bench serve", "deploy triton"])
def test_what_opens_an_engine_several_times_or_in_a_server_has_no_nodes(command: str, invoke: Invoke) -> None:
    refused = invoke(*command.split(), "engine", "--nnodes", "2")
    assert refused.exit_code == 2 and "No such option '--nnodes'" in refused.stderr
