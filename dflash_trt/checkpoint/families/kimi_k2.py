"""Kimi-K2, and the language model of Kimi-K2.5, 2.6 and 2.7: DeepSeek-V3's arithmetic in other sizes."""

from dflash_trt.checkpoint.families.base import Family
from dflash_trt.checkpoint.families.deepseek_v3 import read_layers
from dflash_trt.checkpoint.sigmoid_router import expert_names

FAMILY = Family(
    architectures=("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
    other_model_types=("deepseek_v3",),
    read_layers=read_layers,
    expert_names=expert_names,
    has_drafting_layers=True,
    left_out=("vision_tower.", "mm_projector."),
)
