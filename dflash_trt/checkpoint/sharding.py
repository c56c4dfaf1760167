"""Sharding of tensors: arithmetic on a WeightSpec and a Mapping."""

import torch

from dflash_trt.core.errors import problem
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import DecoderSpec, TargetSpec
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.weight_spec import WeightSpec


def shard(
    tensor: torch.Tensor,  # spec.shape
    spec: WeightSpec,
    mapping: Mapping,
) -> torch.Tensor:  # shard_shape(spec, mapping)
    """This rank's shard of a canonical tensor; each fused segment is sharded on its own."""
    if spec.sharding == "replicated":
        return tensor
    if spec.sharding == "columns":
        start, stop = share(spec.shape[1], mapping)
        return tensor[:, start:stop]
    pieces, row = [], 0
    for num_rows in spec.segments:
        start, stop = share(num_rows, mapping)
        pieces.append(tensor[row + start : row + stop])
        row += num_rows
    return torch.cat(pieces)


def shard_shape(spec: WeightSpec, mapping: Mapping) -> tuple[int, ...]:
    """Shape of a shard, the same on every rank."""
    if spec.sharding == "replicated":
        return spec.shape
    axis = 0 if spec.sharding == "rows" else 1
    return tuple(n // mapping.tp_size if i == axis else n for i, n in enumerate(spec.shape))


def share(length: int, mapping: Mapping) -> tuple[int, int]:
    """This rank's [start, stop) along an axis that tp_size divides."""
    assert length % mapping.tp_size == 0, f"{length} cannot be cut into {mapping.tp_size}"
    part = length // mapping.tp_size
    return mapping.tp_rank * part, (mapping.tp_rank + 1) * part


def mapping_problems(target: TargetSpec, draft: DraftSpec | None, mapping: Mapping) -> list[str]:
    """Reasons why this pair cannot be sharded this way."""
    problems = []
    if mapping.pp_size != 1:
        hint = "Use tensor parallelism alone: pipeline parallelism is not implemented."
        problems.append(problem("mapping pp_size", expected="1", found=str(mapping.pp_size), hint=hint))
    if mapping.tp_size != 1 and target.num_expert_layers > 0:
        hint = "Use one rank: sharding of experts is not implemented."
        found = f"{mapping.tp_size}, for a target with experts"
        problems.append(problem("mapping tp_size", expected="1", found=found, hint=hint))
    lengths = [*_lengths(target, "target"), ("target vocab_size", target.vocab_size)]
    if draft is not None:
        lengths += _lengths(draft, "drafter")
        if draft.draft_vocab_size is not None:
            lengths.append(("drafter draft_vocab_size", draft.draft_vocab_size))
    for name, length in lengths:
        if length % mapping.tp_size:
            expected = f"a divisor of {name} {length}"
            hint = "Choose a smaller tp_size: padding, and copies of a KV head on several ranks, are not implemented."
            problems.append(problem("mapping tp_size", expected=expected, found=str(mapping.tp_size), hint=hint))
    return problems


def _lengths(spec: DecoderSpec, owner: str) -> list[tuple[str, int]]:
    """Distinct sizes that tensor parallelism divides."""
    sizes = dict.fromkeys(item for layer in spec.layers for item in layer.sharded_sizes.items())
    return [(f"{owner} {name}", size) for name, size in sizes]
