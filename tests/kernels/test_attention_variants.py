"""What is compiled ahead: the same arguments, constants and grid as a launch, and code that fits a multiprocessor."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from dflash_trt.kernels import attention_launch, attention_plan, rope_and_pages_launch
from dflash_trt.kernels.attention_launch import allocate_workspace, work_slots, workspace_size
from dflash_trt.kernels.attention_plan import TILES, tile_rows, tiles_of
from dflash_trt.kernels.rope_and_pages_launch import stack_draft_layers, store_draft_context
from plugins.aot.attention_variants import attention_plan_variant, attention_variants
from plugins.aot.page_variants import draft_context_variant, rotate_and_store_variant
from plugins.aot.variant import KernelVariant, pointer
from tests.kernels.attention_steps import Heads, Step, make_tensors
from tests.kernels.test_rope_and_pages_kernels import CASES, make_rows, store

SHARED_BYTES = 227 * 1024  # of one multiprocessor, sm_90 and sm_100
PLACEHOLDERS = {"sinks", "limits", "state_pools"}  # any tensor stands in for one that is not read
OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion"}


class Recorder:
    """Stands in for a kernel: keeps grid and arguments of every launch."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.launches.append((grid, args, kwargs))


def assert_is_launched_as(variant: KernelVariant, recorder: Recorder, sizes: dict[str, int]) -> None:
    """The last launch passes the variant's run-time arguments, constants, options and grid."""
    grid, args, constants = recorder.launches[-1]
    assert len(args) == len(variant.signature)
    for value, (name, word) in zip(args, variant.signature.items(), strict=True):
        kind = torch.Tensor if word.startswith("*") else float if word == "fp32" else int
        assert isinstance(value, kind), f"{variant.name}: {name} is {value!r}, declared {word}"
        if isinstance(value, torch.Tensor) and name not in PLACEHOLDERS:
            assert pointer(value.dtype) == word, f"{variant.name}: {name} is {value.dtype}, declared {word}"
        if word == "i32:16":
            assert value % 16 == 0
    given = {name: value for name, value in constants.items() if name not in OPTIONS}
    if "POOLED" in given and "PLANNED" not in given:  # the one difference: a plugin finds its pages by address
        assert not given["POOLED"]
        given["POOLED"] = True
    assert given == dict(variant.constexprs)
    assert constants["num_warps"] == variant.num_warps
    assert constants.get("num_stages", 1) == variant.num_stages
    named = sizes | {n: v for n, v in zip(variant.signature, args, strict=True) if isinstance(v, int)}
    declared = tuple(eval(axis.replace("/", "//"), {}, named) for axis in variant.grid)
    assert declared == (*grid, *(1,) * (3 - len(grid)))


@pytest.mark.parametrize("rows", [(4, 1), (4, 40)])
def test_attention_variants_are_what_the_launcher_launches(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, rows: tuple[int, ...]
) -> None:
    recorders = {name: Recorder() for name in ("attention_kernel", "attention_reduction_kernel")}
    for name, recorder in recorders.items():
        monkeypatch.setattr(attention_launch, name, recorder)
    plan = Recorder()
    monkeypatch.setattr(attention_plan, "attention_plan_kernel", plan)
    step = Step(rows=rows, contexts=(70, 30), heads=Heads(num_heads=6, num_kv_heads=2))
    tensors = make_tensors(step).to(device)
    workspace = allocate_workspace(kv_heads=2, head_dim=64, device=device)
    attention_launch.attend_pages(
        tensors.q, tensors.pages, tensors.requests, step.options, workspace=workspace, num_verify_rows=4
    )
    num_launches = 1 if rows == (4, 1) else 2
    assert [len(recorder.launches) for recorder in (plan, *recorders.values())] == [num_launches] * 3
    tiles = tiles_of(head_dim=64, dtype=torch.float32, page_dtype=torch.float32)
    tile = tile_rows(4 if rows == (4, 1) else 44, 3, tiles)
    variants = attention_variants(
        dtype=torch.float32,
        page_dtype=torch.float32,
        head_dim=64,
        has_block=False,
        max_requests=2,
        tiles=(tile,),
        page_size=step.page_size,
    )
    for variant, recorder in zip(variants, recorders.values(), strict=True):
        assert_is_launched_as(variant, recorder, {"num_rows": sum(rows)})
    variant = attention_plan_variant(tile=tile, key_block=64, has_block=False, max_requests=2)
    assert_is_launched_as(variant, plan, {"num_rows": sum(rows)})


def test_a_plugins_variants_are_launched_with_the_same_arguments_but_for_plan_and_pages() -> None:
    """A plugin has no plan, finds its pages by address, and its library serves pages of every size."""
    sizes: dict[str, Any] = {"dtype": torch.bfloat16, "page_dtype": torch.bfloat16, "head_dim": 128, "has_block": False}
    for plugin, torch_launch in zip(
        attention_variants(**sizes, tiles=(32,)), attention_variants(**sizes, tiles=(32,), page_size=32), strict=True
    ):
        assert plugin.signature == torch_launch.signature
        changed = {name for name, value in plugin.constexprs.items() if torch_launch.constexprs[name] != value}
        assert changed <= {"PLANNED", "POOLED", "PAGE_RUN"}
        assert not plugin.constexprs["PLANNED"]


