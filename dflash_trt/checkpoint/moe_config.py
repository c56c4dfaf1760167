"""The experts of a target's config.json -> the fields of a MoeSpec.

Knows the key names of Qwen3-MoE and gpt-oss. What it does not ask for (shared experts, expert groups, other scoring)
is refused as an unknown key.
"""

from typing import Any

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import NOT_IMPLEMENTED

_MAX_EXPERTS = 4096  # far above any model; a corrupt count must not make us allocate
_SWIGLU_LIMIT, _SWIGLU_ALPHA = 7.0, 1.702  # gpt-oss; the second is in nobody's config.json

# Losses of the router, and what a forward pass returns.
_TRAINING_KEYS = ("router_aux_loss_coef", "output_router_logits")


def read_qwen3_moe(reader: ConfigReader, num_layers: int) -> dict[str, Any]:
    """Experts in every `decoder_sparse_step`-th layer but those of `mlp_only_layers`; no shared ones, no biases."""
    reader.ignore(_TRAINING_KEYS)
    reader.require("shared_expert_intermediate_size", 0, mend=NOT_IMPLEMENTED)
    step = reader.optional_integer("decoder_sparse_step") or 1
    dense_layers = set(reader.optional_integers("mlp_only_layers") or ())
    layer_ids = tuple(i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense_layers)
    num_experts = _same_integer(reader, "num_experts", "num_local_experts")
    return {
        "layer_ids": layer_ids,
        "num_experts": num_experts,
        "num_experts_per_token": _num_chosen(reader, num_experts, "num_experts_per_tok"),
        "intermediate_size": reader.integer("moe_intermediate_size"),
        "routing": "softmax_top_k",
        "normalizes_top_k": reader.flag("norm_topk_prob", default=False),
    }


def read_gpt_oss_moe(reader: ConfigReader, num_layers: int, intermediate_size: int) -> dict[str, Any]:
    """Experts with biases in every layer; `intermediate_size` is that of one expert."""
    reader.ignore(_TRAINING_KEYS)
    num_experts = _same_integer(reader, "num_local_experts", "num_experts")
    return {
        "layer_ids": tuple(range(num_layers)),
        "num_experts": num_experts,
        "num_experts_per_token": _num_chosen(reader, num_experts, "num_experts_per_tok", "experts_per_token"),
        "intermediate_size": intermediate_size,
        "routing": "top_k_softmax",
        "activation": "clamped_swiglu",
        "limit": reader.optional_number("swiglu_limit") or _SWIGLU_LIMIT,
        "alpha": _SWIGLU_ALPHA,
        "has_bias": True,
    }


def _num_chosen(reader: ConfigReader, num_experts: int, *names: str) -> int:
    num_chosen = _same_integer(reader, *names)
    if num_chosen > num_experts:
        reader.refuse(names[0], expected=f"at most the {num_experts} experts", mend="Correct the value.")
    return num_chosen


def _same_integer(reader: ConfigReader, name: str, *aliases: str) -> int:
    """Checkpoints of one family spell a key differently; two spellings must agree."""
    present = [alias for alias in (name, *aliases) if reader.has(alias)]
    values = [reader.integer(alias, maximum=_MAX_EXPERTS) for alias in present or [name]]
    for alias, value in zip(present[1:], values[1:], strict=True):
        if value != values[0]:
            expected = f"{values[0]}, as {reader.subject(present[0])}"
            reader.refuse(alias, expected=expected, mend="Keep the one that the checkpoint was trained with.")
    return values[0]
