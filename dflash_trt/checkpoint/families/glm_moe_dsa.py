"""GLM-5: latent attention with DeepSeek-V3.2's indexer, for contexts that it reads whole."""

from dataclasses import replace
from types import MappingProxyType

from dflash_trt.checkpoint.families import deepseek_v32

FAMILY = replace(
    deepseek_v32.FAMILY,
    architectures=("GlmMoeDsaForCausalLM",),
    defaults=MappingProxyType({"n_group": 1, "topk_group": 1}),  # from transformers' GlmMoeDsaConfig
)
