"""An engine directory of backend tensorrt: written, inspected, and refused when it is not for this machine."""

import json
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from dflash_trt.backends.tensorrt import build_rank as trt_engine_files
from dflash_trt.backends.tensorrt.builder import PlanOptions
from dflash_trt.backends.tensorrt.compatibility import spec_of
from dflash_trt.cli.main import cli
from dflash_trt.core.errors import EngineDirError
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.engine_dir.tensorrt_record import ProfileRecord
from dflash_trt.executor.opening import open_executor
from tests.trt.test_step_tokens import make_pair
from tests.trt.test_trt_executor import RECORD

PLAN = b"what TensorRT would have serialized"


@pytest.fixture
def engine_path(tmp_path, monkeypatch):
    """A directory that the build command wrote, with another plan than TensorRT's."""
    seen = []

    def build_rank_plan(weights_file, config, limits, *, options, progress):
        seen.append(weights_file.name)
        progress("Building engine", 1, 1)
        profile = ProfileRecord(name="decode", axes={"T": (1, 16, 16)})
        return SimpleNamespace(plan=PLAN), RECORD.model_copy(update={"profiles": (profile,)})

    monkeypatch.setattr(trt_engine_files, "build_rank_plan", build_rank_plan)
    monkeypatch.setattr(trt_engine_files, "plan_options", lambda config, base_dir: PlanOptions())
    target, drafter = make_pair(tmp_path)
    result = run_cli(
        "build", "--target", target, "--drafter", drafter, "--backend", "tensorrt", "-o", tmp_path / "engine",
        "--max-seq-len", 64, "--dtype", "float16",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert seen == ["rank0.safetensors"]
    return tmp_path / "engine"


def run_cli(*arguments):
    return CliRunner().invoke(cli, list(map(str, arguments)))


def test_the_plan_stands_beside_the_weights_and_config_json_describes_it(engine_path):
    assert (engine_path / "rank0.engine").read_bytes() == PLAN
    engine = EngineDir.open(engine_path)
    assert engine.manifest.backend == "tensorrt"
    assert engine.manifest.tensorrt.profiles[0].axes == {"T": (1, 16, 16)}
    spec = spec_of(engine)
    assert (spec.dtype, spec.max_draft_len, spec.page_size) == ("float16", 3, 32)


def test_inspect_prints_gpu_versions_and_profiles(engine_path):
    report = json.loads(run_cli("inspect", engine_path, "--json").stdout)
    assert report["tensorrt"]["tensorrt_version"] == "11.4.0.106"
    shown = run_cli("inspect", engine_path).output
    assert "for NVIDIA H200 (compute capability 9.0)" in shown
    assert "1 .. 16 .. 16" in shown


def _change(plan):
    plan.write_bytes(PLAN.replace(b"TensorRT", b"TensorRX"))


def _cut(plan):
    plan.write_bytes(PLAN[:-1])


def _delete(plan):
    plan.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_change, "rank0.engine: expected sha256"),
        (_cut, "rank0.engine: expected 35 bytes, found 34"),
        (_delete, "rank0.engine: expected a file"),
    ],
)
def test_a_changed_plan_is_refused_by_name(engine_path, damage, message):
    damage(engine_path / "rank0.engine")
    with pytest.raises(EngineDirError, match=message):
        EngineDir.open(engine_path)


def test_a_plan_that_the_manifest_does_not_list_is_missed(engine_path):
    fields = json.loads((engine_path / "config.json").read_text())
    del fields["files"]["rank0.engine"]
    (engine_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(EngineDirError, match=r"key 'files' does not list 'rank0.engine'"):
        EngineDir.open(engine_path)


def test_a_backend_without_its_record_is_refused(engine_path):
    fields = json.loads((engine_path / "config.json").read_text())
    fields["tensorrt"] = None
    (engine_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(EngineDirError, match="'tensorrt' record for backend tensorrt"):
        EngineDir.open(engine_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_running_it_without_a_gpu_says_what_is_missing(engine_path):
    with pytest.raises(EngineDirError, match="expected an NVIDIA GPU with a driver"):
        open_executor(EngineDir.open(engine_path), RuntimeConfig())


def test_float16_needs_the_tensorrt_backend(tmp_path):
    result = run_cli("build", "--target", tmp_path, "--dtype", "float16", "-o", tmp_path / "engine")
    assert result.exit_code == 2
    assert "dtype float16 needs backend tensorrt" in result.output
