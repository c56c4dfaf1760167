"""What a target and a drafter are, as data. One decoder is described by these fields, not by a class per family.

Foreign config.json files become these in `checkpoint/`; the network reads nothing else.
"""

from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from dflash_trt.core.dtype import FloatDType
from dflash_trt.core.frozen import MAX_INT32, Frozen, Index, Size
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from dflash_trt.core.state_spec import EngineStates, PagedKv, paged_kv_layers

# Bounds are far beyond any model. What lies outside is a corrupt file, and would compute something without a word.
_MAX_LAYERS = 1000
_MAX_EXPERTS = 4096
_MAX_BLOCK_SIZE = 1024

LayerId = Annotated[int, Field(ge=0, lt=_MAX_LAYERS)]
NumExperts = Annotated[int, Field(ge=1, le=_MAX_EXPERTS)]
Scale = Annotated[float, Field(gt=0.0, le=1e6)]


class RopeSpec(Frozen):
    """Rotary embedding, rotate-half style. Formulas: `transformers.modeling_rope_utils`.

    `attention_factor` multiplies cos and sin (yarn); None means yarn's own 0.1 * ln(factor) + 1.
    """

    theta: Annotated[float, Field(ge=2.0, le=1e15)]  # yarn divides by its logarithm
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: Annotated[float, Field(ge=1.0, le=1e6)] = 1.0
    original_max_position_embeddings: Size | None = None
    low_freq_factor: Scale | None = None  # llama3
    high_freq_factor: Scale | None = None  # llama3
    beta_fast: Scale = 32.0  # yarn
    beta_slow: Scale = 1.0  # yarn
    attention_factor: Scale | None = None  # yarn
    mscale: Scale | None = None  # yarn
    mscale_all_dim: Scale | None = None  # yarn
    truncates_correction_range: bool = True  # yarn

    @field_validator("high_freq_factor")
    @classmethod
    def _above_low_frequencies(cls, high: float | None, info: ValidationInfo) -> float | None:
        low = info.data.get("low_freq_factor")
        if high is not None and low is not None and high <= low:
            raise ValueError(f"more than low_freq_factor {low}")
        return high

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.scaling in ("llama3", "yarn") and self.original_max_position_embeddings is None:
            raise ValueError(f"original_max_position_embeddings, as scaling is {self.scaling}")
        if self.scaling == "llama3" and (self.low_freq_factor is None or self.high_freq_factor is None):
            raise ValueError("low_freq_factor and high_freq_factor, as scaling is llama3")
        if self.scaling == "yarn" and self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast above beta_slow (not {self.beta_fast} and {self.beta_slow})")
        return self


class Rotary(NamedTuple):
    """A rotary embedding of heads of one size. Equal values share their tables."""

    rope: RopeSpec
    head_dim: int


class AttentionSpec(Frozen):
    """What one layer's queries may see.

    `window` counts the token itself: a key is visible when query_position - key_position < window; a layer that is
    not causal also asks key_position - query_position < window (Hugging Face's convention).

    `is_window_anchored`, in a drafter: every slot of a block sees the same context, the last `window` tokens before the
    anchor, and the window hides nothing of the block (Speculators' convention).
    """

    window: Size | None = None
    is_causal: bool = True
    is_window_anchored: bool = False


class DecoderSpec(Frozen):
    """The fields a target and a drafter share. Sizes are those of the whole model, before sharding."""

    role: ClassVar[str]

    hidden_size: Size
    intermediate_size: Size
    num_heads: Size
    num_kv_heads: Size
    head_dim: Annotated[Size, Field(multiple_of=2)]  # RoPE rotates pairs
    rms_norm_eps: Annotated[float, Field(ge=1e-12, le=0.1)]
    rope: RopeSpec
    attention: Annotated[tuple[AttentionSpec, ...], Field(min_length=1, max_length=_MAX_LAYERS)]  # one per layer
    has_qk_norm: bool
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    max_position_embeddings: Size

    @field_validator("num_kv_heads")
    @classmethod
    def _divide_heads(cls, num_kv_heads: int, info: ValidationInfo) -> int:
        num_heads = info.data.get("num_heads", num_kv_heads)
        if num_heads % num_kv_heads:
            raise ValueError(f"a divisor of num_heads {num_heads}")
        return num_kv_heads

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def rotary(self) -> Rotary:
        return Rotary(self.rope, self.head_dim)

    def states(self, *, dtype: FloatDType, kv_scales: tuple[LayerKvScales, ...] | None = None) -> tuple[PagedKv, ...]:
        """State of each layer of the whole model; `kv_scales` are those of FP8 pages."""
        return paged_kv_layers(
            self.role,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
            scales=kv_scales,
        )


