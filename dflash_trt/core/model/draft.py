"""A drafter, and a target and its drafter together."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from dflash_trt.core.dtype import FloatDType
from dflash_trt.core.frozen import MAX_INT32, Index, Scale, Size
from dflash_trt.core.model.decoder import (
    MAX_LAYERS,
    DecoderSpec,
    LayerId,
    LayerSpec,
    TargetSpec,
    is_offset_norm,
    largest_window,
)
from dflash_trt.core.model.dflash2 import BlockConv, CandidateSelector
from dflash_trt.core.model.dspark import DSparkHeads
from dflash_trt.core.model.eagle3 import EagleChain
from dflash_trt.core.model.gqa import Gqa
from dflash_trt.core.model.mtp import MtpHead
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from dflash_trt.core.state_spec import EngineStates, LayerState, PagedRows
from dflash_trt.core.weight_spec import WeightSpec, WeightTable, embedding_table, extra_heads, row_sharded

_MAX_BLOCK_SIZE = 1024
# The target rarely samples beyond the drafter's most likely tokens: docs/benchmarks.md compares other numbers.
_DRAFT_TOPK = 32


class DraftSpec(DecoderSpec):
    """A drafter. `target_layer_ids` are 0-based and name the *output* of a target layer.

    That is the residual sum after the layer; for the last layer it is the input of the final norm.

    `draft_vocab_size` is None when the drafter uses the target's lm_head. Otherwise the drafter has its own head, and
    draft token i is target token `draft_to_target[i]` (a tensor of the checkpoint). `source_format` names the file of
    `checkpoint/drafters` that read it, `algorithm` the file of `network/drafters` that runs it. `conv` and `selector`
    are DFlash2's additions, `heads` are DSpark's, `chain` is EAGLE-3's, `mtp` that of an MTP head; the last two draft
    one token a pass, and have no mask token. The target's embedding is scaled as in the target, and by
    `input_embedding_scale`, except for these two, which norm it; `logit_softcap` is as in TargetSpec.
    """

    role: ClassVar[str] = "draft"

    algorithm: Literal["dflash", "dflash2", "dspark", "eagle3", "mtp"] = "dflash"
    source_format: str
    target_layer_ids: Annotated[tuple[LayerId, ...], Field(min_length=1, max_length=MAX_LAYERS)]
    target_hidden_size: Size
    target_vocab_size: Size
    num_target_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)] | None = None
    draft_block_size: Annotated[int, Field(ge=2, le=_MAX_BLOCK_SIZE)]
    mask_token_id: Index | None = None
    draft_vocab_size: Size | None = None
    has_own_embedding: bool = False
    input_embedding_scale: Scale = 1.0
    logit_softcap: Scale | None = None
    conv: BlockConv | None = None
    selector: CandidateSelector | None = None
    heads: DSparkHeads | None = None
    chain: EagleChain | None = None
    mtp: MtpHead | None = None

    @field_validator("mask_token_id")
    @classmethod
    def _in_vocabulary(cls, token_id: int | None, info: ValidationInfo) -> int | None:
        vocab_size = info.data.get("target_vocab_size", MAX_INT32)
        if (token_id or 0) >= vocab_size:
            raise ValueError(f"an id below the target's vocab_size {vocab_size}")
        return token_id

    @field_validator("draft_vocab_size")
    @classmethod
    def _within_vocabulary(cls, draft_vocab_size: int | None, info: ValidationInfo) -> int | None:
        vocab_size = info.data.get("target_vocab_size", MAX_INT32)
        if (draft_vocab_size or 0) > vocab_size:
            raise ValueError(f"at most the target's vocab_size {vocab_size}")
        return draft_vocab_size

    @model_validator(mode="after")
    def _has_the_parts_of_its_algorithm(self) -> Self:
        is_second = self.algorithm == "dflash2"
        if is_second != (self.conv is not None) or is_second != (self.selector is not None):
            raise ValueError("conv and selector for algorithm dflash2, and for no other")
        for name, part, algorithm in (
            ("heads", self.heads, "dspark"),
            ("chain", self.chain, "eagle3"),
            ("mtp", self.mtp, "mtp"),
        ):
            if (self.algorithm == algorithm) != (part is not None):
                raise ValueError(f"{name} for algorithm {algorithm}, and for no other")
        if self.heads is not None and self.logit_softcap is not None:
            raise ValueError("no logit_softcap for algorithm dspark")
        if self.drafts_one_by_one != (self.mask_token_id is None):
            raise ValueError("a mask_token_id for algorithms that draft a block, and for no others")
        if self.drafts_one_by_one and self.num_layers > 1:
            raise ValueError(f"one layer for algorithm {self.algorithm}")
        if self.conv is not None and self.hidden_size % self.conv.group_size:
            raise ValueError(f"a conv.group_size that divides hidden_size {self.hidden_size}")
        if self.selector is not None and self.selector.top_k > (self.draft_vocab_size or self.target_vocab_size):
            raise ValueError("a selector.top_k of at most the vocabulary")
        return self

    @property
    def drafts_one_by_one(self) -> bool:
        """True for a chain of passes, each of which computes the feature of the next."""
        return self.chain is not None or self.mtp is not None

    @property
    def draft_topk(self) -> int:
        """C: top-C candidates kept per draft for rejection sampling."""
        if self.selector is not None:
            return self.selector.top_k
        return min(_DRAFT_TOPK, self.draft_vocab_size or self.target_vocab_size)

    @property
    def drafts_from_anchor(self) -> bool:
        """True if slot 0, the anchor's, makes a draft, too."""
        return self.heads is not None and self.heads.drafts_from_anchor

    @property
    def has_confidence(self) -> bool:
        """True if its drafts come with estimates of their acceptance."""
        return self.heads is not None and self.heads.has_confidence

    @property
    def max_draft_len(self) -> int:
        """K: a draft for each slot of the block, but none for the anchor's unless `drafts_from_anchor`."""
        return self.draft_block_size - (not self.drafts_from_anchor)

    def states(
        self, *, dtype: FloatDType, kv_scales: tuple[LayerKvScales, ...] | None = None, num_records: int = 1
    ) -> tuple[LayerState, ...]:
        """Layer states as of any decoder; the features of a chain follow its layer's."""
        states = super().states(dtype=dtype, kv_scales=kv_scales, num_records=num_records)
        if not self.drafts_one_by_one:
            return states
        return (*states, PagedRows(name="draft_features", width=self.hidden_size, dtype=dtype))

    def _kept_window(self, owner: int) -> int | None:
        """All layers keep the same pages, because their context is written at once."""
        return largest_window([gqa.mask.window for gqa in self.attentions])

    def with_window(self, window: int) -> "DraftSpec":
        """The drafter with layers that see at most the last `window` tokens of the context.

        Layers with a window keep what it counts from. Others get one before the anchor, and see all of the block.
        """

        def narrowed(layer: LayerSpec, gqa: Gqa) -> LayerSpec:
            mask = gqa.mask
            fields = {"window": window, "is_window_anchored": mask.is_window_anchored or mask.window is None}
            if mask.window is not None and mask.window <= window:
                return layer
            mixer = gqa.model_copy(update={"mask": mask.model_copy(update=fields)})
            return layer.model_copy(update={"mixer": mixer})

        return self.model_copy(update={"layers": tuple(map(narrowed, self.layers, self.attentions))})

    def num_passes(self, num_draft_tokens: int) -> int:
        """Passes of the drafter's layers in a step: one over a block, or one for each draft of a chain."""
        return num_draft_tokens if self.drafts_one_by_one else min(1, num_draft_tokens)

    def computed_slots(self, num_draft_tokens: int) -> int:
        """Slots of a request that these passes compute: a block, or pass j of a chain j slots."""
        slots = self.num_passes(num_draft_tokens) * (num_draft_tokens + (not self.drafts_from_anchor))
        return slots // 2 if self.drafts_one_by_one else slots

    @property
    def kv_sizes(self) -> tuple[int, ...]:
        """Rows of `draft.kv`: [k_0, v_0, k_1, v_1, ...]."""
        return tuple(gqa.kv_size for gqa in self.attentions for _ in "kv")

    def weights(self) -> WeightTable:
        """Canonical names of the drafter: `draft.*`.

        `draft.kv` stacks K and V of all layers, so that the context of every layer is one GEMM; the block's own K and
        V use slices of the same tensor. The attention of EAGLE-3's chain reads the normed embedding and the normed
        feature, which `draft.fc` projects before the layer of an MTP head.
        """
        hidden, kv_sizes = self.hidden_size, self.kv_sizes
        attended = hidden if self.chain is None else 2 * hidden
        projected = len(self.target_layer_ids) * self.target_hidden_size if self.mtp is None else 2 * hidden
        units = tuple(gqa.head_dim for gqa in self.attentions for _ in "kv")
        table: WeightTable = {
            "draft.fc": WeightSpec(shape=(hidden, projected)),
            "draft.context_norm": WeightSpec(shape=(hidden,)),
            "draft.kv": row_sharded((sum(kv_sizes), attended), kv_sizes, units),
        }
        if any(gqa.has_qkv_bias for gqa in self.attentions):
            table["draft.kv_bias"] = row_sharded((sum(kv_sizes),), kv_sizes, units)
        for i, (layer, gqa) in enumerate(zip(self.layers, self.attentions, strict=True)):
            prefix = f"draft.layers.{i}"
            table |= layer.weights(prefix, hidden, mixer=gqa.weights(prefix, hidden, owns_kv=False))
            if self.conv is not None:
                for sublayer in ("attention", "mlp"):
                    table |= self.conv.weights(f"draft.layers.{i}.{sublayer}_conv", hidden)
            if self.chain is not None:
                q = table[f"draft.layers.{i}.q"]
                table[f"draft.layers.{i}.q"] = replace(q, shape=(q.shape[0], attended))
        table |= self._parts() | {"draft.norm": WeightSpec(shape=(hidden,))}
        if self.has_own_embedding:
            table["draft.embedding"] = embedding_table(self.target_vocab_size, hidden)
        if self.draft_vocab_size is not None:
            table["draft.lm_head"] = row_sharded((self.draft_vocab_size, hidden), divided_by="all")
            table["draft.draft_to_target"] = WeightSpec(shape=(self.draft_vocab_size,), is_integer=True)
        if self.mtp is not None and self.mtp.has_offset_norms:
            table |= {name: replace(table[name], is_float32=True) for name in table if is_offset_norm(name)}
        return table

    def _parts(self) -> WeightTable:
        """What the algorithm adds beyond the layers."""
        vocab_size = self.target_vocab_size
        if self.chain is not None:
            return self.chain.fc_norms(len(self.target_layer_ids), self.target_hidden_size)
        if self.mtp is not None:
            return self.mtp.norms(self.hidden_size)
        if self.selector is not None:
            return self.selector.weights("draft.selector", self.hidden_size, vocab_size)
        if self.heads is not None:
            draft_vocab_size = self.draft_vocab_size or vocab_size
            return self.heads.weights(self.hidden_size, vocab_size=vocab_size, draft_vocab_size=draft_vocab_size)
        return {}


