"""Handles of the GPU's ops: work put off until the kernel that does it along the way.

Heads are normed and rotated where they are attended, sums added where they are normed, norms and gates rounded as the
next GEMM wants them. `RowsIndex` has rows of tokens as the attention kernels read them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dflash_trt.kernels.attention_fixed import Piece
from dflash_trt.kernels.attention_plan import RequestTensors
from dflash_trt.kernels.norm_launch import add_rms_norm, gelu_mul, rms_norm, silu_mul
from dflash_trt.kernels.rope_and_pages_launch import Rotation
from dflash_trt.kernels.row_codes import FP8
from dflash_trt.kernels.row_codes_launch import RowCodes, quantize_rows
from dflash_trt.network.ops import Rows


@dataclass(frozen=True, slots=True)
class RopeRows:
    """A decoder's rotation and the rows' positions, int32 [N]."""

    inv_freq: Tensor  # float32 [D / 2]
    amplitude: float
    positions: Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """[N, heads, D] before its norm and rotation; rows may be further apart."""

    x: Tensor
    norm: tuple[Tensor | None, float] | None = None  # weight [D], None as if it were ones; eps
    rope: RopeRows | None = None
    is_paired: bool = False  # RoPE turns neighbours, which come out as halves


class Sum:
    """Lazy a + b, computed by the following norm or at its first use; from then on only the total is kept."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.shape = a.shape
        self.total: Tensor | None = None
        self._parts: tuple[Tensor, Tensor] | None = (a, b)

    def value(self) -> Tensor:
        if self.total is None:
            a, b = self._taken()
            self.total = a + b
        return self.total

    def add_and_norm(self, weight: Tensor, eps: float, codes: RowCodes | None) -> Tensor:
        a, b = self._taken()
        self.total, normed = add_rms_norm(a, b, weight, eps, codes=codes)
        return normed

    def _taken(self) -> tuple[Tensor, Tensor]:
        assert self._parts is not None
        parts, self._parts = self._parts, None
        return parts


@dataclass(slots=True)
class Norm:
    """An Activation: the RMS norm of `source`, with the addition before it when that is still to be done."""

    source: Tensor | Sum
    weight: Tensor
    eps: float
    normed: Tensor | None = field(default=None)

    def value(self) -> Tensor:
        if self.normed is None:
            self.normed = self._run(None)
        return self.normed

    def codes(self, form: int, scale: Tensor) -> RowCodes:
        codes = RowCodes.allocate(form, scale, *self.source.shape)
        self._run(codes)
        return codes

    def _run(self, codes: RowCodes | None) -> Tensor:
        source = self.source
        if isinstance(source, Sum) and source.total is None:
            return source.add_and_norm(self.weight, self.eps, codes)
        return rms_norm(tensor_of(source), self.weight, self.eps, codes=codes)


@dataclass(frozen=True, slots=True)
class Gated:
    """An Activation: silu(gate) * up, or with GELU. Read once."""

    gate_up: Tensor
    is_gelu: bool = False

    def value(self) -> Tensor:
        return self._run(None)

    def codes(self, form: int, scale: Tensor) -> RowCodes:
        num_rows, num_columns = self.gate_up.shape
        codes = RowCodes.allocate(form, scale, num_rows, num_columns // 2)
        self._run(codes)
        return codes

    def _run(self, codes: RowCodes | None) -> Tensor:
        return (gelu_mul if self.is_gelu else silu_mul)(self.gate_up, codes=codes)


@dataclass(frozen=True, slots=True)
class Attended:
    """An Activation: what attention gives, [N, features]. Read once."""

    run: Callable[[RowCodes | None], Tensor]  # into codes, or as it is
    codes_memory: Tensor  # float8_e4m3fn [N, features]

    def value(self) -> Tensor:
        return self.run(None)

    def codes(self, form: int, scale: Tensor) -> RowCodes:
        if form != FP8:
            return quantize_rows(self.value(), form, scale)
        codes = RowCodes(form=form, scale=scale, values=self.codes_memory)
        self.run(codes)
        return codes


Value = Tensor | Heads | Sum | Norm | Gated | Attended


def tensor_of(x: Value) -> Tensor:
    assert not isinstance(x, Heads), "heads are read by attention alone"
    return x if isinstance(x, Tensor) else x.value()


def rotation_of(q: Heads, k: Heads | None = None, v: Heads | None = None) -> Rotation:
    """Without k: of a layer whose queries alone are rotated."""
    assert q.rope is not None and (k is None or (q.norm is None) == (k.norm is None))
    assert not q.is_paired and not (k is not None and k.is_paired), "latents alone are turned so"
    norms_v = v is not None and v.norm is not None
    assert not norms_v or (v is not None and v.norm is not None and v.norm[0] is None and v.rope is None)
    norms = [heads.norm for heads in (q, k, v) if heads is not None and heads.norm is not None]
    return Rotation(
        inv_freq=q.rope.inv_freq,
        amplitude=q.rope.amplitude,
        q_norm=None if q.norm is None else q.norm[0],
        k_norm=None if k is None or k.norm is None else k.norm[0],
        eps=norms[0][1] if norms else 1e-6,
        norms_v=norms_v,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsIndex:
    """Requests of some rows with their pages of one group, and the pieces in which they are attended."""

    requests: RequestTensors
    pieces: tuple[Piece, ...]
    own_pieces: tuple[Piece, ...] = ()  # rows as requests over this rank's positions, where ranks divide those


def rows_of(
    positions: Tensor,
    token_offsets: Tensor,
    context_lens: Tensor,
    page_table: Tensor,  # int32 [G, R, P], each group's at an aligned address
    *,
    keeps_kv: bool,
) -> Rows[Any]:
    """The offsets of blocks are read by no kernel; the step's are there in their place."""
    tables = page_table.view(-1, len(context_lens), page_table.shape[-1])
    requests = [RequestTensors(token_offsets=token_offsets, context_lens=context_lens, page_table=t) for t in tables]
    whole = slice(len(positions))
    return Rows(
        positions=positions,
        token_offsets=token_offsets if keeps_kv else None,
        context_lens=context_lens,
        page_table=page_table,
        keeps_kv=keeps_kv,
        index=tuple(RowsIndex(requests=group, pieces=(Piece(rows=whole, requests=group),)) for group in requests),
    )
