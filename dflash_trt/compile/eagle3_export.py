"""An EAGLE-3 head as TensorRT-LLM's Eagle3ForCausalLM reads it, from SafeAILab's files and from those of Speculators.

Source: `_torch/models/modeling_speculative.py` of TensorRT-LLM (at 00679c66c3e38f6d2651ad0a5bef0f94d862e36c).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from dflash_trt.checkpoint.drafters.eagle3 import ARCHITECTURES
from dflash_trt.checkpoint.drafters.speculators import SPECULATORS_KEY
from dflash_trt.checkpoint.names import draft_names
from dflash_trt.checkpoint.tensors import StoredTensor, StoredTensors
from dflash_trt.checkpoint.vocabulary import read_draft_to_target
from dflash_trt.checkpoint.weights import OpenFiles
from dflash_trt.compile.unified_export import Change, dropped, permuted_blocks, renamed
from dflash_trt.core.errors import problem
from dflash_trt.core.model.draft import DraftSpec

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"  # numbered from 1

_EMBEDDING, _JOINT_NORM, _OFFSETS = "embed_tokens.weight", "input_norm.weight", "d2t"
_MARKS = "t2d"  # in SafeAILab's files, too, and not read
_LAYERS, _MIDLAYER = "layers.0.", "midlayer."  # Speculators' name of the layer, and SafeAILab's
_WINDOWS = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")  # it has none
_ROWS_AT_ONCE = 8192
_OTHER = "Use another drafter, or build with --backend torch or tensorrt."


def is_embedding_shared(draft: DraftSpec) -> bool:
    """True if TensorRT-LLM takes the target's embedding, which it does where both are equally wide."""
    return draft.target_hidden_size == draft.hidden_size


def eagle3_problems(
    draft: DraftSpec, stored: StoredTensors, target_embedding: StoredTensor, *, dtype: torch.dtype
) -> Iterator[str]:
    """Tensors that TensorRT-LLM would leave unread, though they change the drafts. `dtype` is the build's."""
    embedding, offsets = stored.tensors.get(_EMBEDDING), stored.tensors.get(_OFFSETS)
    if embedding is not None and is_embedding_shared(draft) and not _are_equal(embedding, target_embedding, dtype):
        expected = "the target's, which TensorRT-LLM takes where both are equally wide"
        yield problem("drafter embedding", expected=expected, found="its own, of other values", hint=_OTHER)
    if offsets is not None and draft.draft_vocab_size == draft.target_vocab_size:
        ids = read_draft_to_target(offsets)
        if not torch.equal(ids, torch.arange(len(ids))):
            expected = "zeros, since TensorRT-LLM reads it for a smaller vocabulary alone"
            yield problem("drafter tensor 'd2t'", expected=expected, found="other offsets", hint=_OTHER)


def eagle3_changes(stored: StoredTensors, exported: DraftSpec, order: Sequence[int]) -> dict[str, Change]:
    """Tensors with other names or another order than in the source, and those that are left out.

    `order[i]` is the place in the source of the tap that comes i-th.
    """
    tensors, changes = stored.tensors, dict[str, Change]()
    used = {_MARKS} | {part for names in draft_names(exported, tensors).values() for part in names.parts}
    for name, tensor in tensors.items():
        if name not in used:
            changes[name] = dropped()
        elif name.startswith(_LAYERS):
            changes[name] = renamed(tensor, _MIDLAYER + name.removeprefix(_LAYERS))
    if exported.chain is not None and exported.chain.fc_norm == "per_tap":
        norms = [tensors[f"fc_norm.{i}.weight"] for i in range(len(order))]
        changes |= {norms[j].name: renamed(norms[j], norms[i].name) for i, j in enumerate(order)}
    if _JOINT_NORM in used:
        changes[_JOINT_NORM] = permuted_blocks(tensors[_JOINT_NORM], order)
    return changes


def eagle3_config(fields: Mapping[str, Any], exported: DraftSpec, *, dtype: str) -> dict[str, Any]:
    """A head's config.json for TensorRT-LLM, which reads each field in one place and has other defaults.

    A head ties nothing: its matrix of logits is its own or the target's, whatever its file says of the target.
    """
    assert exported.chain is not None
    if SPECULATORS_KEY in fields:
        fields = _flat(fields["transformer_layer_config"])
        fields |= {"architectures": [ARCHITECTURES[0]], "speculative_tokens": exported.max_draft_len}
    left_out = (AUX_LAYERS, "norm_before_fc", "dtype")
    changed = {name: value for name, value in fields.items() if name not in left_out}
    nested = {
        **(changed.get("eagle_config") or {}),
        AUX_LAYERS: [layer_id + 1 for layer_id in exported.target_layer_ids],
        "norm_before_fc": exported.chain.fc_norm == "joint",
    }
    return changed | {
        "eagle_config": nested,
        "fc_norm": exported.chain.fc_norm == "per_tap",
        "norm_output": exported.chain.has_normed_features,
        "target_hidden_size": exported.target_hidden_size,
        "draft_vocab_size": exported.draft_vocab_size or exported.target_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }


def _flat(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of Speculators' layer as SafeAILab has them, with RoPE at the top."""
    flat = {name: value for name, value in layer.items() if name not in (*_WINDOWS, "rope_parameters")}
    rope = dict(layer.get("rope_parameters") or {})
    if "rope_theta" in rope:
        flat["rope_theta"] = rope.pop("rope_theta")
    if rope.get("rope_type", "default") != "default":
        flat["rope_scaling"] = rope
    return flat


def _are_equal(one: StoredTensor, other: StoredTensor, dtype: torch.dtype) -> bool:
    """True if both hold the same values in `dtype`."""
    if one.shape != other.shape:
        return False
    with ExitStack() as stack:
        opened = OpenFiles(stack)
        for first in range(0, one.shape[0], _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            ours = opened.slice_of(one)[rows].to(dtype, copy=True)
            if not torch.equal(ours, opened.slice_of(other)[rows].to(dtype)):
                return False
    return True
