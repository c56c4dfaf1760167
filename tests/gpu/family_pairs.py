"""A tiny pair of every family that the GPU kernels compute: two layers, few heads of 16, a vocabulary of 12."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.dflash2_files import make_dflash2_drafter
from tests.factories import LLAMA3, make_speculators_drafter, make_target, make_zlab_drafter
from tests.gemma_targets import EVERYTHING, make_gemma

VOCAB_SIZE: Final = 12
BLOCK: Final = 4
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_FEW_HEADS: Final = {"num_attention_heads": 2, "num_key_value_heads": 1}
_TAPS: Final = {"target_layer_ids": (0, 1)}
_DRAFT_LAYERS: Final[Mapping[str, Any]] = {"head_dim": 16, "intermediate_size": 96, **_FEW_HEADS}
_DRAFT: Final = {"block_size": BLOCK, **_TAPS, **_DRAFT_LAYERS}
_HYBRID: Final = {"layer_types": [_LINEAR, _FULL]}
_WINDOWS: Final = {"layer_types": [_SLIDING, _FULL]}
_ONE_GROUP: Final = {"n_group": 1, "topk_group": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
_GEMMA4: Final = EVERYTHING | _WINDOWS | {"num_kv_shared_layers": 0, "num_hidden_layers": 2}

_target = partial(make_target, vocab_size=VOCAB_SIZE, tokenizer=False, num_hidden_layers=2)
_gemma = partial(make_gemma, vocab_size=VOCAB_SIZE, num_hidden_layers=2, **_WINDOWS, **_FEW_HEADS)
_dense = partial(_target, **_FEW_HEADS)
_full = partial(make_zlab_drafter, num_layers=1, **_DRAFT)
_windowed = partial(make_zlab_drafter, sliding_window=6, **_WINDOWS, **_DRAFT)
_speculators = partial(
    make_speculators_drafter, num_layers=1, draft_vocab_size=8, block_size=BLOCK, layer=_DRAFT_LAYERS, seed=7, **_TAPS
)
_dflash2 = partial(make_dflash2_drafter, **_DRAFT)

# The target's maker and the drafter's.
PAIRS: Final[dict[str, tuple[Callable[..., Path], Callable[..., Path]]]] = {
    "qwen3": (_dense, _windowed),
    "qwen3, deterministic": (_dense, _windowed),
    "llama 3": (partial(_dense, family="llama", rope_parameters=LLAMA3), _speculators),
    "llama 4": (
        partial(
            _dense,
            family="llama4_text",
            no_rope_layers=[1, 0],
            attention_chunk_size=6,
            floor_scale=3,
            num_local_experts=4,
        ),
        _full,
    ),
    "qwen2": (partial(_dense, family="qwen2"), _full),
    "mistral": (partial(_dense, family="mistral"), _full),
    "phi3": (partial(_dense, family="phi3"), _full),
    "gemma 3": (partial(_gemma, family="gemma3_text"), _windowed),
    "gemma 4": (partial(_gemma, family="gemma4_text"), _full),
    "gemma 4, experts, per-layer embeddings": (partial(_gemma, family="gemma4_text", **_GEMMA4), _windowed),
    "gemma 4, shared K/V": (
        partial(make_gemma, vocab_size=VOCAB_SIZE, family="gemma4_unified_text", **_FEW_HEADS),
        _full,
    ),
    "qwen3 moe": (partial(_dense, family="qwen3_moe"), _full),
    "gpt-oss": (partial(_dense, family="gpt_oss"), _dflash2),
    "glm 4": (partial(_dense, family="glm4_moe", n_group=2, topk_group=1), _full),
    "minimax": (partial(_dense, family="minimax_m2"), _full),
    "deepseek v3": (partial(_target, family="deepseek_v3", **_ONE_GROUP), _full),
    "deepseek v3.2": (partial(_target, family="deepseek_v32", **_ONE_GROUP), _windowed),
    "glm 5": (partial(_target, family="glm_moe_dsa", **_ONE_GROUP), _full),
    "qwen3-next": (partial(_dense, family="qwen3_next", **_HYBRID), _full),
    "qwen3.5": (partial(_dense, family="qwen3_5_text", **_HYBRID), _dflash2),
    "qwen3.5 moe": (partial(_dense, family="qwen3_5_moe_text", **_HYBRID), _windowed),
}


def make_pair(name: str, root: Path) -> None:
    """Write `root`/target and `root`/drafter."""
    target, drafter = PAIRS[name]
    drafter(root / "drafter", target_dir=target(root / "target"))