def test_a_page_write_variant_is_what_the_launcher_launches(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    monkeypatch.setattr(rope_and_pages_launch, "rotate_and_store_kernel", recorder)
    case = CASES["norm and rope"]
    rows = make_rows(case)
    store(rows, case, device, limits=True)
    variant = rotate_and_store_variant(
        dtype=case.dtype,
        page_dtype=case.dtype,
        head_dim=case.head_dim,
        has_norm=True,
        has_rope=True,
        stores_pages=True,
        has_limits=True,
        max_requests=len(rows.requests.page_table),
    )
    assert_is_launched_as(variant, recorder, {"num_rows": len(rows.positions)})


def test_the_draft_context_variant_is_what_the_launcher_launches(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    monkeypatch.setattr(rope_and_pages_launch, "draft_context_kernel", recorder)
    case = CASES["norm and rope"]
    rows = make_rows(case).to(device)
    assert rows.rotation.k_norm is not None
    layers = stack_draft_layers([rows.pages], k_norms=[rows.rotation.k_norm], k_scales=[1.0], v_scales=[1.0])
    kv = torch.zeros(len(rows.positions), 2 * case.kv_heads * case.head_dim, device=device)
    store_draft_context(kv, layers, rows.requests, rows.positions, rows.rotation)
    variant = draft_context_variant(
        dtype=case.dtype,
        page_dtype=case.dtype,
        head_dim=case.head_dim,
        has_norm=True,
        max_requests=len(rows.requests.page_table),
    )
    assert_is_launched_as(variant, recorder, {"num_rows": len(rows.positions), "num_layers": 1})


def test_the_workspace_holds_every_tiles_partial_results() -> None:
    device = torch.device("cpu")
    num_elements = len(allocate_workspace(kv_heads=8, head_dim=128, device=device))
    for tile in TILES:
        slots = work_slots(kv_heads=8, num_multiprocessors=attention_launch.num_multiprocessors(device))
        size = workspace_size(tile=tile, kv_heads=8, head_dim=128, num_slots=slots)
        assert size.num_partials == slots * 8 * tile * 128
        assert size.num_elements <= num_elements


@pytest.mark.parametrize(
    ("query_rows", "heads_per_kv", "tile"),
    [(1, 4, 16), (1, 5, 16), (8, 4, 32), (16, 4, 64), (16, 8, 128), (500, 1, 128)],
)
def test_the_tile_is_the_smallest_that_holds_a_verify_block(query_rows: int, heads_per_kv: int, tile: int) -> None:
    assert tile_rows(query_rows, heads_per_kv) == tile


def test_a_group_of_heads_that_no_tile_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="query heads of one K/V head: expected at most 128, found 129"):
        tile_rows(1, 129)


# Runs without the interpreter's variable. One line of JSON per variant and architecture.
COMPILE = """
import json, torch, triton
from triton.backends.compiler import GPUTarget
from plugins.aot.attention_variants import attention_variants
from plugins.aot.page_variants import draft_context_variant, rotate_and_store_variant

bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
verify = dict(dtype=bf16, page_dtype=bf16, head_dim=128)
jobs = [(90, v) for v in attention_variants(**verify, has_block=True, tiles=(64,))]
jobs += [(100, attention_variants(**verify, has_block=False, tiles=(64,))[0])]
chunks = attention_variants(**verify, has_block=False, tiles=(64,), chunk=8192)
jobs += [(90, chunks[0]), (100, chunks[1])]
jobs += [(103, attention_variants(dtype=bf16, page_dtype=fp8, head_dim=128, has_block=False, tiles=(16,))[0])]
uses = dict(has_norm=True, has_rope=True, stores_pages=True, has_limits=False)
jobs.append((90, rotate_and_store_variant(dtype=bf16, page_dtype=fp8, head_dim=128, **uses)))
jobs.append((103, draft_context_variant(dtype=bf16, page_dtype=bf16, head_dim=128, has_norm=True)))
for arch, variant in jobs:
    kernel = triton.compile(variant.source(), target=GPUTarget("cuda", arch, 32), options=variant.options)
    ptx = kernel.asm["ptx"]
    print(json.dumps({
        "arch": arch,
        "name": variant.name,
        "shared": kernel.metadata.shared,
        "num_parameters": ptx.split(".entry")[1].split(")")[0].count(".param"),
        "num_arguments": len(variant.signature),
        "async_copies": ptx.count("cp.async.cg.shared.global"),
        "cubin": len(kernel.asm["cubin"]),
    }))
"""


def test_variants_compile_for_every_architecture_without_a_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["arch"] for kernel in compiled} == {90, 100, 103}
    for kernel in compiled:
        assert kernel["shared"] <= SHARED_BYTES, kernel
        assert kernel["cubin"] > 0
        # Triton's two scratch pointers follow the declared arguments: what a C++ launcher relies on.
        assert kernel["num_parameters"] == kernel["num_arguments"] + 2, kernel
        if kernel["name"].startswith("attention_b"):
            assert kernel["async_copies"] > 0, "keys and values are not copied ahead"
