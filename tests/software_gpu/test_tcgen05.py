"""Tensor memory, tcgen05 and mbarrier of SM100: what they compute, and what is refused."""

import re
import shutil
from itertools import product

import numpy as np
import pytest
import torch

from software_gpu.ptx.library import PtxError
from tests.software_gpu import tcgen05_kernel as kernel

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler: the executor is built by one")

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
OPTIONS = [
    {"is_late": is_late, "finds_races": finds_races} for is_late, finds_races in product((True, False), repeat=2)
]


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


def small_integers(num_rows: int, k: int, seed: int) -> torch.Tensor:
    return torch.randint(-4, 5, (2, num_rows, k), generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (kernel.F16, torch.float16),
        (kernel.BF16, torch.bfloat16),
        (kernel.TF32, torch.float32),
        (kernel.E4M3, torch.float8_e4m3fn),
        (kernel.I8, torch.int8),
    ],
)
def test_products_are_the_matrices(kind: tuple[str, int], dtype: torch.dtype, options: dict[str, bool]) -> None:
    k = 32 // dtype.itemsize
    a, b = small_integers(128, k, 0), small_integers(16, k, 1)
    found = kernel.run(kernel.source(kind), as_bytes(a.to(dtype)), as_bytes(b.to(dtype)), **options)
    found = found.view(np.int32) if dtype == torch.int8 else found
    assert found.tolist() == torch.einsum("rmk,rnk->mn", a, b).tolist()


def test_blocks_of_four_bits_have_their_scales() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.integers(0, 256, (2, 128, 32), np.uint8), generator.integers(0, 256, (2, 16, 32), np.uint8)
    of_rows, of_columns = generator.uniform(0.1, 4, (128, 4)), generator.uniform(0.1, 4, (16, 4))
    codes = [torch.from_numpy(scales).to(torch.float8_e4m3fn) for scales in (of_rows, of_columns)]
    words = np.zeros((32, 5), np.uint32)
    words[:, :4] = as_bytes(codes[0]).view(np.uint32).reshape(4, 32).T
    words[:16, 4] = as_bytes(codes[1]).view(np.uint32).reshape(16)

    def numbers(packed: np.ndarray, scales: torch.Tensor) -> np.ndarray:
        values = np.stack((E2M1[packed & 15], E2M1[packed >> 4]), -1).reshape(*packed.shape[:2], 64)
        return values * scales.double().numpy().repeat(16, 1)

    found = kernel.run(kernel.source(kernel.NVFP4), a, b, words, finds_races=True)
    first, second = (numbers(a, codes[0])[i] @ numbers(b, codes[1])[i].T for i in (0, 1))
    assert found.tolist() == (first.astype(np.float32) + second).astype(np.float32).tolist()


def test_blocks_of_eight_bits_have_powers_of_two() -> None:
    a, b = small_integers(128, 32, 2), small_integers(16, 32, 3)
    of_rows, of_columns = np.arange(128) % 9 + 120, np.arange(16) % 5 + 125
    words = np.zeros((32, 5), np.uint32)
    words[:, :4] = of_rows.reshape(4, 32).T
    words[:16, 4] = of_columns
    codes = [as_bytes(matrix.to(torch.float8_e4m3fn)) for matrix in (a, b)]
    found = kernel.run(kernel.source(kernel.MXFP8), codes[0], codes[1], words, finds_races=True)
    unscaled = torch.einsum("rmk,rnk->mn", a, b).numpy()
    assert found.tolist() == (unscaled * 2.0 ** (of_rows[:, None] - 127) * 2.0 ** (of_columns - 127)).tolist()


