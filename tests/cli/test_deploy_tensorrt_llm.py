"""`deploy` of engines that TensorRT-LLM runs: its Triton model, and commands for several nodes."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from dflash_trt.cli.deploy import deploy
from dflash_trt.cli.main import cli
from dflash_trt.engine_dir import EngineDir
from scripts.compare_trtllm_manifest import SNAPSHOT
from tests.cli.calls import options_never_set
from tests.cli.conftest import Invoke

KNOWN = json.loads(SNAPSHOT.read_text())


@pytest.fixture(scope="module")
def engine(target: Path, drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two ranks."""
    output = tmp_path_factory.mktemp("exported") / "engine"
    words = ["build", "--backend", "tensorrt_llm", "--target", target, "--drafter", drafter, "-o", output]
    result = CliRunner().invoke(cli, [*map(str, words), "--tp-size", "2", "--max-seq-len", "96"])
    assert result.exit_code == 0, result.output
    return output


@pytest.fixture(scope="module")
def llmapi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The layout of triton_backend/all_models/llmapi; the contents of its files are of no concern here."""
    source = tmp_path_factory.mktemp("llmapi")
    (source / "tensorrt_llm/1").mkdir(parents=True)
    (source / "tensorrt_llm/config.pbtxt").write_text('name: "tensorrt_llm"\nbackend: "python"\n')
    for name in ("model.py", "helpers.py"):
        (source / "tensorrt_llm/1" / name).write_text(f"# {name}\n")
    return source


def test_inspect_shows_an_exported_engine(engine: Path, invoke: Invoke) -> None:
    shown = invoke("inspect", engine)
    assert shown.exit_code == 0, shown.stderr
    assert "backend tensorrt_llm" in shown.stdout and "K/V on this machine: TensorRT-LLM's own" in shown.stdout
    report = json.loads(invoke("inspect", engine, "--json").stdout)
    assert report["tensorrt_llm"]["llm_args"]["tensor_parallel_size"] == 2


def test_run_refuses_to_show_drafts_that_the_backend_does_not_report(engine: Path, invoke: Invoke) -> None:
    refused = invoke("run", engine, "--prompt", "x", "--show-drafts")
    assert refused.exit_code == 2
    assert "--show-drafts: expected a backend that says which drafts it made, found tensorrt_llm" in refused.stderr


def test_plan_and_check_refuse_the_backend_by_name(target: Path, invoke: Invoke) -> None:
    words = ["--target", target, "--backend", "tensorrt_llm"]
    for command in (["plan", *words, "--gpu", "h200"], ["build", *words, "--check"]):
        result = invoke(*command)
        assert (result.exit_code, "expected backend torch or tensorrt, found tensorrt_llm" in result.stderr) == (
            2,
            True,
        )


def test_the_model_of_llmapi_has_the_engines_arguments(
    engine: Path, llmapi: Path, tmp_path: Path, invoke: Invoke
) -> None:
    words = ["deploy", "triton", engine, "-o", tmp_path, "--llmapi", llmapi]
    for _ in range(2):  # the second time changes nothing
        result = invoke(*words, "--draft-length", "2", "--kv-cache-free-memory-fraction", "0.5")
        assert result.exit_code == 0, result.stderr
        fields: dict[str, Any] = yaml.safe_load((tmp_path / "tensorrt_llm/1/model.yaml").read_text())
        assert set(fields.pop("triton_config")) == set(KNOWN["triton_config"])
        args = EngineDir.open(engine).manifest.tensorrt_llm.resolved_args(engine)  # type: ignore[union-attr]
        args["speculative_config"]["max_draft_len"] = 2
        args["kv_cache_config"]["free_gpu_memory_fraction"] = 0.5
        assert fields == args and fields["model"] == str(engine / "target")
    for name in ("config.pbtxt", "1/model.py", "1/helpers.py"):
        assert (tmp_path / "tensorrt_llm" / name).read_bytes() == (llmapi / "tensorrt_llm" / name).read_bytes()


def test_what_cannot_be_deployed_there_is_refused(
    engine: Path, engine_dir: Path, llmapi: Path, tmp_path: Path, invoke: Invoke
) -> None:
    of_ours = "expected no other options but settings, found --chat, --instances"
    cases: list[tuple[Path, Path, list[str], str]] = [
        (engine_dir, llmapi, [], "--llmapi: expected an engine of TensorRT-LLM, found torch"),
        (engine, tmp_path, [], "1/helpers.py: expected a file of TensorRT-LLM, found none"),
        (engine, llmapi, ["--chat", "--instances", "2"], of_ours),
        (engine, llmapi, ["--accept-parameter", "a", "--no-drafter"], "settings, found --accept-parameter. Leave"),
        (engine, llmapi, ["--deterministic"], "deterministic: expected nothing, found True"),
    ]
    for directory, source, words, message in cases:
        result = invoke("deploy", "triton", directory, "-o", tmp_path / "models", "--llmapi", source, *words)
        assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
    assert not (tmp_path / "models").exists()


def test_our_own_triton_model_serves_it_too(engine: Path, tmp_path: Path, invoke: Invoke) -> None:
    assert invoke("deploy", "triton", engine, "-o", tmp_path, "--gpus", "0,1").exit_code == 0
    assert invoke("deploy", "triton", engine, "-o", tmp_path, "--check").exit_code == 0


def test_every_option_of_slurm_and_mpi_is_in_its_command(engine: Path, invoke: Invoke) -> None:
    own = ["--gpus-per-node", "1", "--port", "9000"]
    launch = "trtllm-llmapi-launch trtllm-serve serve target --config llm_args.yaml --gpus_per_node 1"
    launch += " --host 0.0.0.0 --port 9000"
    assert {word for word in launch.split() if word.startswith("--")} <= set(KNOWN["serve_options"])
    slurm = shlex.split(invoke("deploy", "slurm", engine, *own, "--image", "i").stdout)
    assert slurm[:5] == ["srun", "--label", "--mpi=pmix", "--nodes=2", "--ntasks=2"]
    assert slurm[5:8] == ["--ntasks-per-node=1", "--gpus-per-node=1", "--container-image=i"]
    assert slurm[8:10] == [f"--container-mounts={engine}:{engine}", f"--container-workdir={engine}"]
    assert slurm[10:] == launch.split()
    mpi = shlex.split(invoke("deploy", "mpi", engine, *own, "--hosts", "a,b").stdout)
    assert mpi == ["mpirun", "-n", "2", "--host", "a:1,b:1", "-wdir", str(engine), *launch.split()]
    assert "tensorrt-llm/release" in invoke("deploy", "slurm", engine, "--gpus-per-node", "2").stdout
    assert options_never_set(deploy.commands["slurm"], ["e"], ["e", *own, "--image", "i"]) == {"engine_dir"}
    hosts = ["e", "--hosts", "a"]
    assert options_never_set(deploy.commands["mpi"], hosts, ["e", *own, "--hosts", "a,b"]) == {"engine_dir"}


def test_nodes_that_the_ranks_do_not_fill_are_refused(engine: Path, engine_dir: Path, invoke: Invoke) -> None:
    cases: list[tuple[list[str | Path], str]] = [
        (["slurm", engine], "--gpus-per-node: expected a divisor of 2, the engine's ranks, found 8"),
        (["slurm", engine_dir, "--gpus-per-node", "1"], "--gpus-per-node: expected fewer than 1, the engine's ranks"),
        (
            ["mpi", engine_dir, "--gpus-per-node", "1", "--hosts", "a"],
            "engine: expected backend tensorrt_llm, found torch",
        ),
        (["mpi", engine, "--gpus-per-node", "1", "--hosts", "a"], "--hosts: expected 2 names"),
    ]
    for words, message in cases:
        result = invoke("deploy", *words)
        assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
