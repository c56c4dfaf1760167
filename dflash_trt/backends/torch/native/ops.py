"""The ops of a step on the CPU kernels: `TorchOps`, with what a layer does in fused calls.

For float32 engines with float32 pages, whose heads are whole panels, and bfloat16 ones with bfloat16 pages, of which
`widened` gives activations in float32; others run on `TorchOps`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from dflash_trt.backends.torch.dflash2 import draft_noise, walked
from dflash_trt.backends.torch.native.build import has_bfloat16_tiles
from dflash_trt.backends.torch.native.library import (
    Accept,
    Add,
    Attention,
    BlockConv,
    Blocks,
    Candidates,
    Confidence,
    CopyRows,
    CpuKernels,
    RmsNorm,
    Rotate,
    Rotation,
    Selection,
    SiluMul,
    StoreKv,
    TokenRows,
)
from dflash_trt.backends.torch.native.programs import Programs
from dflash_trt.backends.torch.ops import ByGroup, RopeTable, TorchOps
from dflash_trt.core.dtype import dtype_name
from dflash_trt.core.model.gqa import Gqa
from dflash_trt.core.model.rope import Rotary
from dflash_trt.core.state_spec import EngineStates, LayerState, PagedLatent, PagedRows, Recurrent, SharedKv
from dflash_trt.network.ops import Acceptance, Codebooks, KvDestination, Linear, Rows, StepInputs, TokenBlocks
from dflash_trt.network.proposal import Proposal
from dflash_trt.network.rank_tensors import map_parts
from dflash_trt.network.state import Cache
from dflash_trt.network.step import Network

R = TypeVar("R")

_PANEL: Final = 32  # kPanel of src/product.h
_MAX_HEAD_DIM: Final = 1024  # size of the zeros in src/attention.cpp
MAX_RECORDED_ROWS: Final = 128  # of a step; in larger ones dispatch costs little


def fits(dtype: torch.dtype, states: EngineStates) -> bool:
    """Engines of activations in `dtype` with these pages run on `NativeOps`."""
    is_wide = dtype == torch.float32
    if not is_wide and (dtype != torch.bfloat16 or has_bfloat16_tiles()):  # oneDNN has kernels for AMX
        return False

    def is_known(spec: LayerState) -> bool:
        if isinstance(spec, Recurrent | PagedRows):
            return is_wide  # PyTorch computes it, in one dtype
        if isinstance(spec, PagedLatent | SharedKv):
            return False  # PyTorch computes it from indices of its own
        has_panels = spec.head_dim % _PANEL == 0 and spec.head_dim <= _MAX_HEAD_DIM
        return spec.dtype == dtype_name(dtype) and spec.scales is None and has_panels

    return all(is_known(spec) for spec in (*states.target, *states.draft))


def widened(network: Network[Tensor]) -> Network[Tensor]:
    """The network with activations in float32: linear layers, and the table of embeddings, stay as they are."""
    wide = map_parts(network, (Linear, Tensor), lambda part: part.float() if isinstance(part, Tensor) else part)
    weights = replace(wide.target_weights, embedding=network.target_weights.embedding)
    return replace(wide, target_weights=weights)


@dataclass(frozen=True, slots=True)
class Angles:
    """A rotary embedding for some rows: whole tables, and the rows' positions."""

    cos: Tensor  # [positions of the table, 1, D]
    sin: Tensor
    positions: Tensor  # int32 [N]

    def rotation(self, norm: Tensor | None, eps: float) -> Rotation:
        """`norm` [D], or [heads, D]."""
        return Rotation(
            None if norm is None else norm.data_ptr(),
            0 if norm is None or norm.dim() == 1 else norm.shape[1],
            self.cos.data_ptr(),
            self.sin.data_ptr(),
            self.positions.data_ptr(),
            eps,
        )


