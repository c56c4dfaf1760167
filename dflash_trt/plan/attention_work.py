"""Work of the mixers in a step: keys and values, latents and recurrent states, in bytes and FLOPs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflash_trt.core.array import Array
from dflash_trt.core.dtype import num_bytes_of
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import DecoderSpec
from dflash_trt.core.model.gated_delta import GatedDelta
from dflash_trt.core.model.gqa import AttentionMask, Gqa
from dflash_trt.core.model.mla import Mla
from dflash_trt.core.state_spec import LayerState
from dflash_trt.plan.computed_rows import ComputedRows


@dataclass(frozen=True, kw_only=True, eq=False)
class MixingWork:
    """Work of a step's equal mixers: `times` calls, over `num_tokens` [R] queries and `num_seen` [R] earlier keys each.

    A request of at most `block_size` tokens verifies drafts or makes them; a longer one is a prompt.
    """

    mixer: Gqa | Mla | GatedDelta | None
    times: int
    num_bytes: float  # of all calls
    flops: float
    num_tokens: Array
    num_seen: Array
    block_size: int
    kv_itemsize: int
    num_parts: int = 1  # ranks that divide the keys, and attend with the heads of all


@dataclass(frozen=True, slots=True)
class Mixing:
    """`count` equal layers of a rank: how they mix, and the bytes of state that they read and write.

    The features of a chain's context are one, too, without a mixer.
    """

    mixer: Gqa | Mla | GatedDelta | None
    read_bytes: int  # per token
    written_bytes: int  # per token
    request_bytes: int  # per request of a step
    is_draft: bool
    kv_itemsize: int
    num_parts: int = 1
    count: int = 1

    def of(self, rows: ComputedRows, num_passes: int, num_slots: int) -> MixingWork:
        """A step whose drafter makes `num_passes` passes over `num_slots` slots of a request."""
        mask = AttentionMask() if self.mixer is None else self.mixer.mask
        positions = rows.context_lens + rows.num_tokens
        slots = rows.num_draft_tokens + 1
        tokens = rows.num_tokens
        if self.is_draft:  # slots see the context and a block of K + 1 slots; a pass reads the context again
            seen = _within(np.maximum(rows.context_lens, positions - slots), mask.window)
            read, keys, tokens = num_passes * seen, num_slots * (seen + slots), np.full_like(tokens, slots)
        else:
            seen = read = _in_chunk(_within(rows.context_lens, mask.window), rows.context_lens, mask.chunk)
            keys = _seen_keys(rows, mask)
        num_bytes = self.read_bytes * read.sum() + self.written_bytes * rows.num_tokens.sum()
        num_bytes += self.request_bytes * rows.num_requests
        ways = [] if self.mixer is None else self.mixer.flops
        flops = [x.per_key * keys + x.per_token * rows.num_tokens + x.per_position * positions for x in ways]
        return MixingWork(
            mixer=self.mixer,
            times=self.count * (num_passes if self.is_draft else 1),
            num_bytes=float(self.count * num_bytes),
            flops=float(self.count * np.minimum.reduce(flops).sum()) if flops else 0.0,
            num_tokens=tokens,
            num_seen=seen,
            block_size=slots,
            kv_itemsize=self.kv_itemsize,
            num_parts=self.num_parts,
        )


def mixings_of(decoder: DecoderSpec, states: Sequence[LayerState], mapping: Mapping) -> Iterator[Mixing]:
    """Layers grouped by kind; `states` are one rank's."""
    is_draft = decoder.role == "draft"
    counts: Counter[Mixing] = Counter()
    for layer, state in zip(decoder.layers, states, strict=False):
        owner = state.owner
        sizes = (owner.bytes_per_token, state.bytes_per_token, 2 * state.bytes_per_slot)
        num_parts = mapping.dcp_size if isinstance(layer.mixer, Mla) else 1
        counts[Mixing(layer.mixer.shard(mapping), *sizes, is_draft, num_bytes_of(owner.dtype), num_parts)] += 1
    for features in states[decoder.num_layers :]:  # a row is written for each token, and one read for each request
        row = features.bytes_per_token
        counts[Mixing(None, 0, row, row, is_draft, num_bytes_of(features.owner.dtype))] += 1
    for mixing, count in counts.items():
        yield replace(mixing, count=count)


def _within(lengths: Array, window: int | None) -> Array:
    return lengths if window is None else np.minimum(lengths, window)


def _in_chunk(lengths: Array, context: Array, chunk: int | None) -> Array:
    return lengths if chunk is None else np.minimum(lengths, context % chunk)


def _seen_keys(rows: ComputedRows, mask: AttentionMask) -> Array:
    """Keys that the tokens of each request see, all together, float64 [R]: its own and all before it."""
    tokens, context = rows.num_tokens.astype(np.float64), rows.context_lens.astype(np.float64)
    if mask.chunk is not None:
        return _keys_before(context + tokens, mask.chunk) - _keys_before(context, mask.chunk)
    if mask.window is None:
        return tokens * context + tokens * (tokens + 1) / 2
    growing = np.clip(mask.window - context, 0, tokens)  # tokens that do not fill the window yet
    return growing * context + growing * (growing + 1) / 2 + (tokens - growing) * mask.window


def _keys_before(position: Array, chunk: int) -> Array:
    """Keys that all tokens before a position see in whole chunks of positions, and in the last."""
    rest = position % chunk
    total: Array = (position - rest) * (chunk + 1) / 2 + rest * (rest + 1) / 2
    return total
