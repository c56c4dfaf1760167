"""Collectives of a step: of ranks that divide each layer, or that have requests of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from dflash_trt.core.dtype import num_bytes_of
from dflash_trt.core.expert_exchange import ExchangeCosts, reached_fraction, sends_by_counts
from dflash_trt.core.model.decoder import DecoderSpec, TargetSpec
from dflash_trt.core.model.feed_forward import Dense, Moe
from dflash_trt.engine_dir import PretrainedConfig
from dflash_trt.kernels.launch_rules import CONTEXT_PIECE_ROWS

_ID_BYTES: Final = 4
_COUNT_BYTES: Final = 8

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """`count` equal collectives of `rows` x `features` elements; a rank receives `num_bytes` of all of them.

    Where ranks have rows of their own, `rows` are those of all; in an all_to_all this rank's. The host takes `host_s`
    for each, in which the device waits.
    """

    kind: Kind
    count: int
    rows: int
    features: int
    num_bytes: float
    host_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRows:
    """Rows of a rank in a step: its tokens and logits; in each of `num_passes` of the drafter, rows of its layers and
    embedding, and drafts.
    """

    tokens: int
    logits: int
    num_passes: int
    draft_layers: int
    draft_embedding: int
    drafts: int
    has_prompts: bool = False  # of any rank


class Exchanges:
    """The collectives of an engine's steps; by `costs` rows go to experts, without them all rows to all ranks."""

    def __init__(self, config: PretrainedConfig, *, has_drafter: bool, costs: ExchangeCosts | None = None) -> None:
        self._config, self._costs = config, costs
        self._draft = config.draft if has_drafter else None
        self._num_ranks, self._itemsize = config.mapping.world_size, num_bytes_of(config.dtype)
        self._others = (self._num_ranks - 1) / self._num_ranks  # part of a collective that comes from other ranks

    def of(self, rows: RankRows, shared_tokens: int) -> Iterator[Exchange]:
        """`shared_tokens` are those of all ranks with requests of their own."""
        if self._num_ranks == 1:
            return iter(())
        return self._of_divided_layers(rows) if self._config.mapping.dp_size == 1 else self._joint(rows, shared_tokens)

    def _of_divided_layers(self, rows: RankRows) -> Iterator[Exchange]:
        """Two all-reduces a layer, of which a rank receives 2 (n - 1) / n, and the logits."""
        target, draft = self._config.target, self._draft
        yield self._exchange("all_reduce", 2 * target.num_layers, rows.tokens, target.hidden_size)
        if self._config.mapping.dcp_size > 1:
            yield from self._of_divided_positions(target, rows.tokens)
        yield self._exchange("all_gather", 1, rows.logits, target.vocab_size)
        if draft is not None and (passes := rows.num_passes):
            yield self._exchange("all_reduce", 2 * passes * draft.num_layers, rows.draft_layers, draft.hidden_size)
            yield self._exchange("all_gather", passes, rows.drafts, draft.draft_vocab_size or target.vocab_size)

    def _of_divided_positions(self, target: TargetSpec, num_tokens: int) -> Iterator[Exchange]:
        """Queries of all heads, and what they attend to on each rank, in pieces of equal numbers of rows."""
        num_pieces = max(1, -(-num_tokens // CONTEXT_PIECE_ROWS))
        num_rows = -(-num_tokens // num_pieces)
        for mla, count in Counter(target.latents).items():
            queries = mla.num_heads * (mla.latent_dim + mla.rope_dim)
            yield self._exchange("all_gather", num_pieces * count, num_rows, queries)
            yield self._exchange("all_to_all", num_pieces * count, num_rows, mla.num_heads * mla.latent_dim)

    def _joint(self, rows: RankRows, shared_tokens: int) -> Iterator[Exchange]:
        """Rows of each feed-forward, embedding and head are gathered, and their sums or their logits given back."""
        target, draft, num_ranks = self._config.target, self._draft, self._num_ranks
        num_embedded = 1 + (draft is not None and draft.drafts_one_by_one)  # a chain embeds the step's tokens, too
        yield from self._embedded(num_embedded, shared_tokens, target.hidden_size)
        others = (shared_tokens - rows.tokens) // (num_ranks - 1)
        costs = self._costs if rows.has_prompts or (self._costs and not self._costs.has_graphs) else None
        yield from self._fed(target, 1, (rows.tokens, *[others] * (num_ranks - 1)), costs)
        yield from self._head(1, rows.logits, target.hidden_size, target.vocab_size)
        if draft is not None and (passes := rows.num_passes):
            vocab_size = draft.draft_vocab_size or target.vocab_size
            yield from self._embedded(passes, num_ranks * rows.draft_embedding, draft.hidden_size)
            yield from self._fed(draft, passes, [rows.draft_layers] * num_ranks, costs)
            yield from self._head(passes, rows.drafts, draft.hidden_size, vocab_size)

    def _fed(
        self, decoder: DecoderSpec, passes: int, num_rows: Sequence[int], costs: ExchangeCosts | None
    ) -> Iterator[Exchange]:
        """Gathered rows are padded to those of the fullest rank."""
        gathered = summed = 0
        for feed_forward, count in Counter(layer.feed_forward for layer in decoder.layers).items():
            gathered += count * feed_forward.num_inputs
            summed += count * feed_forward.num_sums
            if costs is not None and self._sends_by_counts(feed_forward, decoder.hidden_size, num_rows, costs):
                assert isinstance(feed_forward, Moe)
                gathered -= count * (1 + feed_forward.has_own_norms)
                summed -= count
                yield from self._counted(feed_forward, passes * count, decoder.hidden_size, max(num_rows), costs)
        is_even, padded = len(set(num_rows)) == 1, len(num_rows) * max(num_rows)
        if gathered:
            yield self._exchange("all_gather", passes * gathered, padded, decoder.hidden_size)
        if summed:
            kind: Kind = "reduce_scatter" if is_even else "all_reduce"
            yield self._exchange(kind, passes * summed, sum(num_rows), decoder.hidden_size)

    def _sends_by_counts(
        self, feed_forward: Dense | Moe, hidden_size: int, num_rows: Sequence[int], costs: ExchangeCosts
    ) -> bool:
        sizes = {"hidden_size": hidden_size, "itemsize": self._itemsize, "ep_size": self._config.mapping.ep_size}
        return isinstance(feed_forward, Moe) and sends_by_counts(feed_forward, costs, num_rows=num_rows, **sizes)

    def _counted(
        self, moe: Moe, count: int, hidden_size: int, most_rows: int, costs: ExchangeCosts
    ) -> Iterator[Exchange]:
        """Counts, rows with their logits, and parts of sums: those of the fullest rank."""
        num_ranks = self._num_ranks
        rows = round(reached_fraction(moe, self._config.mapping.ep_size) * num_ranks * most_rows)
        num_bytes = count * num_ranks * _COUNT_BYTES * self._others
        yield Exchange(
            kind="all_to_all", count=count, rows=1, features=num_ranks, num_bytes=num_bytes, host_s=costs.host_s
        )
        yield self._exchange("all_to_all", count, rows, hidden_size + moe.num_experts)
        yield self._exchange("all_to_all", count, rows, hidden_size)

    def _embedded(self, count: int, rows: int, hidden_size: int) -> Iterator[Exchange]:
        """Token ids are gathered."""
        ids_bytes = count * rows * _ID_BYTES * self._others
        yield Exchange(kind="all_gather", count=count, rows=rows, features=1, num_bytes=ids_bytes)
        yield self._exchange("reduce_scatter", count, rows, hidden_size)

    def _head(self, count: int, rows: int, hidden_size: int, vocab_size: int) -> Iterator[Exchange]:
        yield self._exchange("all_gather", count, self._num_ranks * rows, hidden_size)
        yield self._exchange("all_to_all", count, rows, vocab_size)

    def _exchange(self, kind: Kind, count: int, rows: int, features: int) -> Exchange:
        num_bytes = count * rows * features * self._others * self._itemsize * (1 + (kind == "all_reduce"))
        return Exchange(kind=kind, count=count, rows=rows, features=features, num_bytes=num_bytes)
