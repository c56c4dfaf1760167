"""DFlash2: DFlash with convolutions over the block around every sublayer, and tokens that are selected in a walk.

Definition: https://inco.ai/blog/dflash2 and z-lab's reference implementation (PyPI `dflash`). Context rows are not
convolved, so the context is DFlash's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic

from dflash_trt.core.model.dflash2 import BlockConv, CandidateSelector
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.model.gqa import Gqa
from dflash_trt.network.decoder import Layer, TargetWeights, rope_tables
from dflash_trt.network.drafters import dflash
from dflash_trt.network.feed_forward import Mlp, run_mlp
from dflash_trt.network.mixers.gqa import run_gqa
from dflash_trt.network.ops import Acceptance, Codebooks, Linear, Ops, Rows, T
from dflash_trt.network.proposal import Proposal
from dflash_trt.network.rank_tensors import RankTensors
from dflash_trt.network.state import Cache, StepState


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvWeights(Generic[T]):
    """The two convolutions of a sublayer, whose filters are one projection of its normed input."""

    num_coefficients: int  # of a slot and one side
    base_before: T  # [1, taps, H]
    base_after: T
    filter: Linear[T]

    def before(self, ops: Ops[T], x: T) -> tuple[T, T]:
        """The sublayer's input [R*S, H], and the filters for its output."""
        before, after = ops.split(ops.linear(x, self.filter), (self.num_coefficients,) * 2)
        return ops.block_conv(x, before, self.base_before), after

    def after(self, ops: Ops[T], x: T, filters: T) -> T:
        """[R*S, H], summed over the ranks -> what is added to the residual."""
        return ops.block_conv(x, filters, self.base_after)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvLayer(Layer[T]):
    feeds_norms_to_linears: ClassVar[bool] = False

    attention_conv: ConvWeights[T]
    mlp_conv: ConvWeights[T]


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectorWeights(Generic[T]):
    spec: CandidateSelector
    hidden: Linear[T]
    predecessor: T  # [V, r]
    successor: T


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlash2Drafter(dflash.DFlashDrafter[T]):
    """Observes as DFlash does. Its `layers` are `ConvLayer`s."""

    selector: SelectorWeights[T]

    def propose(
        self, ops: Ops[T], acceptance: Acceptance[T], state: StepState[T], num_draft_tokens: int
    ) -> Proposal[T]:
        """Run the block [bonus, MASK x K], and walk through the candidates of its slots."""
        blocks = ops.token_blocks(acceptance, fill=self.spec.block_filler)
        hidden = self.embedded(ops, blocks)
        ropes = rope_tables(ops, self.layers, blocks.rows)
        for layer, cache in zip(self.layers, state.draft_kv, strict=True):
            hidden = self._run_layer(ops, layer, hidden, blocks.rows, cache, ropes)
        hidden = ops.rms_norm(ops.without_first(hidden), self.norm, self.spec.rms_norm_eps)
        selector = self.selector
        logits = ops.scale(ops.all_gather_vocab(ops.linear(hidden, self.lm_head)), selector.spec.output_multiplier)
        if self.spec.logit_softcap is not None:
            logits = ops.softcap(logits, self.spec.logit_softcap)
        codebooks = Codebooks(predecessor=selector.predecessor, successor=selector.successor, top_k=selector.spec.top_k)
        return ops.select_tokens(logits, ops.linear(hidden, selector.hidden), codebooks, acceptance)

    def _run_layer(
        self, ops: Ops[T], layer: Layer[T], hidden: T, rows: Rows[T], cache: Cache[T], ropes: Sequence[Any]
    ) -> T:
        """As `network.decoder.run_layers` does, with convolutions around the sublayers."""
        eps, gqa = self.spec.rms_norm_eps, layer.spec.mixer
        assert isinstance(layer, ConvLayer) and isinstance(gqa, Gqa) and layer.rope_index is not None
        assert isinstance(layer.feed_forward, Mlp)
        x, filters = layer.attention_conv.before(ops, ops.rms_norm(hidden, layer.attention_norm, eps))
        mixed = run_gqa(ops, gqa, layer.attention, x, rows, cache, rope=ropes[layer.rope_index], eps=eps)
        hidden = ops.add(hidden, layer.attention_conv.after(ops, ops.all_reduce(mixed), filters))
        x, filters = layer.mlp_conv.before(ops, ops.rms_norm(hidden, layer.mlp_norm, eps))
        fed = run_mlp(ops, layer.feed_forward, x, layer.spec.feed_forward.activation)
        return ops.add(hidden, layer.mlp_conv.after(ops, ops.all_reduce(fed), filters))


def bind(spec: DraftSpec, target: TargetWeights[T], tensors: RankTensors[T]) -> DFlash2Drafter[T]:
    """Raises KeyError on a missing tensor."""
    assert spec.conv is not None and spec.selector is not None
    first = dflash.bind(spec, target, tensors)
    parts = {item.name: getattr(first, item.name) for item in fields(first)}
    layers = tuple(_with_convs(layer, spec, spec.conv, tensors, i) for i, layer in enumerate(first.layers))
    selector = SelectorWeights(
        spec=spec.selector,
        hidden=tensors.linear("draft.selector.hidden"),
        predecessor=tensors["draft.selector.predecessor.embedding"],
        successor=tensors["draft.selector.successor.embedding"],
    )
    return DFlash2Drafter(**parts | {"layers": layers}, selector=selector)


def _with_convs(layer: Layer[T], spec: DraftSpec, conv: BlockConv, tensors: RankTensors[T], index: int) -> ConvLayer[T]:
    def bound(sublayer: str) -> ConvWeights[T]:
        prefix = f"draft.layers.{index}.{sublayer}_conv"
        base = tensors[f"{prefix}.base"]
        return ConvWeights(
            num_coefficients=conv.num_coefficients(spec.hidden_size),
            base_before=tensors.slice_rows(base, 0, 1),
            base_after=tensors.slice_rows(base, 1, 2),
            filter=tensors.linear(f"{prefix}.filter"),
        )

    parts = {item.name: getattr(layer, item.name) for item in fields(layer)}
    return ConvLayer(**parts, attention_conv=bound("attention"), mlp_conv=bound("mlp"))
