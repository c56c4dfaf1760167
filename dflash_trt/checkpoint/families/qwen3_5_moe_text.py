"""Qwen3.5 and 3.6 with experts, the language model alone."""

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import DecoderSizes
from dflash_trt.checkpoint.families.base import MTP_MODULE, Family, LayerFields
from dflash_trt.checkpoint.families.qwen3_5_text import delta_names
from dflash_trt.checkpoint.families.qwen3_next import expert_names
from dflash_trt.checkpoint.hybrid_layers import LEFT_OUT, read_hybrid_mixers, read_shared_moe


def read_layers(reader: ConfigReader, sizes: DecoderSizes) -> list[LayerFields]:
    moe = read_shared_moe(reader, normalizes=True)
    return [{"mixer": mixer, "feed_forward": moe} for mixer in read_hybrid_mixers(reader, sizes)]


FAMILY = Family(
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    read_layers=read_layers,
    expert_names=expert_names,
    mixer_names={"gated_delta": delta_names},
    has_offset_norms=True,
    left_out=LEFT_OUT,
    mtp=MTP_MODULE,
)
