"""Sums of ranks through memory that they share: the kernel and its flags, in processes under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from dflash_trt.kernels.one_shot_launch import one_shot_sum
from tests.kernels.peers_on_cpu import HIDDEN, ROWS, addend, map_peers, run, start

on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks share a file here, not GPU memory")


@on_a_cpu
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_rank_gets_the_same_bits_of_every_sum(tmp_path: Path, num_ranks: int) -> None:
    path = tmp_path / "memory"
    others = [start(rank, num_ranks, path) for rank in range(1, num_ranks)]
    try:
        found = run(0, num_ranks, path)
        assert [other.wait(60) for other in others] == [0] * len(others)
    finally:
        for other in others:
            other.kill()
    for rank in range(1, num_ranks):
        assert all(map(torch.equal, torch.load(f"{path}.{rank}"), found))
    expected = []
    for call in range(len(ROWS)):
        total = sum(addend(rank, call) for rank in range(num_ranks))
        if call % 2:
            total = total + 1
            expected += [total, F.rms_norm(total, (HIDDEN,), torch.arange(HIDDEN).float(), 1e-6)]
        else:
            expected.append(total)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert all(torch.equal(found[i], expected[i]) for i in (0, 1, 3, 4, 6)), "sums, in the order of the ranks"
    assert not any(torch.equal(each, addend(0, 0)) for each in found)


@on_a_cpu
def test_a_rank_whose_peer_is_gone_goes_on_when_it_is_told(tmp_path: Path) -> None:
    peers = map_peers(tmp_path / "memory", 0, 2)
    peers.abort.fill_(1)
    assert one_shot_sum(torch.ones(2, HIDDEN), peers).shape == (2, HIDDEN)  # nobody else has called


def test_long_sums_and_other_widths_go_another_way(tmp_path: Path) -> None:
    peers = map_peers(tmp_path / "memory", 0, 2)
    assert peers.takes(torch.ones(peers.num_rows, HIDDEN))
    assert not peers.takes(torch.ones(peers.num_rows + 1, HIDDEN))
    assert not peers.takes(torch.ones(2, HIDDEN + 1))
    assert not peers.takes(torch.ones(2, HIDDEN, dtype=torch.bfloat16))


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dflash_trt.kernels.one_shot import one_shot_kernel

types = {name: "*bf16" for name in ("x", "residual", "weight", "total", "normed")}
types |= {"block_scale": "*bf16", "scale": "*fp32", "buffers": "*i64", "flags": "*i64", "abort": "*i32"}
types |= {"num_rows": "i32", "eps": "fp32", "hidden_size": "i32"}
constants = {"rank": 3, "RANKS": 8, "BLOCK": 4096, "HAS_NORM": True, "RESULT": 0}
source = ASTSource(fn=one_shot_kernel, signature=types | dict.fromkeys(constants, "constexpr"), constexprs=constants)
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
print(kernel.asm["ptx"])
"""


def test_flags_are_exchanged_with_the_whole_system_and_in_order() -> None:
    """In a process of its own: this one interprets kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-c", COMPILE]
    ptx = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
    exchanges = [line.split() for line in ptx.splitlines() if "atom." in line and ".cas." in line]
    assert len(exchanges) >= 4 * 7
    assert {word for words in exchanges for word in words if word.startswith("atom.")} == {
        "atom.global.acq_rel.sys.cas.b32"
    }
