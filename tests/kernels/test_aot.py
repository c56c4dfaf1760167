"""Ahead-of-time compilation: every kernel for every architecture, and what is refused."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trt.core.errors import BuildError, ConfigError
from plugins.aot import compile as aot_compile
from plugins.aot.compile import DEFAULT_ARCHITECTURES, SHARED_BYTES, CompiledKernel
from plugins.aot.embed import CUBIN_ALIGNMENT, table_source
from plugins.aot.library import compile_library
from plugins.aot.manifest import write_kernels
from plugins.aot.variants import FLOAT_TYPES, HEAD_DIMS, LibrarySpec, library_variants
from tests.plugins.building import compile_kernels

# Every kernel of the library, once or twice: what compiles here compiles in the other sizes, but for shared memory.
SMALL = (
    *("--dtypes", "bfloat16", "--head-dims", "64", "--max-requests", "256"),
    *("--tiles", "16", "--vocab-tiles", "64", "--widths", "16"),
)
SOFTCAPS_TOO = (*SMALL, "--pages", "network", "--softcaps", "with")

ARCHITECTURES = ("90a", "103a")  # 100a, which is close to 103a, has a test of its own

# Bytes, on sm_100a and 103a: of a drafter with a soft cap, which there is none of yet.
SPILLED = {"attention_bfloat16_bfloat16_softcap_block_d64_t16_r256": 8}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("aot")
    done = compile_kernels(out, *SMALL, "--arch", ",".join(ARCHITECTURES))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(out / "manifest.json")
    assert re.search(r"^\[1/\d+\] \w+ sm_\w+ \d+ KiB", done.stderr, flags=re.MULTILINE), "no progress"
    return out


def kernels_by_architecture(manifest: dict[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for kernel in manifest["kernels"]:
        found.setdefault(kernel["architecture"], []).append(kernel["variant"])
    return found


def test_every_kernel_compiles_for_hopper_and_blackwell_without_a_gpu(compiled: Path) -> None:
    check_kernels(compiled, ARCHITECTURES)


def test_every_kernel_compiles_for_the_other_default_architecture(tmp_path: Path) -> None:
    (other,) = set(DEFAULT_ARCHITECTURES).difference(ARCHITECTURES)
    done = compile_kernels(tmp_path, *SMALL, "--arch", other)
    assert done.returncode == 0, done.stderr
    check_kernels(tmp_path, (other,))
    check_registers(tmp_path, num_kinds=4, architectures=(other,))


def check_kernels(directory: Path, architectures: tuple[str, ...]) -> None:
    manifest = json.loads((directory / "manifest.json").read_text())
    sizes: dict[str, Any] = {"head_dims": (64,), "max_requests": (256,), "tiles": (16,), "vocab_tiles": (64,)}
    spec = LibrarySpec(dtypes=("bfloat16",), widths=(16,), **sizes)
    names = [variant.name for variant in library_variants(spec)]
    assert kernels_by_architecture(manifest) == dict.fromkeys(architectures, names)
    assert manifest["left_out"] == []
    functions = {variant.kernel.__name__ for variant in library_variants(LibrarySpec())}
    assert {kernel["kernel"] for kernel in manifest["kernels"]} == functions


def check_registers(directory: Path, *, num_kinds: int, architectures: tuple[str, ...] = ARCHITECTURES) -> None:
    """Of kinds of layers: block or not, pages."""
    kernels = json.loads((directory / "manifest.json").read_text())["kernels"]
    attention = [kernel for kernel in kernels if kernel["kernel"] == "attention_kernel"]
    assert len(attention) == num_kinds * len(architectures)
    for kernel in attention:
        assert kernel["stack_bytes"] <= SPILLED.get(kernel["variant"], 0), kernel["variant"]
        assert kernel["blocks_per_multiprocessor"] >= 2, kernel["variant"]


def test_no_attention_kernel_spills_registers_and_several_share_a_multiprocessor(compiled: Path) -> None:
    check_registers(compiled, num_kinds=4)


def test_nor_does_one_with_a_soft_cap(tmp_path: Path) -> None:
    done = compile_kernels(tmp_path, *SOFTCAPS_TOO, "--arch", ",".join(ARCHITECTURES))
    assert done.returncode == 0, done.stderr
    check_registers(tmp_path, num_kinds=2)


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [
        ({"num_registers": 40}, 12),  # 65536 / (40 * 128)
        ({"num_registers": 41}, 10),  # 48 are taken
        ({"num_registers": 16}, 16),  # 2048 threads
        ({"num_registers": 16, "num_warps": 1}, 32),  # no more blocks, however small
        ({"num_registers": 16, "shared_bytes": 75 * 1024}, 3),  # 228 KiB, one of each block CUDA's
        ({"num_registers": 16, "shared_bytes": 75 * 1024 + 1}, 2),
    ],
)
def test_blocks_of_a_multiprocessor_share_registers_threads_and_memory(changes: dict[str, int], blocks: int) -> None:
    assert make_kernel(**changes).blocks_per_multiprocessor == blocks


def test_the_manifest_describes_the_cubins(compiled: Path) -> None:
    manifest = json.loads((compiled / "manifest.json").read_text())
    image = (compiled / manifest["image"]["file"]).read_bytes()
    assert hashlib.sha256(image).hexdigest() == manifest["image"]["sha256"]
    for kernel in manifest["kernels"]:
        cubin = image[kernel["offset"] : kernel["offset"] + kernel["num_bytes"]]
        assert cubin.startswith(b"\x7fELF")
        assert hashlib.sha256(cubin).hexdigest() == kernel["sha256"]
        assert kernel["offset"] % CUBIN_ALIGNMENT == 0
        assert kernel["shared_bytes"] <= SHARED_BYTES[kernel["architecture"]]
        assert kernel["entry"].encode() in cubin
        assert str(Path.cwd()).encode() not in cubin, "paths of this machine"


def test_the_table_has_a_row_for_each_kernel_and_names_its_manifest(compiled: Path) -> None:
    manifest = json.loads((compiled / "manifest.json").read_text())
    table = (compiled / "embedded_kernels.cpp").read_text()
    assert hashlib.sha256((compiled / "manifest.json").read_bytes()).hexdigest() in table
    for kernel in manifest["kernels"]:
        assert f'"{kernel["variant"]}", "{kernel["kernel"]}", "{kernel["entry"]}"' in table
        assert f", {kernel['offset']}, {kernel['num_bytes']}}}" in table
    assert '.incbin "cubins.bin"' in (compiled / "embedded_cubins.S").read_text()


def test_a_second_run_compiles_nothing_and_changes_no_file(compiled: Path) -> None:
    def written() -> dict[str, tuple[int, bytes]]:
        return {
            path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in compiled.iterdir() if path.is_file()
        }

    before = written()
    done = compile_kernels(compiled, *SMALL, "--arch", ",".join(ARCHITECTURES), "--jobs", "1")
    assert done.returncode == 0, done.stderr
    assert written() == before
    assert [line for line in done.stderr.splitlines() if not line.endswith(", from the cache")] == []


TWICE = """
import sys
from plugins.aot.compile import compile_variant, prepare_compiler
prepare_compiler(sys.argv[1])
from plugins.aot.variants import LibrarySpec, library_variants
wanted = ("accept_width16", "rotate_and_store_float32_float32_pages_d64_r256")
for variant in library_variants(LibrarySpec(dtypes=("float32",), head_dims=(64,))):
    if variant.name in wanted:
        sys.stdout.write(compile_variant(variant, "100a").sha256 + "\\n")
