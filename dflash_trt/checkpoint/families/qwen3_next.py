"""Qwen3-Next, Qwen3-Coder-Next: gated delta nets, every fourth layer gated attention, a shared expert."""

from collections.abc import Collection

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import DecoderSizes
from dflash_trt.checkpoint.families.base import MTP_MODULE, Family, LayerFields
from dflash_trt.checkpoint.families.qwen3_moe import expert_layers
from dflash_trt.checkpoint.families.qwen3_moe import expert_names as routed_names
from dflash_trt.checkpoint.foreign_names import ForeignNames, ForeignTable, stacked_rows
from dflash_trt.checkpoint.hybrid_layers import (
    LEFT_OUT,
    common_delta_names,
    read_hybrid_mixers,
    read_shared_moe,
    shared_names,
)
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.model.gated_delta import GatedDelta


def read_layers(reader: ConfigReader, sizes: DecoderSizes) -> list[LayerFields]:
    mixers = read_hybrid_mixers(reader, sizes)
    moe = read_shared_moe(reader, normalizes=reader.flag("norm_topk_prob", default=True))
    reader.ignore(("intermediate_size",))
    has_experts = set(expert_layers(reader, sizes.num_layers))
    return [
        {"mixer": mixer, "feed_forward": moe if i in has_experts else sizes.dense_fields()}
        for i, mixer in enumerate(mixers)
    ]


def delta_names(canonical: str, foreign: str, mixer: GatedDelta, hidden_size: int) -> ForeignTable:
    """Rows are grouped by key head: [q | k | v | z] and [b | a] of each."""
    per_key = mixer.num_value_heads // mixer.num_key_heads
    lengths = (mixer.key_head_dim, mixer.key_head_dim, *(per_key * mixer.value_head_dim,) * 2)
    return common_delta_names(canonical, foreign, mixer) | {
        f"{canonical}.qkvz": _grouped(f"{foreign}.linear_attn.in_proj_qkvz.weight", lengths, mixer, hidden_size),
        f"{canonical}.ba": _grouped(f"{foreign}.linear_attn.in_proj_ba.weight", (per_key,) * 2, mixer, hidden_size),
    }


def _grouped(name: str, lengths: tuple[int, ...], mixer: GatedDelta, hidden_size: int) -> ForeignNames:
    return stacked_rows(name, lengths, (mixer.num_key_heads * sum(lengths), hidden_size))


def expert_names(canonical: str, foreign: str, moe: Moe, stored_names: Collection[str]) -> ForeignTable:
    return routed_names(canonical, foreign, moe, stored_names) | shared_names(canonical, foreign)


FAMILY = Family(
    architectures=("Qwen3NextForCausalLM",),
    read_layers=read_layers,
    expert_names=expert_names,
    mixer_names={"gated_delta": delta_names},
    has_offset_norms=True,
    left_out=LEFT_OUT,
    mtp=MTP_MODULE,
)
