"""The odd corners of families' configs: tiny targets, a name each, of which every family has four at least.

Those of Gemma and of hybrids stand in `test_gemma.py` and `test_hybrids.py`.
"""

from typing import Any, Final

from tests.factories import LLAMA3

_HALF_OF_32: Final = {"head_dim": 32, "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}}
_YARN: Final = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_SLIDING, _FULL = "sliding_attention", "full_attention"

CORNERS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "qwen3": {
        "one K/V head": {"num_key_value_heads": 1},
        "tied, biases, heads of 24": {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 24},
        "YaRN, heads of 32": {"rope_parameters": _YARN, "head_dim": 32},
        "windows of one token from the second layer, sharded": {
            "use_sliding_window": True,
            "sliding_window": 1,
            "max_window_layers": 1,
            "max_shard_size": "60KB",
        },
    },
    "llama": {
        "one K/V head": {"num_key_value_heads": 1},
        "Llama 3's scaling, sharded": {"rope_parameters": LLAMA3, "max_shard_size": "60KB"},
        "linear scaling, six heads": {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            "hidden_size": 96,
            "num_attention_heads": 6,
        },
        "tied, biases, heads of 32": {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 32,
        },
    },
    "qwen2": {
        "as the factory makes it": {},
        "windows that are not used": {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0},
        "windows of one token from the third layer": {
            "num_key_value_heads": 4,
            "use_sliding_window": True,
            "sliding_window": 1,
            "max_window_layers": 2,
        },
        "windows everywhere, one K/V head, tied": {
            "num_key_value_heads": 1,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 0,
            "tie_word_embeddings": True,
        },
    },
    "mistral": {
        "one K/V head": {"num_key_value_heads": 1},
        "windows of three, tied, another base": {
            "tie_word_embeddings": True,
            "sliding_window": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        "no window, YaRN, heads of 32": {"head_dim": 32, "sliding_window": None, "rope_parameters": _YARN},
        "six heads, sharded": {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_shard_size": "60KB",
            "sliding_window": 1,
        },
    },
    "phi3": {
        "as the factory makes it": {},
        "a K/V head for each head, windows of one token, tied": {
            "num_key_value_heads": 4,
            "sliding_window": 1,
            "tie_word_embeddings": True,
        },
        "a quarter of a head rotated, one K/V head": {**_HALF_OF_32, "num_key_value_heads": 1},
        "windows of seven, sharded": {"sliding_window": 7, "max_shard_size": "60KB", "seed": 3},
    },
    "qwen3_moe": {
        "one K/V head": {"num_key_value_heads": 1, "seed": 7},
        "one expert for each token, tied": {"num_experts_per_tok": 1, "tie_word_embeddings": True, "seed": 3},
        "all experts, heads of 32, YaRN": {"num_experts_per_tok": 8, "head_dim": 32, "rope_parameters": _YARN},
        "weights not normalized, dense layers between": {
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "seed": 2,
        },
    },
    "gpt_oss": {
        "one K/V head": {"num_key_value_heads": 1, "seed": 1},
        "windows of one token, heads of 32": {"num_key_value_heads": 4, "head_dim": 32, "sliding_window": 1, "seed": 1},
        "all experts, windows everywhere, tied": {
            "num_experts_per_tok": 8,
            "layer_types": [_SLIDING] * 4,
            "tie_word_embeddings": True,
            "seed": 2,
        },
        "full layers first, one expert for each token": {
            "layer_types": [_FULL, _FULL, _SLIDING, _SLIDING],
            "num_experts_per_tok": 1,
            "seed": 1,
        },
    },
    "glm4_moe": {
        "one K/V head": {"num_key_value_heads": 1},
        "a quarter of a head rotated, groups of experts, one for each token": {
            **_HALF_OF_32,
            "num_experts_per_tok": 1,
            "n_group": 2,
            "topk_group": 1,
        },
        "all experts, tied, no dense layer": {
            "num_experts_per_tok": 8,
            "tie_word_embeddings": True,
            "first_k_dense_replace": 0,
            "num_key_value_heads": 4,
        },
        "dense, no norms of heads": {"first_k_dense_replace": 4, "use_qk_norm": False},
    },
    "minimax_m2": {
        "one K/V head": {"num_key_value_heads": 1},
        "all experts, tied": {"num_experts_per_tok": 8, "tie_word_embeddings": True, "num_key_value_heads": 4},
        "a quarter of a head rotated, one expert for each token": {**_HALF_OF_32, "num_experts_per_tok": 1},
        "YaRN over half of a head": {"rope_parameters": {**_YARN, "partial_rotary_factor": 0.5}},
    },
    "deepseek_v3": {
        "as the factory makes it": {},
        "YaRN that scales scores, halves rotated, one expert for each token": {
            "rope_interleave": False,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            "num_experts_per_tok": 1,
            "n_group": 2,
            "topk_group": 1,
        },
        "q without a latent, dense, tied": {
            "q_lora_rank": None,
            "first_k_dense_replace": 4,
            "tie_word_embeddings": True,
        },
        "latents of 48, all experts, weights not normalized": {
            "qk_rope_head_dim": 16,
            "head_dim": 16,
            "kv_lora_rank": 48,
            "v_head_dim": 16,
            "num_experts_per_tok": 8,
            "topk_group": 4,
            "norm_topk_prob": False,
        },
    },
    "deepseek_v32": {
        "as the factory makes it": {},
        "YaRN that scales scores, one group": {
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            "n_group": 1,
            "topk_group": 1,
        },
        "latents of 48, values of 16, tied": {
            "qk_rope_head_dim": 16,
            "head_dim": 16,
            "kv_lora_rank": 48,
            "v_head_dim": 16,
            "tie_word_embeddings": True,
            "seed": 1,
        },
        "dense, sharded": {"first_k_dense_replace": 4, "max_shard_size": "60KB"},
    },
    "glm_moe_dsa": {
        "as the factory makes it": {},
        "layers that share an indexer, one expert for each token": {
            "indexer_types": ["full", "shared", "full", "shared"],
            "num_experts_per_tok": 1,
            "seed": 2,
        },
        "latents of 48, one group, tied": {
            "kv_lora_rank": 48,
            "n_group": 1,
            "topk_group": 1,
            "tie_word_embeddings": True,
        },
        "all experts, no dense layer, weights not normalized": {
            "num_experts_per_tok": 8,
            "topk_group": 4,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
        },
    },
    "llama4_text": {
        "one K/V head": {"num_key_value_heads": 1},
        "chunks of one token, tied": {"attention_chunk_size": 1, "tie_word_embeddings": True, "floor_scale": 3},
        "chunks of a page, heads of 32, three experts for each token in every layer": {
            "attention_chunk_size": 4,
            "head_dim": 32,
            "use_qk_norm": False,
            "interleave_moe_layer_step": 1,
            "num_experts_per_tok": 3,
        },
        "RoPE everywhere, dense, no temperature": {
            "no_rope_layers": [1, 1, 1, 1],
            "moe_layers": [],
            "attn_temperature_tuning": False,
        },
    },
}
