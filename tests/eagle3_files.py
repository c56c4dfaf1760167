"""Tiny EAGLE-3 heads that PyPI `speculators` itself writes, and the same in SafeAILab's names.

Importing this module skips the tests of a file where the package is missing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.factories import randomize, read_json, write_json
from tests.speculators_files import create_transformer_layer_config, vocabulary_maps

from speculators.convert import convert_model  # isort: skip  (behind the import that skips)
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig  # isort: skip

OF_THE_TARGET = ("verifier_lm_head", "verifier_norm")


def save_eagle3_head(
    path: Path,
    *,
    target_dir: Path,
    aux_hidden_state_layer_ids: Sequence[int] = (1, 2, 4),
    draft_tokens: Sequence[int] | None = None,
    architecture: str = "llama",
    sliding_window: int | None = None,
    norm_before_residual: bool = False,
    seed: int = 2,
    **training_args: Any,
) -> Path:
    """What `speculators` saves at the start of a training, with random weights, its own embedding and head.

    `draft_tokens` are the target tokens of a reduced vocabulary; None: all.
    """
    vocab_size = read_json(target_dir / "config.json")["vocab_size"]
    layer = create_transformer_layer_config(
        str(target_dir), 1, architecture, "silu", sliding_window or 2048, [] if sliding_window else [0]
    )
    maps = {} if draft_tokens is None else vocabulary_maps(vocab_size, sorted(draft_tokens))
    model = Eagle3DraftModel.from_training_args(
        layer,
        **maps,
        draft_vocab_size=vocab_size if draft_tokens is None else len(draft_tokens),
        verifier_name_or_path=str(target_dir),
        target_layer_ids=list(aux_hidden_state_layer_ids),
        norm_before_residual=norm_before_residual,
        ttt_steps=3,
        draft_attn_impl="eager",
        **training_args,
    )
    own = {name: tensor for name, tensor in model.named_parameters() if not name.startswith(OF_THE_TARGET)}
    randomize(own, seed=seed)
    model.save_pretrained(path)
    return path


def open_eagle3_head(path: Path) -> Any:
    """The head as `speculators` loads it, in its eager attention."""
    config = Eagle3SpeculatorConfig.from_pretrained(path)
    config.transformer_layer_config._attn_implementation = "eager"
    return Eagle3DraftModel.from_pretrained(path, config=config).eval()


def as_safeailab(head: Path, path: Path) -> Path:
    """The same head in the names and the flat config of SafeAILab."""
    fields = read_json(head / "config.json")
    layer = dict(fields["transformer_layer_config"])
    rope = layer.pop("rope_parameters")
    flat = {name: layer[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    flat |= {name: layer[name] for name in ("num_key_value_heads", "head_dim", "max_position_embeddings")}
    flat |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": fields["draft_vocab_size"],
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": layer.get("rms_norm_eps", 1e-6),
        "rope_theta": rope["rope_theta"],
        "torch_dtype": "float32",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": fields["eagle_aux_hidden_state_layer_ids"],
            "use_aux_hidden_state": True,
        },
    }
    path.mkdir()
    write_json(path / "config.json", flat)
    tensors = load_file(head / "model.safetensors")
    renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    save_file(renamed, path / "model.safetensors", {"format": "pt"})
    return path


def convert_safeailab(head: Path, path: Path, *, target_dir: Path) -> Path:
    """By `speculators`, which asks for the taps."""
    taps = read_json(head / "config.json")["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    convert_model(
        model=str(head),
        verifier=str(target_dir),
        algorithm="eagle3",
        output_path=str(path),
        eagle_aux_hidden_state_layer_ids=taps,
    )
    return path


@torch.no_grad()
def reference_chain(
    model: Any, states: Sequence[torch.Tensor], tokens: Sequence[int], drafts: Sequence[int]
) -> list[int]:
    """The chain behind `tokens`, of which the last is the anchor; `states` [1, T, H] by layer, of at least the others.

    The reference trains with the true tokens in the place of its own drafts. With ours there, its drafts equal ours if
    each is right behind those before it.
    """
    length = len(tokens) - 1  # rows: a feature, and the token behind it
    taps = torch.cat([states[i][:, :length] for i in model.target_layer_ids], dim=-1)
    padded = torch.cat((taps, torch.zeros(1, len(drafts), taps.shape[-1])), dim=1)
    input_ids = torch.tensor([[*tokens[1:], *drafts]])
    steps = model(padded, input_ids, torch.zeros_like(input_ids), ttt_steps=len(drafts))
    found = torch.stack([step[0, length - 1] for step in steps])
    return (found if model.d2t is None else found + model.d2t[found]).tolist()
