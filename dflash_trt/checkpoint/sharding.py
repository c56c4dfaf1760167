"""Sharding of tensors: arithmetic on a WeightSpec and a Mapping."""

from collections.abc import Iterator

import torch

from dflash_trt.core.errors import problem
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import DecoderSpec, TargetSpec
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.weight_spec import WeightSpec, segment_specs, segments_of


def shard(
    tensor: torch.Tensor,  # spec.shape
    spec: WeightSpec,
    mapping: Mapping,
) -> torch.Tensor:  # rank_shard(spec, mapping.tp_size).shape
    """This rank's shard of a canonical tensor; each fused segment is sharded on its own."""
    if spec.sharding != "rows":
        return tensor[rank_index(spec, mapping)]
    parts = zip(torch.split(tensor, list(segments_of(spec))), segment_specs(spec), strict=True)
    return torch.cat([part[rank_index(part_spec, mapping)] for part, part_spec in parts])


def rank_index(
    spec: WeightSpec,  # of one segment
    mapping: Mapping,
) -> tuple[slice, ...]:
    """Index of this rank's shard in the whole tensor."""
    if spec.sharding == "replicated":
        return (slice(None),)
    if spec.sharding == "columns":
        return slice(None), _share(spec.shape[1], 1, mapping)
    [part] = segment_specs(spec)
    return (_share(part.shape[0], part.units[0], mapping),)


def _share(length: int, unit: int, mapping: Mapping) -> slice:
    """This rank's part of `length` in whole units: some of them, or one that other ranks hold, too."""
    num_units = length // unit
    start = mapping.tp_rank * num_units // mapping.tp_size
    return slice(start * unit, (start + max(1, num_units // mapping.tp_size)) * unit)


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
    for name, length, may_copy in _lengths(target, draft):
        if length % mapping.tp_size and not (may_copy and mapping.tp_size % length == 0):
            expected = f"a divisor {'or a multiple ' if may_copy else ''}of {name} {length}"
            hint = "Choose another tp_size: padding is not implemented."
            problems.append(problem("mapping tp_size", expected=expected, found=str(mapping.tp_size), hint=hint))
    return problems


def _lengths(target: TargetSpec, draft: DraftSpec | None) -> Iterator[tuple[str, int, bool]]:
    """Distinct sizes that tensor parallelism divides; True for those of which ranks can hold copies."""
    decoders: list[tuple[str, DecoderSpec]] = [("target", target)] + ([("drafter", draft)] if draft else [])
    for owner, spec in decoders:
        for name, size in dict.fromkeys(item for layer in spec.layers for item in layer.sharded_sizes.items()):
            yield f"{owner} {name}", size, False
        for name, size in dict.fromkeys(item for layer in spec.layers for item in layer.replicated_sizes.items()):
            yield f"{owner} {name}", size, True
    yield "target vocab_size", target.vocab_size, False
    if draft is not None and draft.draft_vocab_size is not None:
        yield "drafter draft_vocab_size", draft.draft_vocab_size, False
