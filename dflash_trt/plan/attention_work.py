"""What the mixers of a step's layers read, write and compute: keys and values, latents, recurrent states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_trt.core.array import Array
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import DecoderSpec
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.model.gated_delta import GatedDelta
from dflash_trt.core.model.gqa import AttentionMask, Gqa
from dflash_trt.core.model.mla import Mla
from dflash_trt.core.state_spec import LayerState, SharedKv
from dflash_trt.plan.computed_rows import ComputedRows


@dataclass(frozen=True, slots=True)
class Mixing:
    """`count` layers alike: a rank's shard of their mixer, and the bytes that they read and write of a token."""

    mixer: Gqa | Mla | GatedDelta | None  # None: the features of a chain's context
    read_bytes: int  # of a token; of a recurrent state, of a slot
    written_bytes: int
    is_draft: bool
    is_chain: bool
    count: int = 1

    def of(self, rows: ComputedRows, num_passes: int) -> tuple[float, float]:
        """Bytes and FLOPs in a step whose drafter makes so many passes over its block, or over its chain."""
        mixer = self.mixer
        if mixer is None:  # a row is written, one of a request read
            total = self.written_bytes * (rows.num_tokens.sum() + rows.num_requests)
            return float(self.count * total), 0.0
        if isinstance(mixer, GatedDelta):
            return self._of_states(mixer, rows)
        if self.is_draft:
            assert isinstance(mixer, Gqa), "layers of a drafter attend over K and V"
            return self._of_draft(mixer, rows, num_passes)
        mask = mixer.mask if isinstance(mixer, Gqa) else AttentionMask()
        read = _in_chunk(_within(rows.context_lens, mask.window), rows.context_lens, mask.chunk).sum()
        num_bytes = self.read_bytes * read + self.written_bytes * rows.num_tokens.sum()
        keys = _causal_keys(rows, mask.window) if mask.chunk is None else _chunk_keys(rows, mask.chunk)
        flops = 4 * mixer.q_size * keys.sum() if isinstance(mixer, Gqa) else _latent_flops(mixer, rows, keys)
        return float(self.count * num_bytes), float(self.count * flops)

    def _of_draft(self, mixer: Gqa, rows: ComputedRows, num_passes: int) -> tuple[float, float]:
        """A block of K + 1 slots sees the context and itself; pass j of a chain has j slots, and reads it again."""
        slots = rows.num_draft_tokens + 1
        context = np.maximum(rows.context_lens, rows.context_lens + rows.num_tokens - slots)
        seen = _within(context, mixer.mask.window).sum()
        num_bytes = num_passes * self.read_bytes * seen + self.written_bytes * rows.num_tokens.sum()
        num_queries = slots * num_passes / 2 if self.is_chain else slots * num_passes
        flops = 4 * mixer.q_size * num_queries * (seen + slots * rows.num_requests)
        return float(self.count * num_bytes), float(self.count * flops)

    def _of_states(self, mixer: GatedDelta, rows: ComputedRows) -> tuple[float, float]:
        """A state is read and written once a step; S^T k, k delta^T and S^T q of each token, and the convolution."""
        per_token = 6 * mixer.num_value_heads * mixer.key_head_dim * mixer.value_head_dim
        per_token += 2 * mixer.num_channels * mixer.conv_size
        num_bytes = (self.read_bytes + self.written_bytes) * rows.num_requests
        return float(self.count * num_bytes), float(self.count * per_token * rows.num_tokens.sum())


def mixings_of(decoder: DecoderSpec, states: Sequence[LayerState], mapping: Mapping) -> Iterator[Mixing]:
    """Layers of a kind together; `states` are those of one rank."""
    is_draft = isinstance(decoder, DraftSpec)
    is_chain = isinstance(decoder, DraftSpec) and decoder.chain is not None
    counts: Counter[Mixing] = Counter()
    for layer, state in zip(decoder.layers, states, strict=False):
        mixer = layer.mixer.shard(mapping)
        if isinstance(mixer, GatedDelta):
            counts[Mixing(mixer, state.bytes_per_slot, state.bytes_per_slot, is_draft, is_chain)] += 1
        else:
            read = state.source if isinstance(state, SharedKv) else state
            counts[Mixing(mixer, read.bytes_per_token, state.bytes_per_token, is_draft, is_chain)] += 1
    for features in states[decoder.num_layers :]:
        counts[Mixing(None, 0, features.bytes_per_token, is_draft, is_chain)] += 1
    for mixing, count in counts.items():
        yield Mixing(
            mixing.mixer, mixing.read_bytes, mixing.written_bytes, mixing.is_draft, mixing.is_chain, count=count
        )


def _within(lengths: Array, window: int | None) -> Array:
    return lengths if window is None else np.minimum(lengths, window)


def _in_chunk(lengths: Array, context: Array, chunk: int | None) -> Array:
    return lengths if chunk is None else np.minimum(lengths, context % chunk)


def _chunk_keys(rows: ComputedRows, chunk: int) -> Array:
    """The same with chunks of positions, whole ones and the last."""

    def before(position: Array) -> Array:
        rest = position % chunk
        total: Array = (position - rest) * (chunk + 1) / 2 + rest * (rest + 1) / 2
        return total

    tokens, context = rows.num_tokens.astype(np.float64), rows.context_lens.astype(np.float64)
    return before(context + tokens) - before(context)


def _causal_keys(rows: ComputedRows, window: int | None) -> Array:
    """Keys that the tokens of each request see, all together, float64 [R]: its own and all before it."""
    tokens, context = rows.num_tokens.astype(np.float64), rows.context_lens.astype(np.float64)
    if window is None:
        return tokens * context + tokens * (tokens + 1) / 2
    growing = np.clip(window - context, 0, tokens)  # tokens that do not fill the window yet
    return growing * context + growing * (growing + 1) / 2 + (tokens - growing) * window


def _latent_flops(mla: Mla, rows: ComputedRows, keys: Array) -> float:
    """Absorbed, with scores over latents; or over K and V made of every latent once: whichever is less."""
    head = mla.nope_dim + mla.v_head_dim
    factors = 2 * mla.num_heads * head * mla.latent_dim
    absorbed = 2 * mla.num_heads * (2 * mla.latent_dim + mla.rope_dim) * keys + factors * rows.num_tokens
    direct = 2 * mla.num_heads * (head + mla.rope_dim) * keys + factors * (rows.context_lens + rows.num_tokens)
    return float(np.minimum(absorbed, direct).sum())
