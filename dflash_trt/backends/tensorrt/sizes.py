"""Sizes of an engine's ranks, from the headers of their weights.

The plan of a check says nothing of them: TensorRT keeps equal constants once, and blank weights are all equal.
"""

from dataclasses import dataclass

from dflash_trt.backends.tensorrt.host_weights import num_rope_positions
from dflash_trt.core.dtype import num_bytes_of
from dflash_trt.core.model.decoder import DecoderSpec
from dflash_trt.engine_dir import EngineLimits, PretrainedConfig, tensor_headers


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSizes:
    """Bytes per rank. `plan_bytes` counts the plan's constants, without kernels and layer descriptions."""

    weights_bytes: int
    plan_bytes: int
    kv_bytes_per_token: int
    state_bytes_per_slot: int  # recurrent state of a request


def rank_sizes(config: PretrainedConfig, limits: EngineLimits) -> RankSizes:
    """Sizes of every rank. Slices of a weight (`draft.kv`, a tied head's) are constants of their own."""
    weights = {name: header.num_bytes for name, header in tensor_headers(config).items()}
    total = sum(weights.values())
    sliced = sum(size for name, size in weights.items() if name.startswith("draft.kv"))
    if "target.lm_head" not in weights and config.mapping.tp_size > 1:
        sliced += weights["target.embedding"] // config.mapping.tp_size
    return RankSizes(
        weights_bytes=total,
        plan_bytes=total + sliced + _rope_bytes(config, limits),
        kv_bytes_per_token=config.states().bytes_per_token,
        state_bytes_per_slot=config.states().bytes_per_slot,
    )


def _rope_bytes(config: PretrainedConfig, limits: EngineLimits) -> int:
    """cos and sin of every position, for each distinct rotary embedding."""
    decoders: list[DecoderSpec] = [config.target, *([config.draft] if config.draft else [])]
    rotaries = {rotary for decoder in decoders for rotary in decoder.rotaries}
    num_positions = num_rope_positions(limits.max_seq_len, limits.max_draft_len)
    return sum(2 * num_positions * rotary.head_dim for rotary in rotaries) * num_bytes_of(config.dtype)
