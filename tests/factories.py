"""Tiny random checkpoints in the formats of the field: a target, a z-lab drafter, a Speculators drafter.

Each is a directory that the outside reference implementations can open too. Weights are random, reproducible from
`seed`, and scaled so that logits are not flat.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT_ID = 0
MASK_ID = 1
IM_START_ID = 2
IM_END_ID = 3
SPECIAL_TOKENS = ("<|endoftext|>", "<|mask|>", "<|im_start|>", "<|im_end|>")  # ids 0 .. 3
NUM_TEXT_TOKENS = 256  # one per byte, ids 4 .. 259
VOCAB_SIZE = 272  # the rest is padding, as real vocabularies have

Tensors = dict[str, torch.Tensor]
Family = Literal[
    "qwen3",
    "llama",
    "llama4_text",
    "qwen2",
    "mistral",
    "phi3",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe",
    "glm_moe_dsa",
    "minimax_m2",
    "qwen3_moe",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
]

# Names of transformers, which imports a model when asked for it: all of them take 5 s.
_CLASSES: dict[Family, tuple[str, str]] = {
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "llama4_text": ("Llama4TextConfig", "Llama4ForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM"),
    "glm_moe_dsa": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM"),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM"),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_5_text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
_HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_SHARED_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}
_HALF_ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
_INDEXER = {"index_topk": 128, "index_head_dim": 16, "index_n_heads": 2}
_FAMILY_FIELDS: dict[Family, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "llama4_text": {
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "intermediate_size": 32,
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 12,
        "floor_scale": 8,
        "attn_scale": 0.5,
    },
    "qwen2": {},
    "mistral": {"sliding_window": 6},
    "phi3": {},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "rope_parameters": _HALF_ROTATED,
    },
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT | _INDEXER,
    "glm_moe_dsa": _LATENT | _INDEXER,
    "minimax_m2": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 32,
        "rope_parameters": _HALF_ROTATED,
    },
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 64,
        "sliding_window": 6,
        "rope_parameters": _YARN,
        "rms_norm_eps": 1e-5,
    },
    "qwen3_next": _HYBRID | _SHARED_EXPERTS,
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": _HYBRID | _SHARED_EXPERTS,
}


def make_target(
    path: Path,
    *,
    family: Family = "qwen3",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | None = None,
    save_original_format: bool = True,
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write a Hugging Face target and return its directory: 4 layers, hidden 64, 4 heads of 16, 2 KV heads.

    `overrides` are fields of the family's config class; `max_shard_size` (for example "100KB") gives a sharded
    checkpoint with an index; without `save_original_format` transformers saves experts as it computes with them.
    """
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": None,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": None,
    }
    fields |= _FAMILY_FIELDS[family] | overrides
    config_class, model_class = (getattr(transformers, name) for name in _CLASSES[family])
    model = model_class(config_class(**fields))
    choice_biases = {name: x for name, x in model.named_buffers() if name.endswith("e_score_correction_bias")}
    randomize(
        dict(model.named_parameters()) | choice_biases,
        seed=seed,
        has_offset_norms="layer_types" in _FAMILY_FIELDS[family],
    )
    options: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.to(dtype).save_pretrained(path, save_original_format=save_original_format, **options)
    if tokenizer:
        write_tokenizer(path)
    return path


