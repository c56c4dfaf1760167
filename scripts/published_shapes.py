"""config.json files of published targets and drafters, by repository: the shapes that their cards and papers state.

Drafters whose shape nobody has published are in ASSUMED, with what was taken from others of their family. Sources:
the model cards; the configs in tests/data/drafter_configs; fixtures of other engines for the sizes of Qwen3.5-122B and
397B; github.com/google/tunix PR 1570 for Gemma 4; github.com/deepseek-ai/DeepSpec for its DSpark drafters; tests of
vllm.cpp, modular/modular, nemo_rl, sglang and others, cards and sizes of files for Red Hat's (known_pairs.toml).
"""

import json
from pathlib import Path
from typing import Any

from scripts.published_configs import repositories, write_checkpoint

_ROOT = Path(__file__).resolve().parents[1]
Config = dict[str, Any]


def _qwen3(hidden: int, intermediate: int, layers: int, **fields: Any) -> Config:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
        "eos_token_id": 151645,
        **fields,
    }


def _drafter(target: Config, *, layers: int, block_size: int, taps: list[int], mask: int, **fields: Any) -> Config:
    shapes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    return {
        **_qwen3(0, 0, layers),
        **{name: target[name] for name in shapes},
        "architectures": ["DFlashDraftModel"],
        "num_target_layers": target["num_hidden_layers"],
        "block_size": block_size,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": taps},
        **fields,
    }


def _read(path: str) -> Config:
    fields: Config = json.loads((_ROOT / path).read_text())
    return fields


_LLAMA_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_QWEN3_4B = _qwen3(2560, 9728, 36, tie_word_embeddings=True)
_QWEN3_8B = _qwen3(4096, 12288, 36)
_QWEN3_14B = _qwen3(5120, 17408, 40, num_attention_heads=40)
_CODER = _qwen3(
    2048,
    6144,
    48,
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    num_key_value_heads=4,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    max_position_embeddings=262144,
    rope_theta=1e7,
)
_QWEN3_32B = _qwen3(5120, 25600, 64, num_attention_heads=64)
_QWEN3_30B = _CODER | {"max_position_embeddings": 40960, "rope_theta": 1e6}
_LLAMA = _qwen3(
    4096,
    14336,
    32,
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    rope_scaling={**_LLAMA_ROPE, "original_max_position_embeddings": 8192},
    vocab_size=128256,
    eos_token_id=128009,
)
_GPT_OSS = _read("scripts/full_size/gpt-oss-20b.json")
_GPT_OSS_LARGE = _GPT_OSS | {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}
_BLOCK_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"]}
_FP8, _NVFP4 = _MODELOPT | {"quant_algo": "FP8"}, _MODELOPT | {"quant_algo": "NVFP4", "group_size": 16}
_GATES = [f"model.layers.{layer}.mlp.gate" for layer in range(48)]

_HYBRID: Config = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "output_gate_type": "swish",
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "vocab_size": 248320,
    "eos_token_id": 248044,
}


