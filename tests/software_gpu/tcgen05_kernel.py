"""A kernel of one product of tcgen05: D[128, 16] = A[128, K] B[16, K]^T, added up over two rounds of other matrices.

128 threads. A row of A and of B has 32 bytes, whatever its elements are. Synchronizing lines end with `// sync`.
"""

import struct
from typing import Any, Final

import numpy as np

from software_gpu.ptx.library import PtxKernel

NUM_ROWS: Final = 128
NUM_COLUMNS: Final = 16
SHARED_BYTES: Final = 4624  # A, B, the address of tensor memory, an mbarrier

# By kind: bits of the instruction descriptor beside the shape (PTX ISA, "Instruction descriptor").
F16: Final = ("kind::f16", 1 << 4 | 8 << 24)
BF16: Final = ("kind::f16", 1 << 4 | 1 << 7 | 1 << 10 | 8 << 24)
TF32: Final = ("kind::tf32", 1 << 4 | 2 << 7 | 2 << 10 | 8 << 24)
E4M3: Final = ("kind::f8f6f4", 1 << 4 | 8 << 24)
I8: Final = ("kind::i8", 2 << 4 | 1 << 7 | 1 << 10 | 8 << 24)
NVFP4: Final = ("kind::mxf4nvf4.block_scale.scale_vec::4X", 1 << 7 | 1 << 10 | 1 << 27)
MXFP8: Final = ("kind::mxf8f6f4.block_scale.scale_vec::1X", 1 << 23 | 1 << 27)