"""


CACHED = """
import sys
from dataclasses import replace
from plugins.aot.compile import compile_variant, prepare_compiler
prepare_compiler(sys.argv[1])
from plugins.aot.variants import LibrarySpec, library_variants
[accept] = [variant for variant in library_variants(LibrarySpec()) if variant.name == "accept_width16"]
wide = replace(accept, constexprs=dict(accept.constexprs) | {"WIDTH": 32})
warps = replace(accept, num_warps=2)
for variant, architecture in [(accept, "90a"), (accept, "90a"), (accept, "100a"), (wide, "90a"), (warps, "90a")]:
    sys.stdout.write(f"{compile_variant(variant, architecture).is_cached}\\n")
"""


def test_a_kernel_is_taken_from_the_cache_only_if_nothing_of_it_has_changed(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", CACHED, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "True", "False", "False", "False"]


def test_equal_sources_give_equal_bytes(tmp_path: Path) -> None:
    """From two empty caches, so that everything is compiled twice."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    digests = []
    for cache in ("first", "second"):
        command = [sys.executable, "-c", TWICE, str(tmp_path / cache)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        digests.append(done.stdout.split())
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dtypes": ("float8",)}, "--dtypes: expected some of bfloat16, float16, float32, found float8"),
        ({"pages": ("fp8",)}, "--pages: expected some of network, float8_e4m3fn, found fp8"),
        ({"head_dims": (64, 72)}, "head_dims: expected multiples of 16 from 16 to 512, found 72"),
        ({"head_dims": (528,)}, "head_dims: expected multiples of 16 from 16 to 512, found 528"),
        ({"tiles": ()}, "--tiles: expected one value or more, found none"),
    ],
)
def test_a_library_for_what_there_are_no_kernels_for_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LibrarySpec(**changed)


