"""Keys of a DFlash2 drafter, which z-lab and Speculators name alike -> fields of a DraftSpec."""

from typing import Any

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import DecoderSizes
from dflash_trt.core.model.dflash2 import MAX_TAPS

KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def read_dflash2(
    reader: ConfigReader,
    sizes: DecoderSizes,
    *,
    defaults: dict[str, int] | None = None,  # values for absent KEYS; None means that every key is required
    output_multiplier: float = 1.0,
    logit_softcap: float | None = None,
) -> dict[str, Any]:
    """Fields of a DraftSpec; sizes that do not fit the decoder's are refused here, by the file's names."""
    limits = {"conv_kernel_size": MAX_TAPS, "selector_top_k": sizes.vocab_size}
    values = {}
    for name in KEYS:
        limit = {"maximum": limits[name]} if name in limits else {}
        given = reader.optional_integer(name, **limit) if defaults else reader.integer(name, **limit)
        values[name] = (defaults or {})[name] if given is None else given
    if sizes.hidden_size % values["conv_group_size"]:
        reader.refuse("conv_group_size", expected=f"a divisor of hidden_size {sizes.hidden_size}")
    return {
        "algorithm": "dflash2",
        "logit_softcap": logit_softcap,
        "conv": {"kernel_size": values["conv_kernel_size"], "group_size": values["conv_group_size"]},
        "selector": {
            "rank": values["selector_rank"],
            "top_k": values["selector_top_k"],
            "output_multiplier": output_multiplier,
        },
    }
