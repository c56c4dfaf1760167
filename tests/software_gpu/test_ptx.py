"""The executor of PTX: what instructions compute, and what it refuses."""

import shutil
import struct
from typing import Any

import numpy as np
import pytest

from software_gpu.ptx.library import PtxError, PtxKernel

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler: the executor is built by one")

HEADER = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 memory[];
.visible .entry k(.param .u64 .ptr .global .align 16 k_param_0)
.reqntid 64
{
    .reg .pred %p<9>;
    .reg .b16 %rs<9>;
    .reg .b32 %r<40>;
    .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [k_param_0];
    mov.u32 %r1, %tid.x;
    mov.b32 %r2, memory;
    shl.b32 %r3, %r1, 2;
    add.s32 %r4, %r2, %r3;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
"""
STORE = "st.global.b32 [%rd3], %r9;\n ret;\n}"
THREADS = np.arange(64)


def run(body: str, *, num_words: int = 64, num_threads: int = 64, **options: Any) -> np.ndarray:
    """What 64 threads leave in a buffer of uint32, each at its own place."""
    out = np.zeros(num_words, np.uint32)
    address = out.ctypes.data
    PtxKernel(HEADER + body + STORE, "k").launch(
        (1, 1, 1),
        num_threads,
        512,
        struct.pack("<Q", address),
        allocations=[(address, address + out.nbytes)],
        **options,
    )
    return out


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("mad.lo.s32 %r9, %r1, %r1, 7;", THREADS**2 + 7),
        ("bfe.s32 %r9, %r1, 2, 1;", np.where(THREADS >> 2 & 1, 2**32 - 1, 0)),
        ("shfl.sync.bfly.b32 %r9, %r1, 1, 31, -1;", THREADS ^ 1),
        ("setp.lt.u32 %p1, %r1, 8; selp.b32 %r9, 5, %r1, %p1;", np.where(THREADS < 8, 5, THREADS)),
        ("mov.b64 %rd4, {%r1, %r3}; mov.b64 {_, %r9}, %rd4;", THREADS * 4),
        ("mul.wide.u32 %rd4, %r1, -65535; cvt.s64.s32 %rd5, %rd4; cvt.u32.u64 %r9, %rd5;", THREADS * -65535 % 2**32),
        ("{ .reg .b32 %t; add.s32 %t, %r1, 1; mov.b32 %r9, %t; }", THREADS + 1),
        ("cvt.rn.f32.u32 %r5, %r1; cvt.rzi.s32.f32 %r9, %r5;", THREADS),
        (
            "mov.b32 %r9, 0; setp.ge.u32 %p1, %r1, 40; @%p1 bra $END; L: add.s32 %r9, %r9, 2;"
            "setp.lt.u32 %p2, %r9, %r1; @%p2 bra L; $END:",
            np.where(THREADS >= 40, 0, np.maximum(2, THREADS + THREADS % 2)),
        ),
        # 3.1 is nearer to the bfloat16 0x4046 than to 0x4047; its FP8 is 3.0
        ("mov.b32 %r5, 0f40466666; cvt.rn.bf16x2.f32 %r9, %r5, %r5;", np.full(64, 0x40464046)),
        (
            "mov.b32 %r5, 0f40466666; cvt.rn.satfinite.e4m3x2.f32 %rs1, %r5, %r5; cvt.u32.u16 %r9, %rs1;",
            np.full(64, 0x4444),
        ),
        ("st.shared.b32 [%r4], %r1; bar.sync 0; xor.b32 %r5, %r4, 252; ld.shared.b32 %r9, [%r5];", 63 - THREADS),
        ("cp.async.ca.shared.global [%r4], [%rd3], 4; cp.async.wait_all; ld.shared.b32 %r9, [%r4];", 0 * THREADS),
    ],
)
def test_instructions_compute_what_the_isa_says(body: str, expected: np.ndarray) -> None:
    for options in ({}, {"finds_races": True}, {"is_late": False}):
        assert run(body, **options).tolist() == expected.tolist()


# Compiled code reads what nobody has set where it needs no value.
UNSET_BUT_UNUSED = [
    "setp.lt.u32 %p1, %r1, 32; @%p1 mov.b32 %r5, 1; add.s32 %r6, %r5, 1; selp.b32 %r9, %r6, 2, %p1;",
    "setp.ge.u32 %p1, %r1, 16; setp.lt.u32 %p2, %r1, 1; @%p1 setp.lt.u32 %p3, %r1, 0; and.pred %p4, %p3, %p2;"
    "and.pred %p5, %p1, %p4; selp.b32 %r9, 1, 2, %p5;",
    "setp.lt.u32 %p1, %r1, 32; @%p1 mov.b32 %r5, 2; shfl.sync.bfly.b32 %r6, %r5, 1, 31, -1;"
    "mov.b32 %r9, 2; @%p1 mov.b32 %r9, %r6;",
]


@pytest.mark.parametrize("body", UNSET_BUT_UNUSED)
def test_what_nobody_has_set_may_be_read_and_not_used(body: str) -> None:
    assert set(run(body, finds_races=True).tolist()) == {2}


REFUSED = {
    "outside of every allocation": ("mov.b32 %r9, 1;", {"num_words": 63}),
    "misaligned address": ("ld.global.b32 %r9, [%rd3+2];", {}),
    "never set, of lanes 0000ffff": (
        "setp.ge.u32 %p1, %r1, 16; @%p1 mov.b32 %r5, 0; st.shared.b32 [%r4], %r5; ld.shared.b32 %r6, [%r4];"
        "shfl.sync.bfly.b32 %r9, %r6, 1, 31, -1;",
        {"finds_races": True},
    ),
    "outside of the 512 of shared memory": ("ld.shared.b32 %r9, [%r4+400];", {}),
    "a register that was never set": ("setp.lt.u32 %p1, %r1, 8; @%p1 mov.b32 %r9, 1;", {}),
    "that nobody has written": ("ld.shared.b32 %r9, [%r4];", {"finds_races": True}),
    "a race: a write": (
        "st.shared.b32 [%r4], %r1; bar.sync 0; st.shared.b32 [%r4], %r3; xor.b32 %r5, %r4, 252;"
        "ld.shared.b32 %r9, [%r5];",
        {"finds_races": True},
    ),
    "reached by a part of a warp": ("setp.lt.u32 %p1, %r1, 8; @%p1 bra L; bar.sync 0; L: mov.b32 %r9, 1;", {}),
    "wait at a barrier that the others never reach": (
        "setp.lt.u32 %p1, %r1, 32; @%p1 bra L; bar.sync 0; L: mov.b32 %r9, 1;",
        {},
    ),
    "shfl.sync reads a lane": (
        "setp.lt.u32 %p1, %r1, 1; mov.b32 %r9, 1; @%p1 shfl.sync.bfly.b32 %r9, %r1, 1, 31, 1;",
        {},
    ),
    "no such instruction": ("tcgen05.shift.cta_group::1.down [%r2]; mov.b32 %r9, 1;", {}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_a_gpu_leaves_undefined_is_refused(words: str) -> None:
    body, options = REFUSED[words]
    with pytest.raises(PtxError, match=words):
        run(body, **options)


def test_a_copy_without_a_wait_arrives_too_late_and_that_is_seen() -> None:
    body = "cp.async.ca.shared.global [%r4], [%rd3], 4; ld.shared.b32 %r9, [%r4];"
    with pytest.raises(PtxError, match="that nobody has written"):
        run(body, finds_races=True)
    assert run(body, is_late=False).tolist() == [0] * 64
