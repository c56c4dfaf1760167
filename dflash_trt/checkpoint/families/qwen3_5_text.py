"""Qwen3.5, 3.6 and 3.8, the language model alone: gated delta nets and gated attention, dense."""

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import DecoderSizes, require_dense
from dflash_trt.checkpoint.families.base import MTP_MODULE, Family, LayerFields
from dflash_trt.checkpoint.foreign_names import ForeignNames, ForeignTable, part_rows
from dflash_trt.checkpoint.hybrid_layers import LEFT_OUT, common_delta_names, read_hybrid_mixers
from dflash_trt.core.model.gated_delta import GatedDelta


def read_layers(reader: ConfigReader, sizes: DecoderSizes) -> list[LayerFields]:
    require_dense(reader)
    return [{"mixer": mixer, "feed_forward": sizes.dense_fields()} for mixer in read_hybrid_mixers(reader, sizes)]


def delta_names(canonical: str, foreign: str, mixer: GatedDelta, hidden_size: int) -> ForeignTable:
    """q, k and v are one matrix; z, beta's and the decay's are others."""
    net = f"{foreign}.linear_attn"
    qkv, z, b, a = (f"{net}.in_proj_{name}.weight" for name in ("qkv", "z", "b", "a"))
    rows = part_rows((mixer.k_size, mixer.k_size, mixer.v_size), (mixer.num_channels, hidden_size))
    rows += part_rows((mixer.v_size,), (mixer.v_size, hidden_size))
    return common_delta_names(canonical, foreign, mixer) | {
        f"{canonical}.qkvz": ForeignNames(parts=(qkv, qkv, qkv, z), rows=rows),
        f"{canonical}.ba": ForeignNames(parts=(b, a)),
    }


FAMILY = Family(
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    read_layers=read_layers,
    mixer_names={"gated_delta": delta_names},
    has_offset_norms=True,
    left_out=LEFT_OUT,
    mtp=MTP_MODULE,
)