def _hybrid(hidden: int, layers: int, heads: tuple[int, int], value_heads: int, **fields: Any) -> Config:
    """Qwen3.5 to 3.8; the language model's own config."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "linear_num_value_heads": value_heads}
    return _HYBRID | sizes | {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]} | fields


def _experts(count: int, chosen: int, size: int) -> Config:
    names = {"model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    sizes = {"num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": size}
    return names | sizes | {"shared_expert_intermediate_size": size}


_QWEN_27B = _hybrid(5120, 64, (24, 4), 48, intermediate_size=17408)
_QWEN_35B = _hybrid(2048, 40, (16, 2), 32, **_experts(256, 8, 512))
_CODER_NEXT = _hybrid(
    2048,
    48,
    (16, 2),
    32,
    **_experts(512, 10, 512),
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    intermediate_size=5120,
    vocab_size=151936,
    eos_token_id=151645,
) | {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}
_MINIMAX: Config = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rotary_dim": 64,
    "rope_theta": 5e6,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
    "max_position_embeddings": 196608,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": 200064,
    "eos_token_id": 200020,
    "quantization_config": _BLOCK_FP8 | {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
_YARN = {"type": "yarn", "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
KIMI: Config = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": _YARN | {"original_max_position_embeddings": 4096},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 163840,
    "eos_token_id": 163586,
    "quantization_config": {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4}},
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    },
}
_SLIDING_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_FULL_ROPE = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}


def _gemma(hidden: int, intermediate: int, layers: int, heads: tuple[int, int], full: int, **fields: Any) -> Config:
    """Gemma 4; `full` K/V heads in the layers of full attention, which are every sixth."""
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "num_global_key_value_heads": full,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "layer_types": [*(["sliding_attention"] * 5), "full_attention"] * (layers // 6),
        "sliding_window": 1024,
        "rope_parameters": {"sliding_attention": _SLIDING_ROPE, "full_attention": _FULL_ROPE},
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "vocab_size": 262144,
        "eos_token_id": 1,
        **fields,
    }


_GEMMA_EXPERTS = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
TARGETS: dict[str, Config] = {
    "Qwen/Qwen3-4B": _QWEN3_4B,
    "Qwen/Qwen3-4B-FP8": _QWEN3_4B | {"quantization_config": _BLOCK_FP8 | {"modules_to_not_convert": ["lm_head"]}},
    "Qwen/Qwen3-8B": _QWEN3_8B,
    "Qwen/Qwen3-14B": _QWEN3_14B,
    "Qwen/Qwen3-32B": _QWEN3_32B,
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": _CODER,
    "nvidia/Qwen3-8B-FP8": _QWEN3_8B | {"quantization_config": _FP8},
    "nvidia/Qwen3-8B-NVFP4": _QWEN3_8B | {"quantization_config": _NVFP4},
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA,
    "nvidia/Llama-3.1-8B-Instruct-FP8": _LLAMA | {"quantization_config": _FP8},
    "nvidia/Llama-3.1-8B-Instruct-NVFP4": _LLAMA | {"quantization_config": _NVFP4},
    "openai/gpt-oss-20b": _GPT_OSS,
    "openai/gpt-oss-120b": _GPT_OSS_LARGE,
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": _CODER,
    "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8": _CODER
    | {"quantization_config": _BLOCK_FP8 | {"modules_to_not_convert": ["lm_head", *_GATES]}},
    "MiniMaxAI/MiniMax-M2.5": _MINIMAX,
    "MiniMaxAI/MiniMax-M2.7": _MINIMAX,
    "moonshotai/Kimi-K2.5": KIMI,
    "moonshotai/Kimi-K2.6": KIMI,
    "Qwen/Qwen3.8-27B": _QWEN_27B,
    "Qwen/Qwen3.6-27B": _QWEN_27B,
    "Qwen/Qwen3.6-35B-A3B": _QWEN_35B,
    "Qwen/Qwen3.5-4B": _hybrid(2560, 32, (16, 4), 32, intermediate_size=9216, tie_word_embeddings=True),
    "Qwen/Qwen3.5-9B": _hybrid(4096, 32, (16, 4), 32, intermediate_size=12288),
    "Qwen/Qwen3.5-27B": _QWEN_27B,
    "Qwen/Qwen3.5-35B-A3B": _QWEN_35B,
    "Qwen/Qwen3.5-122B-A10B": _hybrid(3072, 48, (32, 2), 64, **_experts(256, 8, 1024)),
    "Qwen/Qwen3.5-397B-A17B": _hybrid(4096, 60, (32, 2), 64, **_experts(512, 10, 1024)),
    "Qwen/Qwen3-Coder-Next": _CODER_NEXT,
    "google/gemma-4-31B-it": _gemma(5376, 21504, 60, (32, 16), 4),
    "google/gemma-4-26B-A4B-it": _gemma(2816, 2112, 30, (16, 8), 2, **_GEMMA_EXPERTS),
}


def _windowed(target: Config, full: int, window: int, *, layers: int, taps: list[int], **fields: Any) -> Config:
    """A drafter of sliding layers, of which the last is full; heads of 128, as Qwen's."""
    kinds = ["sliding_attention"] * (layers - full) + ["full_attention"] * full
    slides = {"layer_types": kinds, "sliding_window": window, "use_sliding_window": True}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    mask = fields.pop("mask", 248077)
    made = _drafter(target | heads, layers=layers, block_size=fields.pop("block_size", 16), taps=taps, mask=mask)
    return made | slides | {"max_position_embeddings": 262144, "rope_theta": 1e7} | fields


def _deepspec(target: Config, taps: list[int]) -> Config:
    """DeepSpec's `build_draft_config`: the target's file with five layers and the keys of the heads."""
    heads = {"markov_rank": 256, "markov_head_type": "vanilla"}
    heads |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    return (
        target
        | heads
        | {
            "architectures": ["Qwen3DSparkModel"],
            "num_hidden_layers": 5,
            "num_target_layers": target["num_hidden_layers"],
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"] * 5,
            "block_size": 7,
            "mask_token_id": 151669,
            "num_anchors": 512,
            "target_layer_ids": taps,
        }
    )