def make_zlab_drafter(
    path: Path,
    *,
    target_dir: Path,
    num_layers: int = 2,
    target_layer_ids: Sequence[int] | None = (0, 2),
    block_size: int = 4,
    mask_token_id: int = MASK_ID,
    layer_types: Sequence[str] | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    schema: Literal["old", "new"] = "old",
    attention_bias: bool = False,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Write a `DFlashDraftModel` for the target and return its directory.

    `schema` "old" keeps `block_size` and `rope_theta` at the top level, "new" writes `dflash_config.block_size` and
    `rope_parameters`. `target_layer_ids` None leaves the key out. `overrides` replace top-level keys; a value of
    None in `overrides` is written as null.
    """
    target = read_json(target_dir / "config.json")
    dflash_config: dict[str, Any] = {"mask_token_id": mask_token_id}
    if target_layer_ids is not None:
        dflash_config["target_layer_ids"] = list(target_layer_ids)
    fields: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_target_layers": target["num_hidden_layers"],
        "dflash_config": dflash_config,
        "dtype": str(dtype).removeprefix("torch."),
        **_draft_decoder_fields(target, num_layers=num_layers, attention_bias=attention_bias),
        **_window_fields(num_layers, layer_types, sliding_window),
    }
    if schema == "old":
        fields |= {"block_size": block_size, "rope_theta": 5000.0, "rope_scaling": None}
    else:
        dflash_config["block_size"] = block_size
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0}
    if is_causal is not None:
        fields["is_causal"] = is_causal
    fields |= overrides
    num_taps = len(target_layer_ids) if target_layer_ids is not None else num_layers
    tensors = _draft_tensors(fields, num_taps=num_taps, target_hidden_size=target["hidden_size"])
    randomize(tensors, seed=seed)
    return _write_drafter(path, fields, {name: tensor.to(dtype) for name, tensor in tensors.items()})


def make_speculators_drafter(
    path: Path,
    *,
    target_dir: Path,
    draft_vocab_size: int | None = 64,
    num_layers: int = 2,
    target_layer_ids: Sequence[int] = (0, 2),
    block_size: int = 4,
    mask_token_id: int = MASK_ID,
    layer_types: Sequence[str] | None = None,
    sliding_window: int | None = None,
    sliding_window_non_causal: bool | None = None,
    has_own_embedding: bool = False,
    layer: Mapping[str, Any] = MappingProxyType({}),
    seed: int = 2,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Write a `DFlashSpeculator` for the target and return its directory.

    `target_layer_ids` are 0-based as everywhere in this house; the file stores them one higher. `draft_vocab_size`
    None means the target's vocabulary and head. `overrides` replace top-level keys, `layer` those of its layers.
    """
    target = read_json(target_dir / "config.json")
    vocab_size = target["vocab_size"]
    layer_fields: dict[str, Any] = {
        "model_type": "qwen3",
        **_draft_decoder_fields(target, num_layers=num_layers, attention_bias=False),
        **_window_fields(num_layers, layer_types, sliding_window),
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        **layer,
    }
    fields: dict[str, Any] = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "transformer_layer_config": layer_fields,
        "draft_vocab_size": draft_vocab_size if draft_vocab_size is not None else vocab_size,
        "block_size": block_size,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in target_layer_ids],
        "mask_token_id": mask_token_id,
        "speculators_config": _speculators_config(block_size),
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if sliding_window_non_causal is not None:
        fields["sliding_window_non_causal"] = sliding_window_non_causal
    fields |= overrides
    hidden = target["hidden_size"]
    tensors = _draft_tensors(layer_fields, num_taps=len(target_layer_ids), target_hidden_size=hidden)
    if has_own_embedding:
        tensors["embed_tokens.weight"] = torch.empty(vocab_size, hidden)
    if draft_vocab_size is not None:
        tensors["lm_head.weight"] = torch.empty(draft_vocab_size, hidden)
    randomize(tensors, seed=seed)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    if draft_vocab_size is not None:
        tensors |= _vocabulary_maps(vocab_size, draft_vocab_size, seed=seed)
    return _write_drafter(path, fields, tensors)


def make_eagle3_head(
    path: Path,
    *,
    target_dir: Path,
    taps: Sequence[int] = (1, 2, 4),
    draft_vocab_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    **fields: Any,
) -> Path:
    """Write an EAGLE-3 head as SafeAILab does, with a vocabulary of every second token: taps count from 1."""
    target = read_json(target_dir / "config.json")
    hidden, inner = target["hidden_size"], 96
    config = {name: target[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    config |= {"hidden_size": hidden, "intermediate_size": inner, "hidden_act": "silu", "rms_norm_eps": 1e-6}
    config |= {"rope_theta": 10000.0, "max_position_embeddings": 512, "draft_vocab_size": draft_vocab_size}
    config |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(taps)}, **fields}
    q, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (hidden, len(taps) * hidden),
        "midlayer.self_attn.q_proj": (q, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, q),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (draft_vocab_size, hidden),
        **{f"midlayer.{name}": (hidden,) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
        "norm": (hidden,),
    }
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}": (hidden,) for i in range(len(taps))}
    if config.get("norm_before_fc"):
        shapes["input_norm"] = (len(taps) * hidden,)
    tensors = {f"{name}.weight": torch.empty(shape) for name, shape in shapes.items()}
    randomize(tensors, seed=3)
    path.mkdir()
    write_json(path / "config.json", config)
    offsets = {"d2t": torch.arange(draft_vocab_size)}
    save_file({name: x.to(dtype) for name, x in tensors.items()} | offsets, path / "model.safetensors")
    return path


