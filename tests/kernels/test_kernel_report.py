"""Bars of the compiled kernels on sm_90a: what an instruction more in the loop, or before it, would cost every step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.kernel_report import Sass

REPORT = """
import json, sys
import torch
from plugins.aot.attention_variants import attention_variants
from plugins.aot.compile import compile_variant, prepare_compiler
from scripts.kernel_report import disassemble

prepare_compiler(sys.argv[1])
sizes = dict(dtype=torch.bfloat16, head_dim=128, has_block=False, page_size=32)
variants = attention_variants(**sizes, page_dtype=torch.float8_e4m3fn, tiles=(64,))
variants += attention_variants(**sizes, page_dtype=torch.bfloat16, tiles=(32,))[:1]
found = {}
for variant in variants:
    kernel = compile_variant(variant, "90a")
    found[variant.name] = vars(disassemble(kernel.cubin).inner_loop()) | {"stack": kernel.stack_bytes}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    cache: Path = tmp_path_factory.mktemp("cache")
    command = [sys.executable, "-c", REPORT, str(cache)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    kernels: dict[str, dict[str, int]] = json.loads(done.stdout)
    return kernels


def test_fp8_pages_take_at_most_600_instructions_for_64_keys(found: dict[str, dict[str, int]]) -> None:
    kernel = found["attention_bfloat16_float8_e4m3fn_step_d128_t64_r256"]
    assert kernel["num_instructions"] <= 600  # 1305 through bfloat16, in tiles of 32 rows
    assert kernel["num_prologue"] <= 340  # a third of them load the queries and make float16 of them
    assert kernel["stack"] == 0


def test_a_program_reaches_its_keys_within_200_instructions(found: dict[str, dict[str, int]]) -> None:
    kernel = found["attention_bfloat16_bfloat16_step_d128_t32_r256"]
    assert kernel["num_prologue"] <= 200
    assert kernel["stack"] == 0


def test_the_reduction_waits_at_most_twice_for_a_split(found: dict[str, dict[str, int]]) -> None:
    kernel = found["attention_reduction_bfloat16_step_d128_t64_r256"]
    assert kernel["num_barriers"] <= 2
    assert kernel["num_instructions"] <= 120


SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   LDGSTS.E.BYPASS.128 [R7], desc[UR4][R2.64], P0 ;
.L_x_1:
        /*0020*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0030*/                   LDGSTS.E.BYPASS.128 [R7], desc[UR4][R2.64], P0 ;
        /*0040*/              @!P0 BRA `(.L_x_2) ;
        /*0050*/               @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0060*/                   EXIT ;
.L_x_3:
        /*0070*/                   BRA `(.L_x_3) ;
"""


def test_the_inner_loop_is_the_one_that_copies() -> None:
    loop = Sass.parse(SASS).inner_loop()
    assert loop is not None
    assert (loop.num_prologue, loop.num_instructions, loop.num_barriers) == (1, 4, 1)


def test_a_kernel_that_copies_nothing_ahead_has_no_inner_loop() -> None:
    assert Sass.parse(SASS.replace("LDGSTS", "LDG")).inner_loop() is None
