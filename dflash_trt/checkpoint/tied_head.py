"""A head that config.json ties to the embedding, but that the checkpoint stores.

As in transformers, equal tensors are tied, and different ones are both kept.
"""

import torch
from safetensors import safe_open

from dflash_trt.checkpoint.names import embedding_name, head_name
from dflash_trt.checkpoint.tensors import StoredTensor, StoredTensors
from dflash_trt.core.model.decoder import TargetSpec

_ROWS = 4096  # compared at a time


def resolve_tied_head(spec: TargetSpec, stored: StoredTensors, notes: list[str]) -> TargetSpec:
    """Untie the head of `spec` if both tensors are stored and differ; reads up to the first difference."""
    name = head_name(stored.tensors)
    embedding, head = stored.tensors.get(embedding_name(stored.tensors)), stored.tensors.get(name)
    if not spec.is_embedding_tied or embedding is None or head is None or _is_equal(embedding, head):
        return spec
    notes.append(
        f"the target's {name} differs from its embedding although config.json has tie_word_embeddings true: "
        "the engine keeps both, as transformers does"
    )
    return spec.model_copy(update={"is_embedding_tied": False})


def _is_equal(a: StoredTensor, b: StoredTensor) -> bool:
    if a.shape != b.shape:
        return False
    with safe_open(a.path, framework="pt", device="cpu") as one, safe_open(b.path, framework="pt", device="cpu") as two:
        parts, others = one.get_slice(a.name), two.get_slice(b.name)
        starts = range(0, a.shape[0], _ROWS)
        return all(_is_same(parts[i : i + _ROWS], others[i : i + _ROWS]) for i in starts)


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) if a.dtype == b.dtype else torch.equal(a.double(), b.double())