def write_tokenizer(path: Path) -> None:
    """A byte-level tokenizer: ids 0 .. 3 are SPECIAL_TOKENS, then one id per byte. Needs no training."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL_TOKENS[END_OF_TEXT_ID]}
    write_json(path / "tokenizer_config.json", fields)


def read_json(path: Path) -> dict[str, Any]:
    fields = json.loads(path.read_text())
    assert isinstance(fields, dict)
    return fields


def write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n")


def edit_json(path: Path, **changes: Any) -> None:
    """Replace top-level keys of a JSON file; None is written as null."""
    write_json(path, read_json(path) | changes)


def randomize(tensors: Tensors, *, seed: int, has_offset_norms: bool = False) -> None:
    """Fill in place: unit-gain matrices, norms near 1 (or 0, with an offset), small biases, and heads that give peaked
    logits.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in tensors.items():
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("norm.weight"):
                is_offset = has_offset_norms and not name.endswith("linear_attn.norm.weight")
                tensor.copy_(0.1 * noise if is_offset else 1.0 + 0.1 * noise)
            elif name.endswith("A_log"):
                tensor.copy_(noise.abs())
            elif name.endswith("sinks"):
                tensor.copy_(1.0 + noise)
            elif name.endswith("bias"):
                tensor.copy_(0.1 * noise)
            else:
                gain = 3.0 if name.endswith(("embed_tokens.weight", "lm_head.weight")) else 1.0
                tensor.copy_(gain * tensor.shape[-1] ** -0.5 * noise)


def _draft_decoder_fields(target: dict[str, Any], *, num_layers: int, attention_bias: bool) -> dict[str, Any]:
    """The Qwen3 decoder part of a drafter's config; heads and FFN deliberately unlike the target's."""
    return {
        "attention_bias": attention_bias,
        "attention_dropout": 0.0,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": target["hidden_size"],
        "initializer_range": 0.02,
        "intermediate_size": 80,
        "max_position_embeddings": 512,
        "num_attention_heads": 8,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": target["vocab_size"],
    }


def _window_fields(num_layers: int, layer_types: Sequence[str] | None, sliding_window: int | None) -> dict[str, Any]:
    if layer_types is None:
        layer_types = ("full_attention",) * num_layers
    return {
        "layer_types": list(layer_types),
        "max_window_layers": num_layers,
        "sliding_window": sliding_window,
        "use_sliding_window": sliding_window is not None,
    }


def _draft_tensors(fields: dict[str, Any], *, num_taps: int, target_hidden_size: int) -> Tensors:
    """Uninitialized tensors of a drafter under the names of its checkpoint format."""
    hidden, ffn, head_dim = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    q_size, kv_size = fields["num_attention_heads"] * head_dim, fields["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, num_taps * target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(fields["num_hidden_layers"]):
        prefix = f"layers.{i}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (q_size, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv_size, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv_size, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, q_size),
            f"{prefix}.self_attn.q_norm.weight": (head_dim,),
            f"{prefix}.self_attn.k_norm.weight": (head_dim,),
            f"{prefix}.mlp.gate_proj.weight": (ffn, hidden),
            f"{prefix}.mlp.up_proj.weight": (ffn, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, ffn),
        }
        if fields["attention_bias"]:
            shapes |= {f"{prefix}.self_attn.{x}_proj.bias": (kv_size,) for x in "kv"}
            shapes |= {f"{prefix}.self_attn.q_proj.bias": (q_size,), f"{prefix}.self_attn.o_proj.bias": (hidden,)}
    return {name: torch.empty(shape) for name, shape in shapes.items()}


def _vocabulary_maps(vocab_size: int, draft_vocab_size: int, *, seed: int) -> Tensors:
    """`d2t` int64 [draft_vocab_size], offsets; `t2d` bool [vocab_size]."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
    target_to_draft = torch.zeros(vocab_size, dtype=torch.bool)
    target_to_draft[kept] = True
    return {"d2t": kept - torch.arange(draft_vocab_size), "t2d": target_to_draft}


def _speculators_config(block_size: int) -> dict[str, Any]:
    return {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": block_size - 1}],
        "verifier": {"name_or_path": "tiny/target", "architectures": ["Qwen3ForCausalLM"]},
    }


def _write_drafter(path: Path, fields: dict[str, Any], tensors: Tensors) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "config.json", fields)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path