SOURCE = kernel.source(kernel.NVFP4)
NOTICED = {
    "alloc and init": r"a race: |no mbarrier|that nobody has written",
    "wait::st": r"before tcgen05.st of warp \d has ended",
    "fence": r"without a fence.proxy.async",
    "stores": r"a race: the tensor core reads|that nobody has written|an mbarrier that never ends",
    "commit": r"wait for a phase of an mbarrier that never ends",
    "wait": r"before tcgen05.(mma of warp 0|ld of warp \d) has ended|a race: the tensor core reads",
    "wait::ld": r"before tcgen05.ld of warp \d has ended",
    "last barrier": r"a race: mbarrier.inval",
    "dealloc": r"ends without tcgen05.dealloc",
}
ROUND = ["fence", "stores", "commit", "wait", "wait::ld"]
LINES = ["alloc and init", "wait::st", *ROUND, *ROUND, "last barrier", "dealloc"]


def without(index: int) -> str:
    """The source without its synchronizing statement of this number."""
    found = list(re.finditer(r"^ *(\{[^{}]*\}|[^\n{}]*;)  // sync$", SOURCE, re.MULTILINE))
    assert len(found) == len(LINES)
    return SOURCE[: found[index].start()] + SOURCE[found[index].end() :]


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize("index", range(len(LINES)), ids=[f"{i}-{line}" for i, line in enumerate(LINES)])
def test_each_missing_synchronization_is_noticed(index: int, is_late: bool) -> None:
    a, b = np.ones((2, 128, 32), np.uint8), np.ones((2, 16, 32), np.uint8)
    with pytest.raises(PtxError, match=NOTICED[LINES[index]]):
        kernel.run(without(index), a, b, finds_races=True, is_late=is_late)


MMA = "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X [%r9+0]"
REPLACED = {
    "outside of every allocation": ("[%r11+0];", "[%r11+64];"),
    "which has lanes from": ("shl.b32 %r10, %r3, 21;", "mov.b32 %r10, 0;"),
    "a race: the tensor core reads": ("[%r2+4616], 0;", "[%r2+4616], 1;"),  # a wait for the phase before
    "never set": ("tcgen05.st.sync.aligned.32x32b.x1.b32 [%r11+36], {%r35};", ""),
    "of 32 columns at": ("b32 %r9, 64;", "b32 %r9, 32;"),
    "tcgen05.alloc of 48 columns": ("[%r2+4608], 64;", "[%r2+4608], 48;"),
    "without its fixed bits": ("70437464178688", "68719476736"),
    "more than one lane": (f"@%p2 {MMA}", f"@%p1 {MMA}"),
    "more arrivals": (
        "bar.sync 0;  // sync\n    ld.shared",
        "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r2+4616];\n    ld.shared",
    ),
    "holds an mbarrier": ("ld.shared.b32 %r9, [%r2+4608];", "ld.shared.b32 %r9, [%r2+4616];"),
    "no such instruction": (MMA, MMA.replace("cta_group::1", "cta_group::2")),
}


@pytest.mark.parametrize("words", REPLACED)
def test_what_a_gpu_leaves_undefined_is_refused(words: str) -> None:
    old, new = REPLACED[words]
    assert old in SOURCE
    a, b = np.ones((2, 128, 32), np.uint8), np.ones((2, 16, 32), np.uint8)
    with pytest.raises(PtxError, match=words):
        kernel.run(SOURCE.replace(old, new), a, b, finds_races=True)


def test_the_largest_of_three_numbers() -> None:
    """PTX ISA: max takes three on SM100. The second is a NaN, and is left out."""
    body = (
        "mov.b32 %r40, 0f3f800000; mov.b32 %r41, 0f7fc00000; mov.b32 %r42, 0f40000000; max.f32 %r40, %r40, %r41, %r42;"
    )
    source = kernel.source(kernel.BF16).replace("    st.global.v4.b32 [%rd4], {", body + "st.global.v4.b32 [%rd4], {")
    found = kernel.run(source, np.zeros((2, 128, 32), np.uint8), np.zeros((2, 16, 32), np.uint8))
    assert set(found[:, 0].tolist()) == {2.0}
