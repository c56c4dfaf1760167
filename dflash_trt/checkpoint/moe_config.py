"""Expert keys that several families share.

Others (shared experts, expert groups, scoring) are refused.
"""

from dflash_trt.checkpoint.config_reader import ConfigReader

_MAX_EXPERTS = 4096  # far above any model; a corrupt count must not cause huge allocations

# Losses of the router, and outputs of a forward pass.
TRAINING_KEYS = ("router_aux_loss_coef", "output_router_logits")


def num_chosen(reader: ConfigReader, num_experts: int, *names: str) -> int:
    num_chosen = same_integer(reader, *names)
    if num_chosen > num_experts:
        reader.refuse(names[0], expected=f"at most the {num_experts} experts")
    return num_chosen


def same_integer(reader: ConfigReader, name: str, *aliases: str) -> int:
    """Read a key that has several spellings, which must agree."""
    present = [alias for alias in (name, *aliases) if reader.has(alias)]
    values = [reader.integer(alias, maximum=_MAX_EXPERTS) for alias in present or [name]]
    for alias, value in zip(present[1:], values[1:], strict=True):
        if value != values[0]:
            expected = f"{values[0]}, as {reader.subject(present[0])}"
            reader.refuse(alias, expected=expected, hint="Keep the one that the checkpoint was trained with.")
    return values[0]
