"""The kernels of drafters, in the sizes of Qwen3.8-27B-DFlash2 and Kimi's EAGLE-3: launched as declared, no spills."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dflash_trt.kernels import paged_rows_launch, selector, selector_launch
from dflash_trt.kernels.attention_plan import RequestTensors
from dflash_trt.kernels.selector_launch import TILE, select_tokens
from plugins.aot.variant import KernelVariant
from tests.kernels.drafter_variants import block_conv_variant, paged_rows_variants, selector_variants
from tests.kernels.test_attention_variants import Recorder
from tests.kernels.test_sampling_variants import assert_is_launched_as, recorded

SIZES = {"num_requests": 3, "num_rows": 12, "num_tiles": 2}


def assert_are_launched(variants: Sequence[KernelVariant], recorders: Sequence[Recorder]) -> None:
    for variant, recorder in zip(variants, recorders, strict=True):
        assert_is_launched_as(variant, recorder, SIZES)


def test_the_variants_of_dflash2_are_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, conv = torch.float16, block_conv_variant(torch.float16, hidden_size=1040, group_size=16, num_taps=2)
    recorder = recorded(monkeypatch, selector_launch, "block_conv_kernel")
    x, base = torch.zeros(12, 1040, dtype=dtype), torch.zeros(1, 2, 1040, dtype=dtype)
    selector_launch.block_conv(x, torch.zeros(12, 130, dtype=dtype), base, num_slots=4)
    assert_are_launched([conv], [recorder])
    variants = selector_variants(dtype, vocab_size=TILE + 16, top_k=16, rank=300)
    recorders = [recorded(monkeypatch, selector, f"{variant.name}_kernel") for variant in variants]
    book = torch.zeros(TILE + 16, 300, dtype=dtype)
    ids, requests = torch.zeros(3, dtype=torch.int32), (torch.zeros(3), torch.zeros(3, dtype=torch.int64))
    logits, hidden = torch.zeros(12, TILE + 16, dtype=dtype), torch.zeros(12, 300, dtype=dtype)
    select_tokens(logits, hidden, (book, book), (ids, *requests, ids, ids), top_k=16)
    assert_are_launched(variants, recorders)


def test_the_variants_of_rows_in_pages_are_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = paged_rows_variants(torch.float32, width=1040, max_requests=3)
    names = [variant.kernel.__name__ for variant in variants]
    recorders = [recorded(monkeypatch, paged_rows_launch, name) for name in names]
    lengths, table = torch.zeros(3, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32)
    requests = RequestTensors(token_offsets=torch.zeros(4, dtype=torch.int32), context_lens=lengths, page_table=table)
    pages = torch.zeros(2, 4, 1040)
    paged_rows_launch.previous_rows(torch.zeros(12, 1040), pages, requests, torch.zeros(12, dtype=torch.int32))
    paged_rows_launch.last_rows(pages, table, lengths)
    assert_are_launched(variants, recorders)


COMPILE = """
import json, sys
from plugins.aot.compile import compile_variant, prepare_compiler
prepare_compiler(sys.argv[1])
import torch
from plugins.aot.attention_variants import attention_variants
from plugins.aot.page_variants import previous_rows_variant
from tests.kernels.drafter_variants import block_conv_variant, paged_rows_variants, selector_variants

dtype = torch.bfloat16
variants = [
    block_conv_variant(dtype, hidden_size=5120, group_size=16, num_taps=2),
    *selector_variants(dtype, vocab_size=248320, top_k=16, rank=256),
    *paged_rows_variants(dtype, width=7168, max_requests=64),
    previous_rows_variant(dtype, width=7168, max_requests=64),
    *attention_variants(dtype=dtype, page_dtype=dtype, head_dim=128, has_block=True, page_size=32, first_key=1,
                        tiles=(16, 64))[::2],
    *attention_variants(dtype=dtype, page_dtype=dtype, head_dim=128, has_block=True, first_key=1, tiles=(16,))[:1],
]
names = ("walk", "tile_candidates", "attention_bfloat16_bfloat16_chain_block_d128_t16_r256",
         "previous_rows_bfloat16_v16_b1024_r64")
for architecture, chosen in (("90a", variants), ("100a", names), ("103a", names[:1])):
    for variant in variants:
        if variant in chosen or variant.name in chosen:
            kernel = compile_variant(variant, architecture)
            print(json.dumps({"name": variant.name, "stack": kernel.stack_bytes, "registers": kernel.num_registers,
                              "blocks": kernel.blocks_per_multiprocessor}))
"""


def test_the_kernels_compile_without_spills_and_several_share_a_multiprocessor(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == 10 + 5 + 1
    for kernel in kernels:
        assert kernel["stack"] == 0 and kernel["blocks"] >= (2 if "attention" in kernel["name"] else 4), kernel