class RowIndex:
    """`Rows` as the kernels read them. Keeps the tensors that it has addresses of."""

    def __init__(
        self,
        *,
        positions: Tensor,  # int32 [N]
        token_offsets: Tensor | None,
        context_lens: Tensor,
        page_table: Tensor,
        page_size: int,
        keeps_kv: bool,
    ) -> None:
        page_table = page_table.contiguous()
        self._tensors = (positions, token_offsets, context_lens, page_table)
        assert all(x is None or (x.dtype == torch.int32 and x.is_contiguous()) for x in self._tensors)
        self.content = TokenRows(
            len(positions),
            len(context_lens),
            positions.data_ptr(),
            None if token_offsets is None else token_offsets.data_ptr(),
            context_lens.data_ptr(),
            page_table.data_ptr(),
            page_table.shape[1],
            page_size,
            keeps_kv,
        )
        self.address = ctypes.addressof(self.content)


class NativeOps(TorchOps):
    """Implements `Ops[Tensor]` for one step."""

    def __init__(
        self,
        inputs: StepInputs[Tensor],
        rope_tables: Mapping[Rotary, RopeTable],
        *,
        kernels: CpuKernels,
        programs: Programs | None = None,  # over inputs that always have the same addresses
        **step: Any,  # as for TorchOps
    ) -> None:
        self._kernels = kernels
        self._num_threads = torch.get_num_threads()
        super().__init__(inputs, rope_tables, **step)
        self._programs = programs

    def _take_rows(self, inputs: StepInputs[Tensor]) -> None:
        super()._take_rows(inputs)
        self._programs = None

    def replayed(self, part: str, compute: Callable[[], R]) -> R:
        num_rows = len(self._inputs.token_ids)
        if self._programs is None or num_rows > MAX_RECORDED_ROWS:
            return compute()
        shape = (num_rows, self._inputs.page_table.shape, self._num_draft_tokens, self._num_threads)
        return self._programs.run((part, *shape), compute)

    @cached_property
    def _is_greedy(self) -> bool:
        return not self._inputs.temperature.numpy().any()

    @property
    def _samples_by_kernels(self) -> bool:
        return self._is_greedy and self._adjust is None and self._masks is None and not self.has_fixed_shapes

    def embedding(self, table: Tensor, token_ids: Tensor, scale: float = 1.0) -> Tensor:
        if self._shared_rows is not None:
            return super().embedding(table, token_ids, scale)
        return self._copied(table, token_ids, factor=scale)

    def gather_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return self._copied(x, rows.flatten()) if _is_copied(x) else super().gather_rows(x, rows)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        if factor == 1.0 or not _is_copied(x):
            return super().scale(x, factor)
        return self._copied(x, factor=factor)

    def without_first(self, hidden: Tensor) -> Tensor:
        blocks = hidden.view(-1, self._num_draft_tokens + 1, hidden.shape[-1])[:, 1:].flatten(1)
        return self._copied(blocks).view(-1, hidden.shape[-1])

    def concat(self, xs: Sequence[Tensor]) -> Tensor:
        if not all(map(_is_copied, xs)):
            return super().concat(xs)
        out = torch.empty((len(xs[0]), sum(x.shape[-1] for x in xs)))
        for x, part in zip(xs, self.split(out, [x.shape[-1] for x in xs]), strict=True):
            self._copy(x, part)
        return out

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        if a.shape != b.shape or not (_is_copied(a) and _is_copied(b)):
            return super().add(a, b)
        a, b = a.contiguous(), b.contiguous()
        out = torch.empty(a.shape)
        self._kernels.call(Add(a.data_ptr(), b.data_ptr(), a.numel(), out.data_ptr()))
        return out

    def _copied(self, x: Tensor, rows: Tensor | None = None, *, factor: float = 1.0) -> Tensor:
        """Rows of x [N, width], int32 [M]."""
        out = torch.empty((len(x) if rows is None else len(rows), x.shape[1]))
        self._copy(x, out, rows, factor)
        return out

    def _copy(self, x: Tensor, out: Tensor, rows: Tensor | None = None, factor: float = 1.0) -> None:
        assert x.dtype in (torch.float32, torch.bfloat16) and x.stride(1) == out.stride(1) == 1
        assert rows is None or (rows.dtype == torch.int32 and rows.is_contiguous())
        self._kernels.call(
            CopyRows(
                x.data_ptr(),
                x.stride(0),
                None if rows is None else rows.data_ptr(),
                len(out),
                x.shape[1],
                factor,
                out.data_ptr(),
                out.stride(0),
                x.dtype == torch.bfloat16,
            )
        )

    def _contiguous(self, x: Tensor) -> Tensor:
        """x [N, ...], whose rows may be parts of longer ones."""
        return x if x.is_contiguous() else self._copied(x.flatten(1)).view(x.shape)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = self._contiguous(x)
        width = weight.shape[-1]
        num_weights = 1 if weight.dim() == 1 else len(weight)
        out = torch.empty(x.shape)
        self._kernels.call(
            RmsNorm(x.data_ptr(), x.numel() // width, width, weight.data_ptr(), num_weights, eps, out.data_ptr())
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((num_rows, width))
        self._kernels.call(SiluMul(gate_up.data_ptr(), num_rows, width, out.data_ptr()))
        return out

    def rope_table(self, rotary: Rotary, positions: Tensor) -> Any:
        return Angles(*self._rope_tables[rotary], positions.contiguous())

    def rope(self, x: Tensor, table: Any) -> Tensor:
        return self.norm_rope(self._copied(x.flatten(1)).view(x.shape), None, 0.0, table)

    def norm_rope(self, x: Tensor, norm: Tensor | None, eps: float, table: Any) -> Tensor:
        num_rows, num_heads, head_dim = x.shape
        width, row_stride = table.cos.shape[-1], x.stride(0)
        if width < head_dim:  # the first features of each head alone: a head is a row of the kernel's
            x = x.contiguous() if norm is None else self.rms_norm(x, norm, eps)
            table = replace(table, positions=table.positions.repeat_interleave(num_heads))
            norm, num_rows, num_heads, row_stride = None, num_rows * num_heads, 1, head_dim
        assert x.stride(1) == head_dim and x.stride(2) == 1
        rotation = table.rotation(norm, eps)
        self._kernels.call(Rotate(x.data_ptr(), row_stride, num_rows, num_heads, width, rotation))
        return x

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rows: Rows[Tensor],
        cache: Cache[Tensor],
        gqa: Gqa,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert k is not None and v is not None, "layers that share K and V run on `TorchOps`"
        num_rows, num_heads, head_dim = q.shape
        out = torch.empty((num_rows, num_heads * head_dim))
        assert all(x.stride(1) == head_dim and x.stride(2) == 1 for x in (q, k, v))
        index = rows.index[cache.group]
        attention = Attention(
            index.address,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            q.stride(0),
            k.stride(0),
            v.stride(0),
            cache.tensor.data_ptr(),
            num_heads,
            k.shape[1],
            head_dim,
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
            gqa.mask.window or 0,
            gqa.mask.chunk or 0,
            head_dim**-0.5 if gqa.scale is None else gqa.scale,
            gqa.softcap or 0.0,
            gqa.mask.is_causal,
            gqa.mask.is_window_anchored,
            gqa.mask.first_key,
            self._num_threads,
            cache.tensor.dtype == torch.bfloat16,
        )
        attention.index = index  # kept with a recorded call
        self._kernels.call(attention)
        return out

    def store_kv(self, kv: Tensor, layers: Sequence[KvDestination[Tensor]], rows: Rows[Tensor], limits: Tensor) -> None:
        kv, limits, start = kv.contiguous(), limits.contiguous(), 0
        for layer in layers:
            spec, rotation = layer.cache.spec, layer.rope.rotation(layer.k_norm, layer.eps)
            assert layer.rope.cos.shape[-1] == spec.head_dim, "a drafter rotates whole heads"
            index = rows.index[layer.cache.group]
            storing = StoreKv(
                index.address,
                rotation,
                kv.data_ptr() + start * kv.itemsize,
                kv.shape[1],
                layer.cache.tensor.data_ptr(),
                spec.num_kv_heads,
                spec.head_dim,
                limits.data_ptr(),
                layer.cache.tensor.dtype == torch.bfloat16,
            )
            storing.index = index  # kept with a recorded call
            self._kernels.call(storing)
            start += 2 * spec.num_kv_heads * spec.head_dim

    def block_conv(self, x: Tensor, filters: Tensor, base: Tensor) -> Tensor:
        x, (_, num_taps, width) = x.contiguous(), base.shape
        num_groups = filters.shape[1] // num_taps
        assert base.is_contiguous() and filters.stride(1) == 1
        out = torch.empty(x.shape)
        conv = BlockConv(
            x.data_ptr(),
            len(x),
            self._num_draft_tokens + 1,
            filters.data_ptr(),
            filters.stride(0),
            base.data_ptr(),
            num_taps,
            num_groups,
            width // num_groups,
            out.data_ptr(),
        )
        self._kernels.call(conv)
        return out

    def select_tokens(
        self, logits: Tensor, hidden: Tensor, codebooks: Codebooks[Tensor], acceptance: Acceptance[Tensor]
    ) -> Proposal[Tensor]:
        logits, hidden, first = logits.contiguous(), hidden.contiguous(), acceptance.bonus_tokens.int().contiguous()
        tables = (codebooks.predecessor, codebooks.successor)
        assert all(x.is_contiguous() and x.dtype == torch.float32 for x in (logits, hidden, *tables))
        shape = (len(first), len(logits) // len(first), codebooks.top_k)
        scores, tokens = torch.empty(shape), torch.empty(shape, dtype=torch.int32)
        self._kernels.call(
            Candidates(logits.data_ptr(), *logits.shape, codebooks.top_k, scores.data_ptr(), tokens.data_ptr())
        )
        noise = None if self._is_greedy else draft_noise(tokens, self._inputs, acceptance)
        out = torch.empty(shape[:2], dtype=torch.int32)
        selection = Selection(
            scores.data_ptr(),
            tokens.data_ptr(),
            None if noise is None else noise.data_ptr(),
            hidden.data_ptr(),
            *(table.data_ptr() for table in tables),
            first.data_ptr(),
            *shape,
            hidden.shape[1],
            out.data_ptr(),
        )
        self._kernels.call(selection)
        proposal = Proposal(tokens=out) if self._is_greedy else walked(out, tokens, scores, self._inputs)
        return self._with_confidence(proposal, scores)

    def draft_tokens(
        self,
        logits: Tensor,
        acceptance: Acceptance[Tensor],
        draft_to_target: Tensor | None,
        *,
        draft_topk: int,
        first_slot: int = 1,
    ) -> Proposal[Tensor]:
        if not self._is_greedy or draft_to_target is not None:
            return super().draft_tokens(
                logits, acceptance, draft_to_target, draft_topk=draft_topk, first_slot=first_slot
            )
        logits, num_requests = logits.contiguous(), len(acceptance.bonus_tokens)
        tokens = torch.empty((num_requests, len(logits) // num_requests), dtype=torch.int32)
        scores = torch.empty(tokens.shape)
        self._kernels.call(Candidates(logits.data_ptr(), *logits.shape, 1, scores.data_ptr(), tokens.data_ptr()))
        return self._with_confidence(Proposal(tokens=tokens), logits)

    def _with_confidence(self, proposal: Proposal[Tensor], scores: Tensor) -> Proposal[Tensor]:
        if not self._has_confidence:
            return proposal
        scores, out = scores.contiguous(), torch.empty(proposal.tokens.shape)
        width = scores.shape[-1]
        assert scores.dtype == torch.float32
        self._kernels.call(Confidence(scores.data_ptr(), scores.numel() // width, width, out.data_ptr()))
        return replace(proposal, confidence=out)

    def sample_and_accept(self, logits: Tensor) -> Acceptance[Tensor]:
        if self.has_fixed_shapes:
            return super().sample_and_accept(logits)
        if self._samples_by_kernels:
            return self._accepted(logits)
        acceptance = super().sample_and_accept(logits)
        # The bits of a request's log probabilities do not depend on how other requests are sampled.
        logprobs = self._accepted(logits, acceptance.emitted_tokens.contiguous()).emitted_logprobs
        return replace(
            acceptance, emitted_logprobs=logprobs.masked_fill_(acceptance.emitted_logprobs.isnan(), torch.nan)
        )

    def _accepted(self, logits: Tensor, sampled: Tensor | None = None) -> Acceptance[Tensor]:
        """Of the sampled tokens, int32 [R, K+1], or of the likeliest."""
        inputs, (num_requests, width) = self._inputs, self._inputs.logit_rows.shape
        given = (inputs.token_ids, inputs.logit_rows, inputs.num_candidates, inputs.token_offsets, inputs.context_lens)
        assert all(x.dtype == torch.int32 and x.is_contiguous() for x in given)
        logits = logits.contiguous()
        assert logits.dtype == torch.float32
        integers = partial(torch.empty, dtype=torch.int32)
        acceptance = Acceptance(
            emitted_tokens=integers((num_requests, width)),
            emitted_logprobs=torch.empty((num_requests, width)),
            num_accepted=integers(num_requests),
            bonus_tokens=integers(num_requests),
            next_context_lens=integers(num_requests),
        )
        self._kernels.call(
            Accept(
                logits.data_ptr(),
                logits.shape[1],
                num_requests,
                width,
                None if sampled is None else sampled.data_ptr(),
                *(x.data_ptr() for x in given),
                acceptance.emitted_tokens.data_ptr(),
                acceptance.emitted_logprobs.data_ptr(),
                acceptance.num_accepted.data_ptr(),
                acceptance.bonus_tokens.data_ptr(),
                acceptance.next_context_lens.data_ptr(),
            )
        )
        return acceptance

    def token_blocks(
        self, acceptance: Acceptance[Tensor], *, fill: int, drafts_from_anchor: bool = False
    ) -> TokenBlocks[Tensor]:
        bonus, starts = acceptance.bonus_tokens.contiguous(), acceptance.next_context_lens.contiguous()
        assert bonus.dtype == starts.dtype == torch.int32
        num_requests, width = len(bonus), self._num_draft_tokens + (not drafts_from_anchor)
        token_ids, positions = torch.empty((2, num_requests * width), dtype=torch.int32).unbind()
        self._kernels.call(
            Blocks(
                bonus.data_ptr(),
                starts.data_ptr(),
                num_requests,
                width,
                fill,
                token_ids.data_ptr(),
                positions.data_ptr(),
            )
        )
        rows = Rows(
            positions=positions,
            token_offsets=None,
            context_lens=starts,
            page_table=self._inputs.page_table,
            keeps_kv=False,
            index=ByGroup(partial(self._index_blocks, positions, starts)),
        )
        return TokenBlocks(token_ids=token_ids, rows=rows)

    def _index_tokens(self, group: int) -> Any:
        inputs = self._inputs
        return RowIndex(
            positions=inputs.positions,
            token_offsets=inputs.token_offsets,
            context_lens=inputs.context_lens,
            page_table=self._page_tables[group],
            page_size=self._page_size,
            keeps_kv=True,
        )

    def _index_blocks(self, positions: Tensor, starts: Tensor, group: int) -> Any:
        return RowIndex(
            positions=positions,
            token_offsets=None,
            context_lens=starts,
            page_table=self._page_tables[group],
            page_size=self._page_size,
            keeps_kv=False,
        )


def _is_copied(x: Tensor) -> bool:
    """True if the kernels copy and add such rows; PyTorch does with others, such as tokens."""
    return x.dtype == torch.float32 and x.dim() == 2 and x.stride(1) == 1
