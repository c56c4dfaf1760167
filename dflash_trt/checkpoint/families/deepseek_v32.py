"""DeepSeek-V3.2: DeepSeek-V3 with an indexer, for contexts that it reads whole.

The indexer names the `index_topk` tokens of the context that a token attends to. While there are no more, it names all
of them, and the layer computes what one without an indexer computes. Longer sequences are refused.
"""

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import DecoderSizes
from dflash_trt.checkpoint.families.base import Family, LayerFields
from dflash_trt.checkpoint.families.deepseek_v3 import read_layers as read_latent_layers
from dflash_trt.checkpoint.sigmoid_router import expert_names

_INDEX_TOPK = 2048  # transformers' default

# Keys of the indexer, of the layers that share it, and of uniform layer kinds.
_INDEXER_KEYS = (
    "index_head_dim",
    "index_n_heads",
    "index_skip_topk_offset",
    "index_topk_freq",
    "index_topk_pattern",
    "indexer_rope_interleave",
    "indexer_types",
    "layer_types",
)


def read_layers(reader: ConfigReader, sizes: DecoderSizes) -> list[LayerFields]:
    reader.ignore(_INDEXER_KEYS)
    return read_latent_layers(reader, sizes)


def max_positions(reader: ConfigReader, trained: int) -> int:
    """As many tokens as the indexer names."""
    positions = min(trained, reader.optional_integer("index_topk") or _INDEX_TOPK)
    if positions < trained:
        reason = f"{positions}, as far as every token attends to all before it (sparse attention is not implemented)"
        reader.note("max_position_embeddings", reason)
    return positions


FAMILY = Family(
    architectures=("DeepseekV32ForCausalLM",),
    read_layers=read_layers,
    expert_names=expert_names,
    max_positions=max_positions,
    has_drafting_layers=True,
    left_out_modules=(".self_attn.indexer.",),
)