@pytest.mark.parametrize("architectures", [("90a", "75"), ("90a", "90a"), ()])
def test_an_architecture_that_is_not_known_is_refused(tmp_path: Path, architectures: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"--arch: expected different ones of 80, .*H100 and H200 are 90a"):
        compile_library(tmp_path, LibrarySpec(), architectures)


def test_a_mistake_on_the_command_line_is_one_line(tmp_path: Path) -> None:
    done = compile_kernels(tmp_path, "--all", "--arch", "75")
    assert done.returncode == ConfigError.exit_code
    assert re.fullmatch("error: --arch: expected .*\\n", done.stderr), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_interpreting_process_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match="TRITON_INTERPRET: expected unset"):
        aot_compile.prepare_compiler("cache")


def test_the_default_library_serves_every_type_and_head_dim() -> None:
    variants = library_variants(LibrarySpec())
    names = [variant.name for variant in variants]
    assert names == sorted(set(names))
    assert all(name.isidentifier() for name in names)
    for variant in variants:
        assert set(variant.types()) == set(variant.kernel.arg_names)
    for dtype in FLOAT_TYPES:
        for head_dim in HEAD_DIMS:
            for pages in (dtype, "float8_e4m3fn"):
                tile = 64 if pages != dtype != "float32" else 16  # the smallest
                for part in ("attention_{0}_{1}_step_d{2}_t{3}_", "attention_{0}_{1}_block_d{2}_t{3}_"):
                    assert any(name.startswith(part.format(dtype, pages, head_dim, tile)) for name in names)
                assert f"rotate_and_store_{dtype}_{pages}_pages_limits_d{head_dim}_r256" in names
            assert f"attention_reduction_{dtype}_step_d{head_dim}_t16_r256" in names
        assert f"draw_{dtype}_v16_tiles64" in names


def make_kernel(**changes: Any) -> CompiledKernel:
    fields: dict[str, Any] = {
        "variant": "scale_float32",
        "kernel": "scale_kernel",
        "architecture": "90a",
        "entry": "scale_kernel",
        "num_warps": 4,
        "num_stages": 2,
        "shared_bytes": 1024,
        "num_registers": 40,
        "stack_bytes": 0,
        "arguments": (("x", "*fp32", True), ("num_rows", "i32", False)),
        "constants": (("BLOCK", 128),),
        "grid": ("(num_rows + BLOCK - 1) / BLOCK", "num_heads", "1"),
        "cubin": b"\x7fELF and more",
        "ptx": ".version 8.7",
    }
    return CompiledKernel(**fields | changes)


def test_grids_become_look_ups_of_sizes_and_constants_their_values() -> None:
    source = table_source([make_kernel()], {make_kernel().sha256: 64}, manifest_sha256="d")
    assert (
        'return make_grid((values.integer_of("num_rows") + 128 - 1) / 128, values.integer_of("num_heads"), 1);'
    ) in source
    assert "{9, 0, true}, 128, 1024," in source


@pytest.mark.parametrize("axis", ["cdiv(num_rows, 8); exit(1)", "x + 1", "num_rows, 2"])
def test_a_grid_of_anything_but_sizes_is_refused(axis: str) -> None:
    kernel = make_kernel(grid=(axis, "1", "1"))
    with pytest.raises(BuildError, match="grid of kernel scale_float32: expected sums, products and quotients"):
        table_source([kernel], {kernel.sha256: 0}, manifest_sha256="d")


