"""An engine built with compile_for opens without compiling a kernel, and compiles what it cannot use of them."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.core.errors import BuildError, EngineDirError
from dflash_trt.core.kernel_archive import KernelArchive, kernels_name
from dflash_trt.engine_dir import EngineDir
from tests.cli.conftest import Invoke
from tests.engine_dir.building import build
from tests.factories import make_zlab_drafter

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
NAME = kernels_name("sm_90a")
# Opens the engine as on a GPU, with a driver that only compiles; launches find or compile their kernels.
OPEN = """
import sys
import torch
from dflash_trt.backends.cuda import kernel_build
from dflash_trt.backends.cuda.shipped import use_shipped_kernels
from dflash_trt.engine_dir import EngineDir
from dflash_trt.kernels import shipped_kernels
from dflash_trt.kernels.compiling import Compiling, kernels_compiled_alone
from dflash_trt.kernels.norm_launch import rms_norm
{change}
shipped_kernels.compile_only("sm_90a")
engine = EngineDir.open(sys.argv[1])
use_shipped_kernels(engine, warn=print)
{launches}
"""
OTHER_TRITON = "shipped_kernels._compiler_sha256 = lambda: 'of another one'"
ALL_STEPS = """
Compiling.has_all_cached = lambda self: False  # which would end it after the first step
kernel_build.take_steps(engine)
"""
ONE_NORM = """
with kernels_compiled_alone(1):
    row = torch.empty(1, 64, dtype=torch.bfloat16, device="meta")
    rms_norm(row, row[0], 1e-6)
"""


@pytest.fixture(scope="module")
def engine(target: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    output = tmp_path_factory.mktemp("built") / "engine"
    drafter = make_zlab_drafter(output.with_name("drafter"), target_dir=target, head_dim=16)
    limits: dict[str, Any] = {"max_batch_size": 1, "max_num_tokens": 64, "max_seq_len": 64, "page_size": 16}
    paths = {"target": str(target), "drafter": str(drafter)}
    return build(output.parent, output, dtype="bfloat16", compile_for=("sm_90a",), **paths, **limits)


@pytest.fixture
def changed(engine: EngineDir, tmp_path: Path) -> Callable[[bytes], Path]:
    """Copies the engine with another kernels file, which config.json does not know."""

    def change(content: bytes) -> Path:
        copied = Path(shutil.copytree(engine.path, tmp_path / "engine"))
        (copied / NAME).write_bytes(content)
        return copied

    return change


def opened(path: Path, cache: Path, launches: str, *, change: str = "") -> tuple[str, int]:
    """What was warned of, and the number of kernels compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", OPEN.format(change=change, launches=launches), str(path)],
        env=environment | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, len(list(cache.glob("*/*.cubin")))


def test_no_step_compiles_a_kernel(engine: EngineDir, tmp_path: Path) -> None:
    """Nor does Triton's cache get any of those that were shipped."""
    archive = engine.kernels("sm_90a")
    assert archive is not None and archive.index.num_kernels > 20
    assert opened(engine.path, tmp_path, ALL_STEPS) == ("", 0)


def test_kernels_of_another_triton_are_compiled_anew(engine: EngineDir, tmp_path: Path) -> None:
    assert opened(engine.path, tmp_path, ONE_NORM) == ("", 0)
    said, num_compiled = opened(engine.path, tmp_path, ONE_NORM, change=OTHER_TRITON)
    assert said.count("\n") == 1 and "compiled by another Triton" in said
    assert num_compiled == 1


def test_a_changed_file_is_refused_by_its_hash(
    engine: EngineDir, changed: Callable[[bytes], Path], tmp_path: Path
) -> None:
    """One byte of a cubin: the engine opens, and its kernels are compiled."""
    content = bytearray((engine.path / NAME).read_bytes())
    content[len(content) // 2] ^= 1
    path = changed(bytes(content))
    said, num_compiled = opened(path, tmp_path / "cache", ONE_NORM)
    assert said.count("\n") == 1 and hashlib.sha256(content).hexdigest() in said
    assert num_compiled == 1
    with pytest.raises(EngineDirError, match=f"{NAME}: expected sha256"):
        EngineDir.open(path, verify_hashes=True)


def test_inspect_names_what_is_shipped(engine: EngineDir, invoke: Invoke) -> None:
    archive = engine.kernels("sm_90a")
    assert archive is not None
    index = archive.index
    report = json.loads(invoke("inspect", engine.path, "--json").stdout)
    assert report["kernels"] == {"sm_90a": vars(index)}
    said = invoke("inspect", engine.path).stdout
    assert f"{index.num_kernels} kernels for sm_90a, compiled by Triton {index.triton_version}" in said


def test_an_archive_is_its_bytes(engine: EngineDir) -> None:
    archive = engine.kernels("sm_90a")
    assert archive is not None
    content = (engine.path / NAME).read_bytes()
    assert KernelArchive.from_bytes(content) == archive and archive.to_bytes() == content


def test_files_outside_of_a_cache_are_refused(engine: EngineDir) -> None:
    archive = engine.kernels("sm_90a")
    assert archive is not None
    content = KernelArchive(archive.index, archive.files | {"../A/x.cubin": b""}).to_bytes()
    with pytest.raises(ValueError, match=r"it has a file '\.\./A/x\.cubin'"):
        KernelArchive.from_bytes(content)


@pytest.mark.parametrize(
    ("architectures", "backend", "words"),
    [
        ("sm_90a,sm_42", "torch", "expected 'sm_90a', 'sm_100a' or 'sm_103a', found 'sm_42'"),
        ("sm_90a", "tensorrt", "compile_for needs backend torch; engines of tensorrt run no Triton kernels"),
        ("sm_90a", "tensorrt_llm", "compile_for needs backend torch; engines of tensorrt_llm run no Triton kernels"),
    ],
)
def test_the_option_is_refused_where_it_means_nothing(
    architectures: str, backend: str, words: str, target: Path, tmp_path: Path, invoke: Invoke
) -> None:
    flags = ["--backend", backend, "--compile-for", architectures]
    result = invoke("build", "--target", target, "-o", tmp_path / "engine", *flags)
    assert result.exit_code == 2 and words in result.stderr


def test_a_pair_that_no_gpu_runs_is_refused_before_any_work(target: Path, drafter: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="head_dim of the draft: expected a multiple of 16"):
        build(tmp_path, tmp_path / "engine", target=str(target), drafter=str(drafter), compile_for=("sm_90a",))
