"""Expert keys that several families share.

Others (shared experts, expert groups, scoring) are refused.
"""

from typing import Any

from dflash_trt.checkpoint.config_reader import ConfigReader

_MAX_EXPERTS = 4096  # far above any model; a corrupt count must not cause huge allocations

# Losses of the router, and outputs of a forward pass.
TRAINING_KEYS = ("router_aux_loss_coef", "output_router_logits")


def expert_counts(
    reader: ConfigReader, names: tuple[str, ...], *, chosen: tuple[str, ...] = ("num_experts_per_tok",)
) -> dict[str, Any]:
    """Fields of a Moe: the number of its experts, by any of `names`, and how many a token has."""
    num_experts, num_chosen = _same_integer(reader, *names), _same_integer(reader, *chosen)
    if num_chosen > num_experts:
        reader.refuse(chosen[0], expected=f"at most the {num_experts} experts")
    return {"kind": "moe", "num_experts": num_experts, "num_experts_per_token": num_chosen}


def softmax_moe(reader: ConfigReader, *, normalizes: bool) -> dict[str, Any]:
    """Fields of a Moe as the Qwen families have it, without shared experts or biases."""
    reader.ignore(TRAINING_KEYS)
    return {
        **expert_counts(reader, ("num_experts", "num_local_experts")),
        "intermediate_size": reader.integer("moe_intermediate_size"),
        "routing": "softmax_top_k",
        "normalizes_top_k": normalizes,
    }


def _same_integer(reader: ConfigReader, name: str, *aliases: str) -> int:
    """Read a key that has several spellings, which must agree."""
    present = [alias for alias in (name, *aliases) if reader.has(alias)]
    values = [reader.integer(alias, maximum=_MAX_EXPERTS) for alias in present or [name]]
    for alias, value in zip(present[1:], values[1:], strict=True):
        if value != values[0]:
            expected = f"{values[0]}, as {reader.subject(present[0])}"
            reader.refuse(alias, expected=expected, hint="Keep the one that the checkpoint was trained with.")
    return values[0]
