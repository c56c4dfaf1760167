"""Tiny DSpark drafters that PyPI `speculators` itself writes, and the same as DeepSpec and NVIDIA publish theirs.

Importing this module skips the tests of a file where the package is missing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from dflash_trt.core.step_plan import StepHandle, StepPlan
from tests.factories import read_json, write_json
from tests.speculators_files import save_speculators_drafter

from speculators.models.dspark import core  # isort: skip  (behind the import that skips)

RANK = 6


def save_dspark_drafter(path: Path, *, target_dir: Path, **options: Any) -> Path:
    """What `speculators` saves at the start of a training, with a Markov head that changes many choices."""
    save_speculators_drafter(path, target_dir=target_dir, algorithm="dspark", **{"markov_rank": RANK} | options)
    tensors = load_file(path / "model.safetensors")
    for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
        tensors[name] = tensors[name] * tensors[name].shape[1] ** 0.5
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def as_deepspec(drafter: Path, path: Path, *, num_target_layers: int, **changes: Any) -> Path:
    """The same drafter in the flat config of DeepSpec's `build_draft_config`; `changes` of keys, None removes one."""
    fields = read_json(drafter / "config.json")
    names = ("block_size", "confidence_head_with_markov", "enable_confidence_head", "markov_head_type", "markov_rank")
    flat = fields["transformer_layer_config"] | {name: fields[name] for name in (*names, "mask_token_id")}
    flat |= {
        "architectures": ["Qwen3DSparkModel"],
        "layer_types": ["full_attention"] * flat["num_hidden_layers"],
        "num_anchors": 512,
        "num_target_layers": num_target_layers,
        "target_layer_ids": [index - 1 for index in fields["aux_hidden_state_layer_ids"]],
        "tie_word_embeddings": False,
    }
    path.mkdir()
    write_json(path / "config.json", {k: v for k, v in (flat | changes).items() if v is not None})
    tensors = {name: x for name, x in load_file(drafter / "model.safetensors").items() if name not in ("d2t", "t2d")}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def as_nvidia(drafter: Path, path: Path, *, num_target_layers: int) -> Path:
    """The same with its keys in `dflash_config`, and the matrices of its heads in no module."""
    as_deepspec(drafter, path, num_target_layers=num_target_layers)
    fields = read_json(path / "config.json")
    moved = ("block_size", "target_layer_ids", "num_target_layers", "markov_rank", "markov_head_type", "mask_token_id")
    section = {name: fields.pop(name) for name in moved}
    section |= {"projector_type": "dspark", "shift_label": True, "causal": False}
    section["use_confidence_head"] = fields.pop("enable_confidence_head")
    del fields["confidence_head_with_markov"], fields["layer_types"]
    write_json(path / "config.json", fields | {"dflash_config": section})
    tensors = load_file(path / "model.safetensors")
    renamed = {
        name.replace("markov_head.", "").replace("confidence_head.proj", "confidence_proj"): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, path / "model.safetensors", {"format": "pt"})
    return path


class Listener:
    """An executor that keeps the confidences of its steps."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.limits = executor.limits
        self.confidences: list[Any] = []

    def submit(self, plan: StepPlan) -> StepHandle:
        handle: StepHandle = self._executor.submit(plan)
        self.confidences.append(handle.result().draft_confidence)
        return handle


@torch.no_grad()
def reference_block(
    model: Any, states: Sequence[torch.Tensor], tokens: Sequence[int], drafts: Sequence[int]
) -> tuple[list[int], list[float] | None]:
    """Drafts and confidences of the block whose anchor is the last of `tokens`, from the reference's training forward.

    It is given the true tokens where a block has drafts. With ours there, its drafts equal ours if each is right after
    those before it. `states` [1, T, H] by layer, of at least the tokens before the anchor.
    """
    anchor, length = len(tokens) - 1, len(tokens) + len(drafts) + model.block_size
    taps = torch.cat([states[i][:, :anchor] for i in model.target_layer_ids], dim=-1)
    padded = torch.cat((taps, torch.zeros(1, length - anchor, taps.shape[-1])), dim=1)
    input_ids = torch.tensor([[*tokens, *drafts, *[0] * model.block_size]])
    is_anchor = torch.zeros(input_ids.shape)
    is_anchor[0, anchor] = 1
    last = torch.zeros(1, length, states[-1].shape[-1])
    with patch.object(core, "compute_metrics", return_value=(None, {})) as seen:
        model(padded, input_ids, is_anchor, last, torch.zeros_like(input_ids), max_anchors=1)
    logits, _, confidence = seen.call_args.args[:3]
    first = 0 if model.config.sample_from_anchor else 1
    found = logits[0, first:].argmax(-1)
    found = found if model.d2t is None else found + model.d2t[found]
    return found.tolist(), None if confidence is None else confidence[0, first:].sigmoid().tolist()
