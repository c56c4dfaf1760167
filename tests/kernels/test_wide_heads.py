"""Attention over heads of more than 256: tiles in parts, whose compiled code keeps its sums in registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dflash_trt.kernels.attention_launch import attention_constants
from dflash_trt.kernels.attention_plan import TILES, fixed_tile, fixed_tiles, num_parts, tiles_of
from plugins.aot.attention_variants import attention_variants

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn

COMPILE = """
import json, sys, torch
from plugins.aot.compile import DEFAULT_ARCHITECTURES, compile_variant, prepare_compiler
prepare_compiler(sys.argv[1])
from plugins.aot.attention_variants import attention_variants
from plugins.aot.page_variants import rotate_and_store_variant
bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
sizes = dict(dtype=bf16, head_dim=512, has_block=False)
largest, _ = attention_variants(**sizes, page_dtype=bf16, tiles=(64,), page_size=32)
of_fp8, _ = attention_variants(**sizes, page_dtype=fp8, tiles=(32,))
uses = dict(has_norm=True, has_rope=True, stores_pages=True, has_limits=False, norms_v=True)
stored = rotate_and_store_variant(dtype=bf16, page_dtype=fp8, head_dim=512, **uses)
jobs = [(largest, architecture) for architecture in DEFAULT_ARCHITECTURES]
for variant, architecture in [*jobs, (of_fp8, "90a"), (stored, "90a")]:
    kernel = compile_variant(variant, architecture)
    print(json.dumps([variant.name, architecture, kernel.stack_bytes, kernel.fits]))
"""


def test_no_kernel_for_heads_of_512_spills_registers(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(compiled) == 5 and all(fits for *_, fits in compiled)
    assert {name: stack for name, _, stack, _ in compiled if stack} == {}


def test_tiles_of_wide_heads_are_small_and_those_of_fp8_pages_smaller() -> None:
    def tiles(head_dim: int, dtype: torch.dtype, page_dtype: torch.dtype) -> tuple[int, ...]:
        return tiles_of(head_dim=head_dim, dtype=dtype, page_dtype=page_dtype)

    assert tiles(256, BF16, BF16) == TILES
    assert tiles(256, BF16, FP8) == (64, 128)
    assert tiles(512, BF16, BF16) == (16, 32, 64)
    assert tiles(512, BF16, FP8) == (16, 32)
    assert tiles(512, torch.float32, torch.float32) == (16,)
    for page_dtype in (BF16, FP8):
        assert fixed_tile(8, tiles(512, BF16, page_dtype)) in fixed_tiles(8, 512)


@pytest.mark.parametrize(("head_dim", "parts"), [(256, [1, 1, 1, 1]), (272, [1, 2, 2, 2])])
def test_programs_share_a_tile_of_wide_heads_but_for_the_smallest(head_dim: int, parts: list[int]) -> None:
    assert [num_parts(tile=tile, head_dim=head_dim) for tile in TILES] == parts


def test_what_is_compiled_for_a_tile_has_its_parts_in_constants_and_grid() -> None:
    attention, reduction = attention_variants(dtype=BF16, page_dtype=BF16, head_dim=512, has_block=False, tiles=(64,))
    assert attention.constexprs["PARTS"] == 2 and attention.grid[0] == "kv_heads * 2"
    assert "PARTS" not in reduction.constexprs and reduction.grid[0] == "kv_heads"
    assert attention.constexprs.items() >= attention_constants(head_dim=512).items()
