"""config.json files of published targets and drafters, by repository: the shapes that their cards and papers state."""

import json
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
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

TARGETS: dict[str, Config] = {
    "Qwen/Qwen3-4B": _QWEN3_4B,
    "Qwen/Qwen3-4B-FP8": _QWEN3_4B | {"quantization_config": _BLOCK_FP8 | {"modules_to_not_convert": ["lm_head"]}},
    "Qwen/Qwen3-8B": _QWEN3_8B,
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
}
_TAPS_36 = [1, 9, 17, 25, 33]
_GPT_OSS_DRAFTER = _read("scripts/full_size/gpt-oss-20b-DFlash.json")
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
}


def write_config(root: Path, name: str) -> Path:
    """A directory ROOT/OWNER/NAME with config.json alone."""
    directory = root / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps((TARGETS | DRAFTERS)[name]))
    return directory