def _red_hat(layer: Config, taps: list[int], mask: int, *, from_anchor: bool) -> Config:
    """Speculators' file, with windows in five layers."""
    sliding = {"layer_types": ["sliding_attention"] * 5, "sliding_window": 2048, "use_sliding_window": True}
    shape = {"model_type": "qwen3", "num_hidden_layers": 5, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144}
    return {
        "speculators_model_type": "dspark",
        "aux_hidden_state_layer_ids": taps,
        "block_size": 8,
        "draft_vocab_size": 32000,
        "markov_head_type": "vanilla",
        "markov_rank": 256,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "mask_token_id": mask,
        "sample_from_anchor": from_anchor,
        "sliding_window_non_causal": False,
        "transformer_layer_config": shape | sliding | layer,
    }


def _layer(target: Config, **fields: Any) -> Config:
    """Of Speculators, like one of the target's."""
    shapes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    shapes += ("vocab_size", "max_position_embeddings", "rms_norm_eps")
    rope = {name: target[name] for name in ("rope_theta", "rope_scaling") if name in target}
    return {"model_type": "llama", **{name: target[name] for name in shapes}, **rope, **fields}


def _blocks(target: Config, taps: list[int], mask: int, **fields: Any) -> Config:
    """Red Hat's DFlash, of Speculators."""
    return {
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": taps,
        "block_size": 8,
        "draft_vocab_size": 32000,
        "mask_token_id": mask,
        "transformer_layer_config": _layer(target, num_hidden_layers=5, **fields),
    }


def _chain(target: Config, *, draft_vocab_size: int = 32000, norm_before_fc: bool = False, **fields: Any) -> Config:
    """Red Hat's EAGLE-3, of Speculators, with SafeAILab's taps."""
    return {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": draft_vocab_size,
        "norm_before_fc": norm_before_fc,
        "norm_before_residual": True,
        "transformer_layer_config": _layer(target, num_hidden_layers=1, **fields),
    }


