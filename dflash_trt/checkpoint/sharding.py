"""Sharding of tensors: arithmetic on a WeightSpec and a Mapping."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from dflash_trt.core.errors import problem
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import DecoderSpec, TargetSpec
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.weight_spec import Division, WeightSpec, place_of, segment_specs, segments_of


def shard(
    tensor: torch.Tensor,  # spec.shape
    spec: WeightSpec,
    mapping: Mapping,
) -> torch.Tensor:  # rank_shard(spec, mapping).shape
    """This rank's shard of a canonical tensor; each fused segment is sharded on its own."""
    if spec.sharding != "rows":
        return tensor[rank_index(spec, mapping)]
    segments = zip(torch.split(tensor, list(segments_of(spec)), dim=spec.row_axis), segment_specs(spec), strict=True)
    parts = [part[rank_index(part_spec, mapping)] for part, part_spec in segments]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=spec.row_axis)


def shard_expert(tensor: torch.Tensor, spec: WeightSpec, mapping: Mapping) -> torch.Tensor:
    """The same for a single expert of a tensor of experts."""
    return shard(tensor, replace(spec, shape=spec.shape[1:], num_experts=0), expert_ranks(mapping))


def expert_ranks(mapping: Mapping) -> Mapping:
    """The ranks that divide the rows and columns of an expert."""
    return Mapping(world_size=mapping.moe_tp_size, tp_size=mapping.moe_tp_size, rank=mapping.moe_tp_rank)


def rank_experts(num_experts: int, mapping: Mapping) -> range:
    """Experts that this rank holds."""
    num_mine = num_experts // mapping.ep_size
    return range(mapping.ep_rank * num_mine, (mapping.ep_rank + 1) * num_mine)


def rank_index(
    spec: WeightSpec,  # one segment
    mapping: Mapping,
) -> tuple[slice, ...]:
    """Index of this rank's shard in the whole tensor."""
    (rank, num_ranks), experts = place_of(spec, mapping), tuple[slice, ...]()
    if spec.num_experts:
        mine = rank_experts(spec.num_experts, mapping)
        rank, num_ranks, experts = mapping.moe_tp_rank, mapping.moe_tp_size, (slice(mine.start, mine.stop),)
    if spec.sharding == "replicated":
        return (*experts, slice(None))
    if spec.sharding == "columns":
        return (*experts, slice(None), _share(spec.shape[-1], 1, rank, num_ranks))
    [part] = segment_specs(spec)
    return (*experts, _share(segments_of(part)[0], part.units[0], rank, num_ranks))


def _share(length: int, unit: int, rank: int, num_ranks: int) -> slice:
    """A rank's part of `length` in whole units: some of them, or one that other ranks hold, too."""
    num_units = length // unit
    start = rank * num_units // num_ranks
    return slice(start * unit, (start + max(1, num_units // num_ranks)) * unit)


def mapping_problems(target: TargetSpec, draft: DraftSpec | None, mapping: Mapping) -> list[str]:
    """Reasons why this pair cannot be sharded this way."""
    problems = list[str]()
    if mapping.pp_size != 1:
        hint = "Use tensor parallelism alone: pipeline parallelism is not implemented."
        problems.append(problem("mapping pp_size", expected="1", found=str(mapping.pp_size), hint=hint))
    if mapping.ep_size != 1 and not target.moes:
        hint = "Leave ep_size out."
        problems.append(
            problem("mapping ep_size", expected="1, for no layer has experts", found=str(mapping.ep_size), hint=hint)
        )
    if mapping.dp_size != 1 and not target.moes:
        hint = "Serve replicas of an engine of one rank instead: `dflash-trt serve ENGINE --gpus ...`."
        expected = "a target with experts, which all ranks share"
        problems.append(problem("attention_dp", expected=expected, found="one without", hint=hint))
    if mapping.dcp_size != 1:
        problems += _context_problems(target, mapping.dcp_size)
    num_of = {"group": mapping.tp_size, "all": mapping.num_expert_ranks, "groups": mapping.dp_size}
    for name, length, may_copy, divided_by in _lengths(target, draft):
        num_ranks = num_of[divided_by]
        if length % num_ranks and not (may_copy and num_ranks % length == 0):
            expected = f"a divisor {'or a multiple ' if may_copy else ''}of {name} {length}"
            hint = "Choose another tp_size: padding is not implemented."
            problems.append(problem("mapping tp_size", expected=expected, found=str(num_ranks), hint=hint))
    problems += _expert_problems((*target.moes, *(draft.moes if draft else ())), mapping)
    return problems


def _context_problems(target: TargetSpec, dcp_size: int) -> Iterator[str]:
    if not target.latents:
        hint = "Leave dcp_size out: ranks divide K/V heads."
        expected = "a target with latents, which each rank would hold whole"
        yield problem("dcp_size", expected=expected, found="one without", hint=hint)
    for row_size in sorted({mla.latent_dim + mla.rope_dim for mla in target.latents}):
        if row_size % dcp_size:
            hint = "Choose another number of ranks."
            expected = f"a divisor of the {row_size} features of a latent and its key"
            yield problem("dcp_size", expected=expected, found=str(dcp_size), hint=hint)


def _expert_problems(moes: Iterable[Moe], mapping: Mapping) -> Iterator[str]:
    for moe in dict.fromkeys(moes):
        if moe.num_experts % mapping.ep_size:
            expected, found = f"a divisor of num_experts {moe.num_experts}", str(mapping.ep_size)
            yield problem("mapping ep_size", expected=expected, found=found, hint="Choose another ep_size.")
        if moe.intermediate_size % mapping.moe_tp_size:
            expected = f"tp_size / ep_size to divide an expert's intermediate_size {moe.intermediate_size}"
            found = f"{mapping.num_expert_ranks} / {mapping.ep_size}"
            hint = f"Set ep_size to {mapping.num_expert_ranks}: each rank then has whole experts."
            yield problem("mapping", expected=expected, found=found, hint=hint)


def _lengths(target: TargetSpec, draft: DraftSpec | None) -> Iterator[tuple[str, int, bool, Division]]:
    """Distinct sizes that ranks divide; True if ranks can hold copies. See `WeightSpec.divided_by`."""
    decoders: list[tuple[str, DecoderSpec]] = [("target", target)] + ([("drafter", draft)] if draft else [])
    for owner, spec in decoders:
        for name, size in dict.fromkeys(item for layer in spec.layers for item in layer.mixer.sharded_sizes.items()):
            yield f"{owner} {name}", size, False, "group"
        feed_forwards = [layer.feed_forward for layer in spec.layers]
        for name, size in dict.fromkeys(item for fed in feed_forwards for item in fed.sharded_sizes.items()):
            yield f"{owner} {name}", size, False, "all"
        for name, size in dict.fromkeys(item for layer in spec.layers for item in layer.mixer.replicated_sizes.items()):
            yield f"{owner} {name}", size, True, "group"
    yield "target vocab_size", target.vocab_size, False, "all"
    if target.per_layer_embedding is not None:
        yield "target per-layer vocab_size", target.per_layer_embedding.vocab_size, False, "groups"
    if draft is not None and draft.draft_vocab_size is not None:
        yield "drafter draft_vocab_size", draft.draft_vocab_size, False, "all"
