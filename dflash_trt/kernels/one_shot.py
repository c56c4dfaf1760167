"""One-shot all-reduce over peers' memory, with the residual addition and the RMS norm behind it, in one launch.

Each rank writes its addend to its own buffer, which its peers read directly (NVLink): one exchange instead of a ring's
2 * (ranks - 1). Sums run over the ranks in order, in float32, so that every rank has the same bits.

Flags are int32 [2, rows, ranks] in each rank's memory, at the address in `flags`: `ready`, set by a peer whose row is
written, and `unread`, cleared by a peer that has read this rank's row. Each goes from 0 to 1 and back once per sum, so
that a captured graph needs no count of calls. Rows of the same number wait for one another alone, until `abort` is
set: a peer is gone then, and the results mean nothing.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (constants of a kernel are upper case)

import triton
import triton.language as tl

from dflash_trt.kernels.norm import normed_row
from dflash_trt.kernels.row_codes import store_row


@triton.jit(do_not_specialize=["num_rows"])
def one_shot_kernel(
    x,  # F [N, hidden_size], contiguous, as all of them: this rank's addend
    residual,  # F [N, hidden_size]; read only with HAS_NORM
    weight,  # F [hidden_size]; read only with HAS_NORM
    total,  # out, F [N, hidden_size]: the sum of all ranks, plus the residual with HAS_NORM
    normed,  # out, F or codes [N, hidden_size]; written only with HAS_NORM
    block_scale,  # of the codes; see `store_row`
    scale,  # float32 [1], of the codes
    buffers,  # int64 [RANKS]: addresses of F [num_rows, hidden_size]
    flags,  # int64 [RANKS]: addresses of int32 [2, num_rows, RANKS]
    abort,  # int32 [1]
    num_rows,  # of the buffers: at least N
    eps,
    hidden_size,
    rank: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= hidden_size
    HAS_NORM: tl.constexpr,
    RESULT: tl.constexpr,
):
    """Grid: (N,)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_in = columns < hidden_size
    at = row * hidden_size + columns
    buffer_type: tl.constexpr = x.dtype
    mine = tl.load(x + at, mask=is_in, other=0.0)

    own = tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + row * RANKS
    for peer in tl.static_range(RANKS):
        if peer != rank:
            _raise(own + num_rows * RANKS + peer, abort)  # when it has read what this row held before
    tl.store(tl.load(buffers + rank).to(buffer_type) + at, mine, mask=is_in)
    tl.debug_barrier()  # all threads have written before one of them says so
    for peer in tl.static_range(RANKS):
        if peer != rank:
            _raise(tl.load(flags + peer).to(tl.pointer_type(tl.int32)) + row * RANKS + rank, abort)
    summed = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(RANKS):
        if peer == rank:
            summed += mine.to(tl.float32)
        else:
            _lower(own + peer, abort)
            tl.debug_barrier()
            theirs = tl.load(tl.load(buffers + peer).to(buffer_type) + at, mask=is_in, other=0.0, volatile=True)
            summed += theirs.to(tl.float32)
    tl.debug_barrier()  # all threads have read
    for peer in tl.static_range(RANKS):
        if peer != rank:
            _lower(tl.load(flags + peer).to(tl.pointer_type(tl.int32)) + (num_rows + row) * RANKS + rank, abort)

    reduced = summed.to(x.dtype.element_ty)  # rounded here too: the sum of the ranks is an op of its own
    if HAS_NORM:
        added = reduced.to(tl.float32) + tl.load(residual + at, mask=is_in, other=0.0).to(tl.float32)
        added = added.to(total.dtype.element_ty)
        tl.store(total + at, added, mask=is_in)
        result = normed_row(added.to(tl.float32), weight, columns, is_in, eps, hidden_size).to(x.dtype.element_ty)
        store_row(normed, block_scale, scale, result, row, 0, hidden_size, BLOCK, RESULT)
    else:
        tl.store(total + at, reduced, mask=is_in)


@triton.jit
def _raise(flag, abort):
    while (tl.atomic_cas(flag, 0, 1, sem="acq_rel", scope="sys") != 0) & (tl.load(abort, volatile=True) == 0):
        pass


@triton.jit
def _lower(flag, abort):
    while (tl.atomic_cas(flag, 1, 0, sem="acq_rel", scope="sys") != 1) & (tl.load(abort, volatile=True) == 0):
        pass