def check_pair(target: TargetSpec, draft: DraftSpec) -> None:
    """Raises ValueError when the drafter does not fit the target."""
    outside = [layer_id for layer_id in draft.target_layer_ids if layer_id >= target.num_layers]
    if outside:
        raise ValueError(f"target_layer_ids below the target's {target.num_layers} layers (not {outside})")
    sizes = [
        ("target_hidden_size", target.hidden_size, draft.target_hidden_size),
        ("target_vocab_size", target.vocab_size, draft.target_vocab_size),
    ]
    if not draft.has_own_embedding or draft.draft_vocab_size is None:
        sizes.append(("hidden_size (it shares the target's embedding or head)", target.hidden_size, draft.hidden_size))
    for name, ours, theirs in sizes:
        if ours != theirs:
            raise ValueError(f"the drafter's {name} as the target has it, {ours} (not {theirs})")


def engine_states(
    target: TargetSpec, draft: DraftSpec | None, *, dtype: FloatDType, quantization: QuantizationSpec | None = None
) -> EngineStates:
    """States of an engine, unsharded; `quantization` decides which pages are FP8."""
    quantization = quantization or QuantizationSpec()
    return EngineStates(
        target=target.states(
            dtype=dtype, kv_scales=quantization.target_kv, num_records=1 + (draft.max_draft_len if draft else 0)
        ),
        draft=draft.states(dtype=dtype, kv_scales=quantization.draft_kv) if draft else (),
    )


def engine_weights(target: TargetSpec, draft: DraftSpec | None, quantization: QuantizationSpec | None) -> WeightTable:
    """Canonical weights of an engine, with the copies of the head that quantization adds."""
    table = target.weights() | (draft.weights() if draft else {})
    for name in extra_heads(table, quantization.linears if quantization else ()):
        table[name] = row_sharded((target.vocab_size, target.hidden_size), divided_by="all")
    return table
