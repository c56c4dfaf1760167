"""Drafters that PyPI `speculators` itself writes: made by its training set-up, or converted from a z-lab drafter.

Importing this module skips the tests of a file where the package is missing.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.factories import MASK_ID, randomize, read_json

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its dependencies deprecate things at import
    reference = pytest.importorskip(
        "speculators.models.dflash", reason="PyPI speculators is not installed: scripts/test installs it"
    )
    from speculators.convert import convert_model
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    from speculators.train.cli import create_transformer_layer_config

NUM_LAYERS = 2
MODELS = {
    "dflash": (reference.DFlashDraftModel, reference.DFlashSpeculatorConfig),
    "dflash2": (DFlash2DraftModel, DFlash2SpeculatorConfig),
    "dspark": (DSparkDraftModel, DSparkSpeculatorConfig),
}
OF_THE_TARGET = ("embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm")  # weights that training keeps


def save_speculators_drafter(
    path: Path,
    *,
    target_dir: Path,
    aux_hidden_state_layer_ids: Sequence[int] = (1, 3),
    draft_tokens: Sequence[int] | None = None,
    block_size: int = 4,
    full_layers: Sequence[int] = (0, 1),
    sliding_window: int = 2048,
    architecture: str = "qwen3",
    seed: int = 2,
    algorithm: str = "dflash",
    **training_args: Any,
) -> Path:
    """What `speculators` saves at the start of a training, with random weights; two layers.

    `draft_tokens` are the target tokens of a reduced vocabulary; None: all, with the target's head.
    """
    vocab_size = read_json(target_dir / "config.json")["vocab_size"]
    layer = create_transformer_layer_config(
        str(target_dir), NUM_LAYERS, architecture, "silu", sliding_window, list(full_layers)
    )
    maps = {} if draft_tokens is None else vocabulary_maps(vocab_size, sorted(draft_tokens))
    model = MODELS[algorithm][0].from_training_args(
        layer,
        **maps,
        draft_vocab_size=vocab_size if draft_tokens is None else len(draft_tokens),
        block_size=block_size,
        verifier_name_or_path=str(target_dir),
        target_layer_ids=list(aux_hidden_state_layer_ids),
        mask_token_id=MASK_ID,
        draft_attn_impl="eager",
        **training_args,
    )
    own = {name: tensor for name, tensor in model.named_parameters() if not name.startswith(OF_THE_TARGET)}
    randomize(own, seed=seed)
    model.save_pretrained(path)
    return path


def convert_zlab_drafter(drafter: Path, path: Path, *, target_dir: Path) -> Path:
    convert_model(model=str(drafter), verifier=str(target_dir), algorithm="dflash", output_path=str(path))
    return path


def open_speculators_drafter(path: Path) -> Any:
    """The drafter as `speculators` loads it, the target's weights included, in its eager attention."""
    model_class, config_class = MODELS[read_json(path / "config.json")["speculators_model_type"]]
    config = config_class.from_pretrained(path)
    config.transformer_layer_config._attn_implementation = "eager"
    return model_class.from_pretrained(path, config=config).eval()


def vocabulary_maps(vocab_size: int, draft_tokens: Sequence[int]) -> dict[str, torch.Tensor]:
    target_to_draft = torch.zeros(vocab_size, dtype=torch.bool)
    target_to_draft[list(draft_tokens)] = True
    return {"t2d": target_to_draft, "d2t": torch.tensor(draft_tokens) - torch.arange(len(draft_tokens))}
