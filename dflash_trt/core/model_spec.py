"""What a target and a drafter are, as data. One decoder is described by these fields, not by a class per family.

Foreign config.json files become these in `checkpoint/`; the network reads nothing else.
"""

from typing import Literal

from dflash_trt.core.frozen import Frozen

DType = Literal["float32", "bfloat16", "float16"]


class RopeSpec(Frozen):
    """Rotary embedding, rotate-half style. Formulas: `transformers.modeling_rope_utils`.

    `attention_factor` multiplies cos and sin (yarn); None means yarn's own 0.1 * ln(factor) + 1.
    """

    theta: float
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncates_correction_range: bool = True  # yarn


class AttentionSpec(Frozen):
    """What one layer's queries may see.

    `window` counts the token itself: a key is visible when query_position - key_position < window; a layer that is
    not causal also asks key_position - query_position < window (Hugging Face's convention).
    """

    window: int | None = None
    is_causal: bool = True


class DecoderSpec(Frozen):
    """The fields a target and a drafter share. Sizes are those of the whole model, before sharding."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    attention: tuple[AttentionSpec, ...]  # one per layer
    has_qk_norm: bool
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    max_position_embeddings: int

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


class MoeSpec(Frozen):
    """A mixture of experts in place of the MLP of some layers: each token goes through its best few experts.

    `routing` "softmax_top_k": softmax over all experts in float32, then the largest few, divided by their sum where
    `normalizes_top_k`. "top_k_softmax": the largest few logits, then softmax over those; they sum to 1 as they are.

    `activation` "silu": silu(gate) * up. "clamped_swiglu": gate at most `limit`, up within +-`limit`, then
    gate * sigmoid(alpha * gate) * (up + 1) (gpt-oss).
    """

    layer_ids: tuple[int, ...]  # the layers with experts; the others keep a dense MLP
    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # of one expert
    routing: Literal["softmax_top_k", "top_k_softmax"]
    normalizes_top_k: bool = False
    activation: Literal["silu", "clamped_swiglu"] = "silu"
    limit: float | None = None  # clamped_swiglu
    alpha: float | None = None  # clamped_swiglu
    has_bias: bool = False  # of the router and of the experts


class TargetSpec(DecoderSpec):
    """The model being served.

    `has_sinks`: every head of every layer has a logit of its own in the denominator of its softmax, without a value.
    """

    family: Literal["llama", "qwen3", "qwen3_moe", "gpt_oss"]
    vocab_size: int
    is_embedding_tied: bool
    moe: MoeSpec | None = None
    has_sinks: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def has_experts(self, layer_id: int) -> bool:
        return self.moe is not None and layer_id in self.moe.layer_ids


class DraftSpec(DecoderSpec):
    """The DFlash drafter. `target_layer_ids` are 0-based and name the *output* of that target layer.

    `draft_vocab_size` is None when the drafter uses the target's lm_head; otherwise the drafter brings its own head,
    and draft token i stands for target token `draft_to_target[i]` (a tensor of the checkpoint).
    """

    source_format: Literal["z-lab", "speculators"]
    target_layer_ids: tuple[int, ...]
    target_hidden_size: int
    target_vocab_size: int
    num_target_layers: int | None = None
    draft_block_size: int
    mask_token_id: int
    draft_vocab_size: int | None = None
    has_own_embedding: bool = False
    input_embedding_scale: float = 1.0

    @property
    def max_draft_len(self) -> int:
        """K = draft_block_size - 1: slot 0 is the anchor."""
        return self.draft_block_size - 1