def test_a_kernel_too_large_for_its_gpu_is_left_out_and_said(tmp_path: Path) -> None:
    small, large = make_kernel(), make_kernel(variant="large", shared_bytes=SHARED_BYTES["90a"] + 1)
    manifest = json.loads(write_kernels(tmp_path, [small, large], origin={}).read_text())
    assert [kernel["variant"] for kernel in manifest["kernels"]] == ["scale_float32"]
    assert manifest["left_out"] == [
        {"variant": "large", "architecture": "90a", "shared_bytes": SHARED_BYTES["90a"] + 1}
    ]
    assert '"large"' not in (tmp_path / "embedded_kernels.cpp").read_text()


def test_equal_cubins_are_stored_once(tmp_path: Path) -> None:
    twice = [make_kernel(), make_kernel(variant="other")]
    manifest = json.loads(write_kernels(tmp_path, twice, origin={}).read_text())
    assert manifest["image"]["num_bytes"] == len(make_kernel().cubin)
    assert {kernel["offset"] for kernel in manifest["kernels"]} == {0}


PTX = """
.target sm_90a
.visible .entry accept_kernel(
{parameters}
)
.reqntid {threads}
{{
"""


def launchable(num_parameters: int, **changes: Any) -> SimpleNamespace:
    """What Triton's compiler returns for the kernel `accept`, as far as it is looked at."""
    parameters = [f".param .u64 .ptr .global .align 1 p_{i}" for i in range(num_parameters - 3)]
    parameters += [f".param {changes.pop('width', '.u32')} p_w", ".param .u64 s0", ".param .u64 s1"]
    ptx = PTX.format(parameters=",\n".join(parameters), threads=changes.pop("threads", 32))
    metadata = {
        "name": "accept_kernel",
        "num_warps": 1,
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
        "num_ctas": 1,
        "launch_cooperative_grid": False,
        "launch_pdl": False,
        "tensordesc_meta": [],
        "tmem_size": 512,
    }
    ptx = ptx.replace("sm_90a", changes.pop("target", "sm_90a"))
    cubin = changes.pop("cubin", b"\x7fELF")
    return SimpleNamespace(metadata=SimpleNamespace(**metadata | changes), asm={"ptx": ptx, "cubin": cubin})


def check(compiled: SimpleNamespace) -> None:
    [variant] = [v for v in library_variants(LibrarySpec()) if v.name == "accept_width16"]
    aot_compile._check("kernel accept", variant, "90a", compiled)


NUM_PARAMETERS = 12  # nine tensors, the width, two scratch pointers


def test_a_launchable_kernel_is_accepted() -> None:
    check(launchable(NUM_PARAMETERS))


@pytest.mark.parametrize(
    ("compiled", "what"),
    [
        (launchable(NUM_PARAMETERS - 1), "parameters"),
        (launchable(NUM_PARAMETERS, width=".u64"), "parameters"),
        (launchable(NUM_PARAMETERS, threads=64), "threads"),
        (launchable(NUM_PARAMETERS, target="sm_90"), "target"),
        (launchable(NUM_PARAMETERS, global_scratch_size=128), "scratch bytes"),
        (launchable(NUM_PARAMETERS, profile_scratch_size=8), "scratch bytes"),
        (launchable(NUM_PARAMETERS, num_ctas=2), "blocks in a cluster"),
        (launchable(NUM_PARAMETERS, launch_cooperative_grid=True), "cooperative launch"),
        (launchable(NUM_PARAMETERS, launch_pdl=True), "dependent launch"),
        (launchable(NUM_PARAMETERS, tensordesc_meta=[{}]), "tensor descriptors"),
        (launchable(NUM_PARAMETERS, tmem_size=513), "fits tensor memory"),
        (launchable(NUM_PARAMETERS, cubin=b"PTX"), "cubin"),
    ],
)
def test_a_kernel_that_the_library_could_not_launch_is_refused(compiled: SimpleNamespace, what: str) -> None:
    with pytest.raises(BuildError, match=f"kernel accept, {what}: expected"):
        check(compiled)