_GEMMA_31B, _GEMMA_26B = (TARGETS[f"google/gemma-4-{name}-it"] for name in ("31B", "26B-A4B"))
_WINDOWS = {"layer_types": ["sliding_attention"] * 5, "sliding_window": 2048, "use_sliding_window": True}
_GPT_OSS_LAYER = {"rope_theta": 1e4, "rope_scaling": None}
_PARTS_IN_BF16 = ["lm_head", "re:.*_conv.*", "re:.*candidate_selector.*"]
_TAPS_36 = [1, 9, 17, 25, 33]
_GPT_OSS_DRAFTER = _read("scripts/full_size/gpt-oss-20b-DFlash.json")
_TAPS_32, _TAPS_40 = [1, 5, 9, 13, 17, 21, 25, 29], [1, 6, 11, 16, 22, 27, 32, 37]
_KIMI_DRAFTER = _drafter(
    KIMI | {"num_key_value_heads": 8, "head_dim": 128},
    layers=6,
    block_size=8,
    taps=[1, 12, 24, 35, 47, 58],
    mask=163838,
    intermediate_size=18432,
) | {"rope_theta": 50000.0, "rope_scaling": KIMI["rope_scaling"], "max_position_embeddings": 262144}
_GEMMA_DRAFTER = _read("tests/data/drafter_configs/z-lab__gemma-4-31B-it-DFlash.config.json")
DRAFTERS: dict[str, Config] = {
    "z-lab/Qwen3-4B-DFlash-b16": _read("tests/data/drafter_configs/z-lab__Qwen3-4B-DFlash-b16.config.json"),
    "z-lab/Qwen3-8B-DFlash-b16": _drafter(
        _QWEN3_8B, layers=5, block_size=16, taps=_TAPS_36, mask=151669, intermediate_size=12288
    ),
    "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat": _drafter(
        _LLAMA, layers=5, block_size=10, taps=[1, 8, 15, 22, 29], mask=128255, intermediate_size=12288
    ),  # its mask token is not public; any gives the same shapes
    "z-lab/gpt-oss-20b-DFlash": _GPT_OSS_DRAFTER,
    "z-lab/gpt-oss-120b-DFlash": _GPT_OSS_DRAFTER
    | {"block_size": 10, "dflash_config": {"mask_token_id": 200000, "target_layer_ids": _TAPS_36}},
    "z-lab/Qwen3-Coder-30B-A3B-DFlash": _drafter(
        _CODER, layers=8, block_size=16, taps=[1, 12, 23, 34, 45], mask=151669, intermediate_size=6144
    ),
    "z-lab/MiniMax-M2.5-DFlash": _windowed(
        _MINIMAX, 1, 4096, layers=6, taps=[1, 12, 24, 36, 47, 60], mask=200054, intermediate_size=9216
    ),
    "z-lab/MiniMax-M2.7-DFlash": _windowed(
        _MINIMAX, 1, 4096, layers=6, taps=[1, 12, 24, 36, 47, 60], mask=200054, intermediate_size=9216
    ),
    "z-lab/Kimi-K2.5-DFlash": _KIMI_DRAFTER,
    "z-lab/Kimi-K2.6-DFlash": _KIMI_DRAFTER,
    "z-lab/Qwen3.8-27B-DFlash2": _read("tests/data/drafter_configs/z-lab__Qwen3.8-27B-DFlash2.config.json"),
    "z-lab/Qwen3.6-27B-DFlash": _windowed(
        _QWEN_27B, 1, 2048, layers=5, taps=[1, 16, 31, 46, 61], mask=248070, intermediate_size=17408
    ),
    "z-lab/Qwen3.6-35B-A3B-DFlash": _windowed(_QWEN_35B, 1, 4096, layers=6, taps=_TAPS_40, intermediate_size=6144),
    "z-lab/Qwen3.5-4B-DFlash": _windowed(
        TARGETS["Qwen/Qwen3.5-4B"], 1, 4096, layers=6, taps=_TAPS_32, intermediate_size=9216
    ),
    "z-lab/Qwen3.5-9B-DFlash": _windowed(
        TARGETS["Qwen/Qwen3.5-9B"], 1, 4096, layers=6, taps=_TAPS_32, intermediate_size=12288
    ),
    "z-lab/Qwen3.5-27B-DFlash": _windowed(
        _QWEN_27B, 1, 4096, layers=6, taps=[1, 10, 18, 27, 35, 44, 52, 61], intermediate_size=17408
    ),
    "z-lab/Qwen3.5-35B-A3B-DFlash": _windowed(_QWEN_35B, 1, 4096, layers=6, taps=_TAPS_40, intermediate_size=6144),
    "z-lab/Qwen3.5-122B-A10B-DFlash": _windowed(
        TARGETS["Qwen/Qwen3.5-122B-A10B"],
        1,
        4096,
        layers=6,
        taps=[1, 7, 14, 20, 26, 32, 39, 45],
        intermediate_size=9216,
    ),
    "z-lab/Qwen3.5-397B-A17B-DFlash": _windowed(
        TARGETS["Qwen/Qwen3.5-397B-A17B"],
        1,
        4096,
        layers=6,
        taps=[1, 9, 17, 25, 33, 41, 49, 57],
        intermediate_size=12288,
    ),
    "z-lab/Qwen3-Coder-Next-DFlash": _drafter(
        _CODER_NEXT | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
        layers=8,
        block_size=16,
        taps=[3, 11, 23, 35, 43],
        mask=151669,
        intermediate_size=6144,
        max_position_embeddings=262144,
    ),
    "deepseek-ai/dspark_qwen3_4b_block7": _deepspec(_QWEN3_4B, _TAPS_36),
    "deepseek-ai/dspark_qwen3_8b_block7": _deepspec(_QWEN3_8B, _TAPS_36),
    "deepseek-ai/dspark_qwen3_14b_block7": _deepspec(_QWEN3_14B, [1, 10, 19, 28, 37]),
    "RedHatAI/Qwen3.6-35B-A3B-speculator.dspark": _red_hat(
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "rope_theta": 1e7,
            "vocab_size": 248320,
        },
        [2, 10, 20, 30, 37],
        248077,
        from_anchor=True,
    ),
    "RedHatAI/gemma-4-31B-it-speculator.dspark": _red_hat(
        {
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "rope_theta": 1e4,
            "vocab_size": 262144,
        },
        [1, 17, 29, 47, 58],
        4,
        from_anchor=False,
    ),
    "RedHatAI/Qwen3-8B-speculator.dflash": _blocks(_QWEN3_8B, [2, 10, 18, 26, 34], 151669),
    "RedHatAI/Qwen3-30B-A3B-speculator.dflash": _blocks(_QWEN3_30B, [1, 12, 23, 34, 45], 151669, **_WINDOWS),
    "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.dflash": _blocks(_CODER, [1, 12, 23, 34, 45], 151669, **_WINDOWS),
    "RedHatAI/gemma-4-31B-it-speculator.dflash": _blocks(_GEMMA_31B, [1, 17, 29, 47, 58], 4, rope_theta=1e4),
    "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3": _chain(_LLAMA),
    "RedHatAI/Qwen3-8B-speculator.eagle3": _chain(_QWEN3_8B),
    "RedHatAI/Qwen3-14B-speculator.eagle3": _chain(_QWEN3_14B),
    "RedHatAI/Qwen3-32B-speculator.eagle3": _chain(_QWEN3_32B),
    "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3": _chain(_CODER),
    "RedHatAI/gpt-oss-20b-speculator.eagle3": _chain(
        _GPT_OSS, draft_vocab_size=64000, norm_before_fc=True, **_GPT_OSS_LAYER
    ),
    "RedHatAI/gpt-oss-120b-speculator.eagle3": _chain(
        _GPT_OSS_LARGE, draft_vocab_size=64000, norm_before_fc=True, **_GPT_OSS_LAYER
    ),
    "RedHatAI/gemma-4-31B-it-speculator.eagle3": _chain(_GEMMA_31B, rope_theta=1e4),
    "RedHatAI/gemma-4-26B-A4B-it-speculator.eagle3": _chain(_GEMMA_26B, rope_theta=1e4),
    "z-lab/gemma-4-31B-it-DFlash": _GEMMA_DRAFTER,
    "z-lab/gemma-4-26B-A4B-it-DFlash": _GEMMA_DRAFTER
    | {"hidden_size": 2816, "intermediate_size": 5632, "num_attention_heads": 32, "num_target_layers": 30}
    | {"dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 6, 11, 17, 22, 27]}},
}
DRAFTERS |= {
    "syvai/Qwen3.8-27B-DFlash2-W4A16": DRAFTERS["z-lab/Qwen3.8-27B-DFlash2"]
    | {
        "quantization_config": {
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4 | {"group_size": 128}}},
            "format": "pack-quantized",
            "ignore": _PARTS_IN_BF16,
            "quant_method": "compressed-tensors",
        }
    },
    "maurienne-ai/Qwen3.8-27B-DFlash2-NVFP4-RTNcal": DRAFTERS["z-lab/Qwen3.8-27B-DFlash2"]
    | {"quantization_config": _NVFP4 | {"ignore": ["lm_head", "*_conv*", "candidate_selector*"]}},
}
_OF_FAMILY = "layers, MLP and taps as those of the authors' other drafters"
ASSUMED: dict[str, str] = {
    "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat": "its mask token",
    "z-lab/Qwen3-Coder-Next-DFlash": "its mask token",
    "z-lab/MiniMax-M2.5-DFlash": _OF_FAMILY,
    "z-lab/MiniMax-M2.7-DFlash": _OF_FAMILY,
    "z-lab/Qwen3.5-397B-A17B-DFlash": "its MLP and window",
    "z-lab/Qwen3.6-35B-A3B-DFlash": "its mask token",
    "RedHatAI/Qwen3.6-35B-A3B-speculator.dspark": "its RoPE",
    "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.dflash": "all but its taps as those of Qwen3-30B-A3B's",
    "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3": "its RoPE and MLP",
    "RedHatAI/Qwen3-14B-speculator.eagle3": "its RoPE and taps",
    "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3": "its layer, vocabulary and taps",
    "RedHatAI/gpt-oss-20b-speculator.eagle3": "its RoPE",
    "RedHatAI/gpt-oss-120b-speculator.eagle3": "all but its norms as those of gpt-oss-20b's",
    "RedHatAI/gemma-4-26B-A4B-it-speculator.eagle3": "its RoPE and taps",
    "maurienne-ai/Qwen3.8-27B-DFlash2-NVFP4-RTNcal": "which of its layers are quantized",
}


def write_shape(root: Path, name: str) -> Path:
    """A directory ROOT/OWNER/NAME with config.json alone, of the shape here."""
    directory = root / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps((TARGETS | DRAFTERS)[name]))
    return directory


def write_config(root: Path, name: str) -> Path:
    """The publisher's own file where there is one at hand, else the shape here."""
    return write_checkpoint(root, name) if name in repositories() else write_shape(root, name)