class MoeSpec(Frozen):
    """A mixture of experts in place of the MLP of some layers: each token goes through its best few experts.

    `routing` "softmax_top_k": softmax over all experts in float32, then the largest few, divided by their sum where
    `normalizes_top_k`. "top_k_softmax": the largest few logits, then softmax over those; they sum to 1 as they are.

    `activation` "silu": silu(gate) * up. "clamped_swiglu": gate at most `limit`, up within +-`limit`, then
    gate * sigmoid(alpha * gate) * (up + 1) (gpt-oss).
    """

    layer_ids: tuple[LayerId, ...]  # the layers with experts; the others keep a dense MLP
    num_experts: NumExperts
    num_experts_per_token: NumExperts
    intermediate_size: Size  # of one expert
    routing: Literal["softmax_top_k", "top_k_softmax"]
    normalizes_top_k: bool = False
    activation: Literal["silu", "clamped_swiglu"] = "silu"
    limit: Scale | None = None  # clamped_swiglu
    alpha: Scale | None = None  # clamped_swiglu
    has_bias: bool = False  # of the router and of the experts

    @field_validator("num_experts_per_token")
    @classmethod
    def _among_experts(cls, num_chosen: int, info: ValidationInfo) -> int:
        num_experts = info.data.get("num_experts", num_chosen)
        if num_chosen > num_experts:
            raise ValueError(f"at most num_experts {num_experts}")
        return num_chosen

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.activation == "clamped_swiglu" and (self.limit is None or self.alpha is None):
            raise ValueError("limit and alpha, as activation is clamped_swiglu")
        return self


class TargetSpec(DecoderSpec):
    """The model being served.

    `has_sinks`: every head of every layer has a logit of its own in the denominator of its softmax, without a value.
    """

    role: ClassVar[str] = "target"

    family: Literal["llama", "qwen3", "qwen3_moe", "gpt_oss"]
    vocab_size: Size
    is_embedding_tied: bool
    moe: MoeSpec | None = None
    has_sinks: bool = False
    eos_token_ids: tuple[Index, ...] = ()
    bos_token_id: Index | None = None

    @field_validator("eos_token_ids", "bos_token_id")
    @classmethod
    def _in_vocabulary(cls, ids: Any, info: ValidationInfo) -> Any:
        vocab_size = info.data.get("vocab_size", MAX_INT32)
        if any(token_id >= vocab_size for token_id in (ids if isinstance(ids, tuple) else (ids or 0,))):
            raise ValueError(f"ids below vocab_size {vocab_size}")
        return ids

    @model_validator(mode="after")
    def _check_expert_layers(self) -> Self:
        if self.moe is not None and any(layer_id >= self.num_layers for layer_id in self.moe.layer_ids):
            raise ValueError(f"experts in layers below {self.num_layers} (not in {max(self.moe.layer_ids)})")
        return self

    def has_experts(self, layer_id: int) -> bool:
        return self.moe is not None and layer_id in self.moe.layer_ids


class DraftSpec(DecoderSpec):
    """The DFlash drafter. `target_layer_ids` are 0-based and name the *output* of that target layer: the residual sum
    after it, which for the last layer is the input of the final norm.

    `draft_vocab_size` is None when the drafter uses the target's lm_head; otherwise the drafter brings its own head,
    and draft token i stands for target token `draft_to_target[i]` (a tensor of the checkpoint).
    """

    role: ClassVar[str] = "draft"

    source_format: Literal["z-lab", "speculators"]
    target_layer_ids: Annotated[tuple[LayerId, ...], Field(min_length=1, max_length=_MAX_LAYERS)]
    target_hidden_size: Size
    target_vocab_size: Size
    num_target_layers: Annotated[int, Field(ge=1, le=_MAX_LAYERS)] | None = None
    draft_block_size: Annotated[int, Field(ge=2, le=_MAX_BLOCK_SIZE)]
    mask_token_id: Index
    draft_vocab_size: Size | None = None
    has_own_embedding: bool = False
    input_embedding_scale: Scale = 1.0

    @field_validator("mask_token_id")
    @classmethod
    def _in_vocabulary(cls, token_id: int, info: ValidationInfo) -> int:
        vocab_size = info.data.get("target_vocab_size", MAX_INT32)
        if token_id >= vocab_size:
            raise ValueError(f"an id below the target's vocab_size {vocab_size}")
        return token_id

    @field_validator("draft_vocab_size")
    @classmethod
    def _within_vocabulary(cls, draft_vocab_size: int | None, info: ValidationInfo) -> int | None:
        vocab_size = info.data.get("target_vocab_size", MAX_INT32)
        if (draft_vocab_size or 0) > vocab_size:
            raise ValueError(f"at most the target's vocab_size {vocab_size}")
        return draft_vocab_size

    @property
    def max_draft_len(self) -> int:
        """K = draft_block_size - 1: slot 0 is the anchor."""
        return self.draft_block_size - 1


def check_pair(target: TargetSpec, draft: DraftSpec) -> None:
    """Raises ValueError when the drafter cannot run beside the target."""
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
    target: TargetSpec,
    draft: DraftSpec | None,
    *,
    dtype: FloatDType,
    quantization: QuantizationSpec | None = None,
) -> EngineStates:
    """State of an engine of these models, unsharded; `quantization` says which pages are FP8."""
    quantization = quantization or QuantizationSpec()
    return EngineStates(
        target=target.states(dtype=dtype, kv_scales=quantization.target_kv),
        draft=draft.states(dtype=dtype, kv_scales=quantization.draft_kv) if draft else (),
    )