_HEAD = """
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 16 .b8 memory[];
.visible .entry k(.param .u64 k_param_0, .param .u64 k_param_1, .param .u64 k_param_2, .param .u64 k_param_3)
.reqntid 128
{
    .reg .pred %p<9>;
    .reg .b32 %r<60>;
    .reg .b64 %rd<19>;
    ld.param.b64 %rd1, [k_param_0];
    ld.param.b64 %rd2, [k_param_1];
    ld.param.b64 %rd3, [k_param_2];
    ld.param.b64 %rd4, [k_param_3];
    mov.u32 %r1, %tid.x;
    mov.b32 %r2, memory;
    shr.u32 %r3, %r1, 5;
    setp.eq.s32 %p1, %r3, 0;
    setp.eq.s32 %p2, %r1, 0;
    setp.lt.u32 %p3, %r1, 16;
    // rows of 16 bytes, by 8: PTX ISA, "Canonical Layouts", K-major without swizzling
    shr.u32 %r4, %r1, 3;
    and.b32 %r5, %r1, 7;
    shl.b32 %r6, %r4, 8;
    shl.b32 %r7, %r5, 4;
    add.s32 %r8, %r6, %r7;
    add.s32 %r8, %r8, %r2;
    mul.wide.u32 %rd5, %r1, 32;
    add.s64 %rd1, %rd1, %rd5;
    add.s64 %rd2, %rd2, %rd5;
    mul.wide.u32 %rd6, %r1, 64;
    add.s64 %rd4, %rd4, %rd6;
    cvt.u64.u32 %rd7, %r2;
    shr.u64 %rd8, %rd7, 4;
    or.b64 %rd8, %rd8, 70437464178688;  // 128 bytes between columns, 256 between rows
    add.s64 %rd9, %rd8, 256;
    @%p2 mbarrier.init.shared::cta.b64 [%r2+4616], 1;
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+4608], 64;
    bar.sync 0;  // sync
    ld.shared.b32 %r9, [%r2+4608];
    shl.b32 %r10, %r3, 21;
    add.s32 %r11, %r9, %r10;
"""
# Each quarter of the lanes has the scales of all rows, 32 in a column, and those of B's columns.
_SCALES = """
    and.b32 %r30, %r1, 31;
    mul.wide.u32 %rd10, %r30, 20;
    add.s64 %rd3, %rd3, %rd10;
    ld.global.b32 %r31, [%rd3];
    ld.global.b32 %r32, [%rd3+4];
    ld.global.b32 %r33, [%rd3+8];
    ld.global.b32 %r34, [%rd3+12];
    ld.global.b32 %r35, [%rd3+16];
    tcgen05.st.sync.aligned.32x32b.x4.b32 [%r11+32], {{%r31, %r32, %r33, %r34}};
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r11+36], {{%r35}};
    tcgen05.wait::st.sync.aligned;  // sync
"""
_ROUND = """
    ld.global.v4.b32 {{%r12, %r13, %r14, %r15}}, [%rd1+{a}];
    ld.global.v4.b32 {{%r16, %r17, %r18, %r19}}, [%rd1+{a_end}];
    st.shared.v4.b32 [%r8], {{%r12, %r13, %r14, %r15}};
    st.shared.v4.b32 [%r8+128], {{%r16, %r17, %r18, %r19}};
    @%p3 ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%rd2+{b}];
    @%p3 ld.global.v4.b32 {{%r24, %r25, %r26, %r27}}, [%rd2+{b_end}];
    @%p3 st.shared.v4.b32 [%r8+4096], {{%r20, %r21, %r22, %r23}};
    @%p3 st.shared.v4.b32 [%r8+4224], {{%r24, %r25, %r26, %r27}};
    fence.proxy.async.shared::cta;  // sync
    bar.sync 0;  // sync
    setp.ne.s32 %p4, {index}, 0;
    @%p2 tcgen05.mma.cta_group::1.{kind} [%r9+0], %rd8, %rd9, {descriptor}, {scales} %p4;
    @%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2+4616];  // sync
    {{
        .reg .pred complete;
        again: mbarrier.try_wait.parity.shared::cta.b64 complete, [%r2+4616], {index};
        @!complete bra.uni again;
    }}  // sync
    tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{registers}}}, [%r11+0];
    tcgen05.wait::ld.sync.aligned;  // sync
"""
_TAIL = """
    st.global.v4.b32 [%rd4], {%r40, %r41, %r42, %r43};
    st.global.v4.b32 [%rd4+16], {%r44, %r45, %r46, %r47};
    st.global.v4.b32 [%rd4+32], {%r48, %r49, %r50, %r51};
    st.global.v4.b32 [%rd4+48], {%r52, %r53, %r54, %r55};
    bar.sync 0;  // sync
    @%p2 mbarrier.inval.shared::cta.b64 [%r2+4616];
    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r9, 64;  // sync
    @%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    ret;
}
"""
_REGISTERS = ", ".join(f"%r{40 + i}" for i in range(NUM_COLUMNS))


def source(kind: tuple[str, int]) -> str:
    name, bits = kind
    is_scaled = "block_scale" in name
    fields = {
        "kind": name,
        "descriptor": bits | NUM_COLUMNS // 8 << 17,
        "scales": "[%r9+32], [%r9+36]," if is_scaled else "",
        "registers": _REGISTERS,
    }
    rounds = [
        _ROUND.format(a=4096 * i, a_end=4096 * i + 16, b=512 * i, b_end=512 * i + 16, index=i, **fields) for i in (0, 1)
    ]
    return _HEAD + (_SCALES.format() if is_scaled else "") + "".join(rounds) + _TAIL


def run(ptx: str, a: np.ndarray, b: np.ndarray, scales: np.ndarray | None = None, **options: Any) -> np.ndarray:
    """`a`: bytes [2, 128, 32], `b`: bytes [2, 16, 32], `scales`: words [32, 5]."""
    out = np.zeros((NUM_ROWS, NUM_COLUMNS), np.float32)
    inputs = [a, b, np.zeros((32, 5), np.uint32) if scales is None else scales]
    arrays = [np.ascontiguousarray(array) for array in inputs] + [out]
    PtxKernel(ptx, "k").launch(
        (1, 1, 1),
        NUM_ROWS,
        SHARED_BYTES,
        struct.pack("<4Q", *(array.ctypes.data for array in arrays)),
        allocations=[(array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays],
        **options,
    )
    return out
