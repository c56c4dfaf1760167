"""An engine of two ranks from the command line: built, run and compared like any other."""

import json
import os
import shlex
import subprocess
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


# Stands for Slurm on two nodes: each runs the command after srun's options, whose values stand after "=".
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
for id in 0 1; do SLURM_NODEID=$id "$@"; done
"""
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames gpu[07-08]" ] && printf 'gpu07\\ngpu08\\n'
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the shell of a batch script; `dflash-trt` prints its arguments."""
    (tmp_path / "bin").mkdir()
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL), ("dflash-trt", '#!/bin/sh\necho "$@"\n')):
        path = tmp_path / "bin" / name
        path.write_text(script)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[07-08]")


def test_the_line_for_slurm_serves_on_the_first_node_and_runs_ranks_on_the_others(
    two_ranks: Path, slurm: None, invoke: Invoke
) -> None:
    words = ["deploy", "slurm", two_ranks, "--gpus-per-node", "1", "--port", "9000"]
    line = invoke(*words).stdout
    options = ["--label", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--gpus-per-node=1"]
    assert shlex.split(line)[: len(options) + 2] == ["srun", *options, "sh"]
    ran = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
    nodes = "--nnodes 2 --master-addr gpu07"
    commands = [f"serve {two_ranks} --host 0.0.0.0 --port 9000 {nodes}", f"ranks {two_ranks} --node-rank 1 {nodes}"]
    assert ran.stdout.splitlines() == commands
    for command in commands:  # our commands take these words
        name, *rest = command.split()
        cli.commands[name].make_context(name, rest)
    image = shlex.split(invoke(*words, "--image", "ours").stdout)
    mount = f"--container-mounts={two_ranks}:{two_ranks}"
    assert image[6:9] == ["--container-image=ours", mount, f"--container-workdir={two_ranks}"]


def test_one_node_needs_no_slurm_line(two_ranks: Path, invoke: Invoke) -> None:
    refused = invoke("deploy", "slurm", two_ranks, "--gpus-per-node", "2")
    assert refused.exit_code == 2
    assert "--gpus-per-node: expected fewer than 2, the engine's ranks, found 2. One node is enough" in refused.stderr


@pytest.mark.parametrize("command", ["eval", "bench speedup", "bench throughput", "bench serve", "deploy triton"])
def test_what_opens_an_engine_several_times_or_in_a_server_has_no_nodes(command: str, invoke: Invoke) -> None:
    refused = invoke(*command.split(), "engine", "--nnodes", "2")
    assert refused.exit_code == 2 and "No such option '--nnodes'" in refused.stderr
