"""DFlash2: DFlash with convolutions over the block around every sublayer, and a token selector.

Definition: https://inco.ai/blog/dflash2 and z-lab's reference implementation (PyPI `dflash`). Context rows are not
convolved, so the context is DFlash's.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Generic

from dflash_trt.core.model.dflash2 import CandidateSelector
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.network.decoder import TargetWeights, head_logits, rope_tables
from dflash_trt.network.drafters import dflash
from dflash_trt.network.drafters.base import DraftLayer
from dflash_trt.network.feed_forward import Mlp
from dflash_trt.network.ops import Acceptance, Codebooks, ExchangedRows, Linear, Ops, Rows, T, TokenBlocks
from dflash_trt.network.proposal import Proposal
from dflash_trt.network.rank_tensors import RankTensors, parts_of
from dflash_trt.network.state import Cache, StepState


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvWeights(Generic[T]):
    """The two convolutions of a sublayer, whose filters are one projection of its normed input."""

    num_coefficients: int  # per slot, on one side
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
class ConvLayer(DraftLayer[T]):
    feeds_norms_to_linears: ClassVar[bool] = False

    feed_forward: Mlp[T]
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
    """Observes as DFlash does."""

    layers: tuple[ConvLayer[T], ...]
    selector: SelectorWeights[T]

    def propose(
        self, ops: Ops[T], acceptance: Acceptance[T], state: StepState[T], num_draft_tokens: int
    ) -> Proposal[T]:
        """Run the block [bonus, MASK x K], and walk through the candidates of its slots."""
        blocks = ops.token_blocks(acceptance, fill=self.mask_token_id)
        hidden = ops.without_first(self.run_block(ops, blocks, state, ExchangedRows(num_draft_tokens + 1)))
        hidden = ops.rms_norm(hidden, self.norm, self.spec.rms_norm_eps)
        selector = self.selector
        logits = head_logits(ops, hidden, self.lm_head, ExchangedRows(num_draft_tokens))
        logits = ops.scale(logits, selector.spec.output_multiplier)
        if self.spec.logit_softcap is not None:
            logits = ops.softcap(logits, self.spec.logit_softcap)
        codebooks = Codebooks(predecessor=selector.predecessor, successor=selector.successor, top_k=selector.spec.top_k)
        return ops.select_tokens(logits, ops.linear(hidden, selector.hidden), codebooks, acceptance)

    def run_block(self, ops: Ops[T], blocks: TokenBlocks[T], state: StepState[T], slots: ExchangedRows) -> T:
        """See `DFlashDrafter`."""
        hidden = self.embedded_slots(ops, blocks, slots)
        ropes = rope_tables(ops, self.layers, blocks.rows)
        for layer, cache, rope in zip(self.layers, state.draft_kv, ropes, strict=True):
            mixed = self._run_mixer(ops, layer, hidden, blocks.rows, cache, rope)
            hidden = self._run_mlp(ops, layer, mixed, slots)
        return hidden

    def _run_mixer(self, ops: Ops[T], layer: ConvLayer[T], hidden: T, rows: Rows[T], cache: Cache[T], rope: Any) -> T:
        """As `network.decoder.run_layers` does, with convolutions around the sublayers."""
        eps = self.spec.rms_norm_eps
        x, filters = layer.attention_conv.before(ops, ops.rms_norm(hidden, layer.attention_norm, eps))
        mixed = layer.mixer.run(ops, x, rows, cache, rope=rope, eps=eps)
        return ops.add(hidden, layer.attention_conv.after(ops, ops.all_reduce(mixed), filters))

    def _run_mlp(self, ops: Ops[T], layer: ConvLayer[T], hidden: T, slots: ExchangedRows) -> T:
        x, filters = layer.mlp_conv.before(ops, ops.rms_norm(hidden, layer.mlp_norm, self.spec.rms_norm_eps))
        fed = layer.feed_forward.summed(ops, x, slots)
        return ops.add(hidden, layer.mlp_conv.after(ops, fed, filters))


def bind(spec: DraftSpec, target: TargetWeights[T], tensors: RankTensors[T]) -> DFlash2Drafter[T]:
    """Raises KeyError on a missing tensor."""
    assert spec.conv is not None and spec.selector is not None
    first = dflash.bind(spec, target, tensors)
    num_coefficients = spec.conv.num_coefficients(spec.hidden_size)
    layers = tuple(_with_convs(layer, num_coefficients, tensors, i) for i, layer in enumerate(first.layers))
    selector = SelectorWeights(
        spec=spec.selector,
        hidden=tensors.linear("draft.selector.hidden"),
        predecessor=tensors["draft.selector.predecessor.embedding"],
        successor=tensors["draft.selector.successor.embedding"],
    )
    return DFlash2Drafter(**parts_of(first) | {"layers": layers}, selector=selector)


def _with_convs(layer: DraftLayer[T], num_coefficients: int, tensors: RankTensors[T], index: int) -> ConvLayer[T]:
    def bound(sublayer: str) -> ConvWeights[T]:
        prefix = f"draft.layers.{index}.{sublayer}_conv"
        base = tensors[f"{prefix}.base"]
        return ConvWeights(
            num_coefficients=num_coefficients,
            base_before=tensors.slice_rows(base, 0, 1),
            base_after=tensors.slice_rows(base, 1, 2),
            filter=tensors.linear(f"{prefix}.filter"),
        )

    return ConvLayer(**parts_of(layer), attention_conv=bound("attention"), mlp_conv=bound("mlp"))
