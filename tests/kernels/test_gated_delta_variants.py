"""The kernels of gated delta nets, in the sizes of Qwen3-Next and Qwen3.5: launched as declared, and no spills."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from dflash_trt.core.model.gated_delta import GatedDelta
from dflash_trt.kernels import gated_delta_launch
from plugins.aot.gated_delta_variants import gated_delta_variants
from tests.kernels.gated_delta_steps import Layer, Row
from tests.kernels.test_sampling_variants import assert_is_launched_as, recorded


def test_the_variants_are_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = GatedDelta(num_key_heads=2, num_value_heads=4, key_head_dim=40, value_head_dim=48, conv_size=4)
    layer = Layer.make(spec, torch.device("cpu"), num_records=3, dtype=torch.float16)
    variants = gated_delta_variants(layer.kernels.spec, torch.float16, num_requests=2, is_pooled=False)
    recorders = [recorded(monkeypatch, gated_delta_launch, variant.kernel.__name__) for variant in variants]
    rows = [Row(0, 0, 5), Row(1, 0, 2)]
    layer.run_kernels(rows)
    for variant, recorder in zip(variants, recorders, strict=True):
        assert_is_launched_as(variant, recorder, {"num_rows": 7, "num_requests": 2})
    for recorder in recorders:
        recorder.launches.clear()
    layer.run_kernels(rows[1:])
    assert [len(recorder.launches) for recorder in recorders] == [1, 1, 0, 1], "no prompts, no launch for them"


def test_in_order_there_is_one_kernel_for_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = GatedDelta(num_key_heads=2, num_value_heads=4, key_head_dim=40, value_head_dim=48, conv_size=4)
    layer = replace(Layer.make(spec, torch.device("cpu"), num_records=3, dtype=torch.float16), is_in_order=True)
    sizes = {"num_requests": 2, "is_pooled": False, "is_in_order": True}
    variants = gated_delta_variants(layer.kernels.spec, torch.float16, **sizes)
    recorders = [recorded(monkeypatch, gated_delta_launch, variant.kernel.__name__) for variant in variants]
    layer.run_kernels([Row(0, 0, 5), Row(1, 0, 2)])
    for variant, recorder in zip(variants, recorders, strict=True):
        assert_is_launched_as(variant, recorder, {"num_rows": 7, "num_requests": 2})
    assert [variant.kernel.__name__ for variant in variants][1] == "delta_in_order_kernel"


COMPILE = """
import json, sys
from plugins.aot.compile import compile_variant, prepare_compiler
prepare_compiler(sys.argv[1])
from dataclasses import replace
import torch
from dflash_trt.core.state_spec import Recurrent
from plugins.aot.gated_delta_variants import gated_delta_variants

sizes = dict(num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128, conv_size=4, num_records=16)
spec = Recurrent(name="state", dtype="bfloat16", **sizes)
wide = replace(spec, num_value_heads=48)  # of the 27B models
plan = [("90a", spec, False, ("convolve", "delta_verify", "delta_prompt", "finish")),
        ("100a", spec, True, ("delta_prompt",)), ("103a", spec, True, ("delta_verify",)),
        ("90a", wide, True, ("delta_verify",))]
for architecture, sizes, is_pooled, names in plan + [("90a", spec, False, ("delta_in_order",))]:
    is_in_order = names == ("delta_in_order",)
    for variant in gated_delta_variants(
        sizes, torch.bfloat16, num_requests=64, is_pooled=is_pooled, is_in_order=is_in_order
    ):
        name = variant.kernel.__name__.removesuffix("_kernel")
        if name in names:
            kernel = compile_variant(variant, architecture)
            print(json.dumps({"name": name, "stack": kernel.stack_bytes, "registers": kernel.num_registers,
                              "blocks": kernel.blocks_per_multiprocessor}))
"""
BLOCKS = {"convolve": 4, "delta_verify": 5, "delta_prompt": 2, "finish": 8}  # at least so many on a multiprocessor


def test_the_kernels_compile_without_spills_and_several_share_a_multiprocessor(tmp_path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert [kernel["name"] for kernel in kernels] == [
        *BLOCKS,
        "delta_prompt",
        "delta_verify",
        "delta_verify",
        "delta_in_order",
    ]
    for kernel in kernels:
        assert kernel["stack"] == 0 and kernel["blocks"] >= BLOCKS.get(kernel["name"], 4), kernel
