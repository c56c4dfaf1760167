"""The kernels of latent attention in the sizes of Kimi-K2 and DeepSeek-V3: launched as declared, and compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dflash_trt.backends.cuda.latent_attention import shape_of
from dflash_trt.kernels import attention_launch
from dflash_trt.kernels import latent_attention_launch as launch
from tests.kernels.latent_steps import Step, make_tensors, mla_of, run_kernels
from tests.kernels.latent_variants import latent_variants
from tests.kernels.test_sampling_variants import assert_is_launched_as, recorded


@pytest.mark.parametrize("k_scale", [None, 0.02])
def test_the_variants_are_what_is_launched(monkeypatch: pytest.MonkeyPatch, k_scale: float | None) -> None:
    mla = mla_of(40, latent_dim=48, nope_dim=16, rope_dim=16)  # strides in multiples of 16
    step = Step(rows=(3, 70), contexts=(4, 0), mla=mla, page_size=32, dtype=torch.float16, k_scale=k_scale)
    page_dtype = torch.float16 if k_scale is None else torch.float8_e4m3fn
    variants = latent_variants(
        shape_of(step.mla), torch.float16, page_dtype=page_dtype, num_requests=2, nope_dim=16, value_dim=9
    )
    modules = [launch, launch, attention_launch, launch]
    launched = zip(modules, variants, strict=True)
    recorders = [recorded(monkeypatch, module, f"{variant.name}_kernel") for module, variant in launched]
    run_kernels(step, make_tensors(step), torch.device("cpu"))
    groups = 1 if k_scale is None else 2  # of 40 and of 20 heads
    tiles = 73 + 2  # a row each, and one more of each request that has none
    sizes = {"num_requests": 2, "num_rows": 73, "groups": groups, "tile_capacity": tiles, "work_slots": 3 // groups}
    for variant, recorder in zip(variants, recorders, strict=True):
        assert_is_launched_as(variant, recorder, sizes)


COMPILE = """
import json, sys
from plugins.aot.compile import compile_variant, prepare_compiler
prepare_compiler(sys.argv[1])
import torch
from dflash_trt.kernels.latent_rules import LatentShape
from scripts.kernel_report import disassemble
from plugins.aot.latent_variants import LatentKernels
from tests.kernels.latent_variants import latent_variants

def spills_in_loops(sass):
    return sum("LDL" in line or "STL" in line for loop in sass.loops() for line in loop)

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SHAPE = LatentShape(num_heads=8, latent_dim=512, rope_dim=64)

def report(variant, architecture):
    kernel = compile_variant(variant, architecture)
    spills = spills_in_loops(disassemble(kernel.cubin)) if kernel.stack_bytes else 0
    print(json.dumps({"name": variant.name, "tile": variant.constexprs.get("TILE"), "fits": kernel.fits,
                      "stack": kernel.stack_bytes, "shared": kernel.shared_bytes, "spills_in_loops": spills}))

for architecture, page_dtype, page_size, names in (
    ("90a", BF16, 32, ("store_latents", "latent_attention", "attention_reduction", "latent_chunk")),
    ("90a", BF16, 16, ("latent_attention",)),
    ("90a", FP8, 32, ("store_latents", "latent_attention")),
    ("100a", BF16, 64, ("latent_attention", "latent_chunk")),
    ("103a", FP8, 32, ("latent_attention",)),
):
    for variant in latent_variants(SHAPE, BF16, page_dtype=page_dtype, page_size=page_size):
        if variant.name in names:
            report(variant, architecture)
SIZES = dict(latent_dim=512, rope_dim=64, page_size=32, max_requests=64)
KIMI, GLM_5 = dict(nope_dim=128, value_dim=128), dict(nope_dim=192, value_dim=256)
for architecture, page_dtype, heads, names in (
    ("90a", "bfloat16", KIMI, ("write_latents", "attention_plan", "latent_")),
    ("90a", "bfloat16", GLM_5, ("latent_kv", "latent_chunk")),
    ("100a", "float8_e4m3fn", KIMI, ("write_latents", "latent_attention", "latent_kv", "latent_chunk")),
    ("100a", "bfloat16", GLM_5, ("latent_chunk",)),
    ("103a", "bfloat16", KIMI, ("latent_kv", "latent_chunk")),
):
    for variant in LatentKernels(page_dtype=page_dtype, **SIZES, **heads).variants("bfloat16"):
        if variant.name.startswith(names):
            report(variant, architecture)
"""
# Bytes of a stack that holds registers which sm_90a spills before the loop and reads behind it: one, and those of a
# plugin, whose pages are no parameter.
FEW_REGISTERS = {False: 8, True: 80}


def test_the_kernels_compile_without_spills_in_the_loop(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    attention = [kernel for kernel in kernels if kernel["name"].startswith("latent_attention")]
    assert [kernel["tile"] for kernel in attention] == [64, 64, 32, 64, 32, 64, 32]  # the last two of a plugin
    assert len(kernels) == 5 + 5 + 7 + 2 + 4 + 1 + 2
    for kernel in kernels:
        allowed = (
            FEW_REGISTERS[kernel["name"].endswith("pooled")] if kernel in attention and kernel["tile"] == 64 else 0
        )
        assert kernel["stack"] <= allowed and kernel["spills_in_loops"] == 0 and kernel["fits"], kernel
    assert max(kernel["shared"] for kernel in kernels) > 170 << 10, "the queries, and three blocks of latents"
