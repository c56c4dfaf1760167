"""Qwen3.5 and 3.6 with experts, the language model alone."""

from dataclasses import replace

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import DecoderSizes
from dflash_trt.checkpoint.families import qwen3_5_text
from dflash_trt.checkpoint.families.base import LayerFields
from dflash_trt.checkpoint.families.qwen3_next import expert_names
from dflash_trt.checkpoint.hybrid_layers import read_hybrid_mixers, read_shared_moe


def read_layers(reader: ConfigReader, sizes: DecoderSizes) -> list[LayerFields]:
    moe = read_shared_moe(reader, normalizes=True)
    return [{"mixer": mixer, "feed_forward": moe} for mixer in read_hybrid_mixers(reader, sizes)]


FAMILY = replace(
    qwen3_5_text.FAMILY,
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    read_layers=read_layers,
    expert_names=expert_names,
)
