"""Tiny targets with an MTP head in their checkpoint, and the head as `speculators` or transformers reads it.

Importing this module skips the tests of a file where `speculators` is missing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.factories import Family, make_target, randomize, read_json

pytest.importorskip("speculators")

from speculators.convert.mtp.converter import MTPConverter  # isort: skip  (behind the import that skips)
from speculators.models.mtp import MTPDraftModel  # isort: skip
from transformers.modeling_layers import MtpModel  # isort: skip

_MODULE = {"fc": "fc", "embedding": "pre_fc_norm_embedding", "hidden": "pre_fc_norm_hidden", "norm": "norm"}
_LAYER = {"fc": "eh_proj", "embedding": "enorm", "hidden": "hnorm", "norm": "shared_head.norm"}


def make_mtp_target(path: Path, *, family: Family = "qwen3_5_text", head_seed: int = 11, **options: Any) -> Path:
    """A target with random tensors of a head: a layer like its last one with full attention, and what surrounds it."""
    make_target(path, family=family, **options)
    config, [file] = read_json(path / "config.json"), path.glob("*.safetensors")
    tensors, num_layers = load_file(file), config["num_hidden_layers"]
    types = config.get("layer_types") or ["full_attention"] * num_layers
    last = max(i for i, kind in enumerate(types) if kind == "full_attention")
    is_layer = family == "glm4_moe"
    layer = f"model.layers.{num_layers}." if is_layer else "mtp.layers.0."
    outer, names = (layer, _LAYER) if is_layer else ("mtp.", _MODULE)
    hidden = config["hidden_size"]
    sizes = {"fc": (hidden, 2 * hidden), "embedding": (hidden,), "hidden": (hidden,), "norm": (hidden,)}
    kinds = {"fc": "fc.weight", "embedding": "e_norm.weight", "hidden": "h_norm.weight", "norm": "norm.weight"}
    around = {kinds[key]: torch.empty(shape) for key, shape in sizes.items()}
    inner = {
        name.removeprefix(f"model.layers.{last}."): torch.empty_like(tensor)
        for name, tensor in tensors.items()
        if name.startswith(f"model.layers.{last}.")
    }
    randomize(around | inner, seed=head_seed, has_offset_norms=not is_layer)
    head = {f"{outer}{names[key]}.weight": around[kind] for key, kind in kinds.items()}
    head |= {f"{layer}{name}": tensor for name, tensor in inner.items()}
    if is_layer:  # copies, which published checkpoints have
        embedding = tensors["model.embed_tokens.weight"]
        head |= {f"{layer}embed_tokens.weight": embedding.clone()}
        head |= {f"{layer}shared_head.head.weight": tensors.get("lm_head.weight", embedding).clone()}
    dtype = tensors["model.embed_tokens.weight"].dtype
    save_file(tensors | {name: tensor.to(dtype) for name, tensor in head.items()}, file, {"format": "pt"})
    return path


class MtpReference:
    """The target of transformers, and its head: transformers' own `MtpModel`, or for Qwen that of `speculators`."""

    def __init__(self, target: Path, scratch: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        config = read_json(target / "config.json")
        self.is_layer = config["model_type"] == "glm4_moe"
        if self.is_layer:
            patterns = [rf"model\.layers\.{config['num_hidden_layers']}.*"]  # transformers lists published sizes
            self.model._keys_to_ignore_on_load_unexpected = patterns
            self.model.config.first_k_dense_replace = 0  # MtpModel numbers the head's layer 0; it has experts
            self.head = MtpModel.from_pretrained(self.model).eval()
        else:
            MTPConverter().convert(str(target), str(scratch), base_model=str(target), validate=False)
            self.head = MTPDraftModel.from_pretrained(scratch).eval()
            self.head.embed_tokens, self.head.lm_head = self.model.model.embed_tokens, self.model.lm_head

    @torch.no_grad()
    def chain(self, tokens: Sequence[int], num_drafts: int) -> list[int]:
        """Drafts after `tokens`, of which the last is the anchor: one pass of the layer over all rows for each.

        A row has the feature of the token before: the target's last hidden state, then the head's own output.
        """
        [states] = self.model.model(torch.tensor([tokens[:-1]])).last_hidden_state
        features, ids, drafts = list(states), list(tokens[1:]), list[int]()
        for _ in range(num_drafts):
            out = self._run(torch.stack(features)[None], torch.tensor([ids]))[0, -1]
            features.append(out)
            drafts.append(int(self.model.lm_head(out).argmax()))
            ids.append(drafts[-1])
        return drafts

    def _run(self, features: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(1, 1 + ids.shape[1])[None]
        embedded = self.model.model.embed_tokens(ids)
        rope = self.model.model.rotary_emb(embedded, positions)
        given = {"attention_mask": None, "position_ids": positions, "position_embeddings": rope}
        if self.is_layer:
            return self.head.layers[0](embedded, features, past_key_values=None, **given)
        return self.head.mtp_layers[0](hidden_states=features, token_embeddings=embedded, **given)
