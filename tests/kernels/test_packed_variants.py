"""Routing, experts and packed layers compile for every architecture, and the right units multiply."""

import json
import os
import subprocess
import sys

COMPILE = r"""
import json, re, sys
from plugins.aot.compile import compile_variant, prepare_compiler
prepare_compiler(sys.argv[1])
from tests.kernels.packed_variants import (
    experts_variants, int8_experts_variants, int8_variant, linear_variant, routing_variant
)

hopper = [
    routing_variant(128, 4),
    routing_variant(256, 8, groups=(8, 4)),
    *experts_variants("mxfp4", tokens=16),
    *experts_variants("fp8", tokens=64, has_input_scale=True),
    experts_variants("fp8_block", tokens=64)[1],
    linear_variant("nvfp4", num_rows=64),
    linear_variant("fp8", num_rows=16, has_input_scale=True),
]
blackwell = [
    *experts_variants("mxfp4", tokens=16),
    *experts_variants("nvfp4", tokens=16, has_input_scale=True),
    linear_variant("nvfp4", num_rows=64, has_input_scale=True),
]
int8 = [int8_variant(8), int8_variant(4096), *int8_experts_variants(16), *int8_experts_variants(64)]
assert len(int8) == 6
plan = [("90a", hopper), ("100a", blackwell), ("103a", blackwell[3:4]), ("86", [linear_variant("nvfp4", num_rows=8)])]
plan += [(arch, int8) for arch in ("86", "90a", "100a", "103a", "120a")]
for arch, variants in plan:
    for variant in variants:
        compiled = compile_variant(variant, arch)
        units = sorted(set(re.findall("wgmma.mma_async|mma.sync|kind::[a-z0-9]+", compiled.ptx)))
        waits = sorted(set(map(int, re.findall(r"wgmma.wait_group.sync.aligned\s+(\d+)", compiled.ptx))))
        print(json.dumps({"arch": arch, "name": variant.name, "stack": compiled.stack_bytes,
                          "shared": compiled.shared_bytes, "units": units, "waits": waits}))
"""


def test_the_kernels_compile_without_spills_and_use_the_tensor_cores_of_each_architecture(tmp_path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-c", COMPILE, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["arch"] for row in rows} == {"86", "90a", "100a", "103a", "120a"}
    for row in rows:
        is_int8 = "int8" in row["name"]
        assert row["stack"] == 0, row
        assert row["shared"] <= (227 if is_int8 and row["arch"] in ("90a", "100a") else 99) * 1024, row
        assert row["waits"] in ([], [0]), "a product may still read registers that the next round writes"
        products = {"86": ["mma.sync"], "90a": ["wgmma.mma_async"]}.get(row["arch"], ["kind::f16"])
        if row["arch"] in ("100a", "103a") and "nvfp4_quantized" in row["name"]:
            products = ["kind::mxf4nvf4"]  # FP4 operands with their block scales
        if is_int8 and row["arch"] != "90a":  # SM103 has no kind::i8
            products = ["kind::i8"] if row["arch"] == "100a" else ["mma.sync"]
        assert row["units"] == ([] if "routing" in row["name"] else products), row
