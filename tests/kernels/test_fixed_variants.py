"""The kernels of `--deterministic`, in the sizes that it gives them, and attention's codes compile everywhere."""

import json
import os
import subprocess
import sys

COMPILE = """
import json, re, sys
from plugins.aot.compile import _registers_and_stack, prepare_compiler
prepare_compiler(sys.argv[1])
import triton
from triton.backends.compiler import GPUTarget
from tests.kernels.fixed_variants import codes_variant, fixed_variants

linears, attention = [codes_variant(), *fixed_variants()[:2]], fixed_variants()[2:]
for arch, variants in ((90, linears + attention), (100, linears + attention[1:]), (103, linears), (86, linears[1:2])):
    for variant in variants:
        compiled = triton.compile(variant.source(), target=GPUTarget("cuda", arch, 32), options=variant.options)
        registers, stack = _registers_and_stack(compiled.asm["cubin"])
        units = sorted(set(re.findall("wgmma.mma_async|mma.sync|kind::[a-z0-9]+", compiled.asm["ptx"])))
        print(json.dumps({"arch": arch, "name": variant.name, "stack": stack, "units": units,
                          "shared": compiled.metadata.shared}))
"""
UNITS = {86: "mma.sync", 90: "wgmma.mma_async", 100: "kind::f16", 103: "kind::f16"}


def test_the_kernels_compile_without_spills_and_use_the_tensor_cores_of_each_architecture(tmp_path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-c", COMPILE, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["arch"] for row in rows} == set(UNITS)
    for row in rows:
        if "codes" in row["name"]:
            assert row["stack"] == 0 and row["units"] == [], row
            continue
        unit = UNITS[row["arch"]]
        if unit == "kind::f16" and "fp8_quantized" in row["name"]:
            unit = "kind::f8f6f4"
        assert row["stack"] == 0 and row["units"] == [unit], row
        assert "attention" in row["name"] or row["shared"] <= 99 * 1024, row
