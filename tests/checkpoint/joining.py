"""The inverse of sharding, written from WeightSpec's docstring alone: what the shards of all ranks make together."""

from collections.abc import Sequence

import torch

from dflash_trt.core.mapping import Mapping
from dflash_trt.core.weight_spec import WeightSpec


def ranks(tp_size: int) -> list[Mapping]:
    return [Mapping(world_size=tp_size, tp_size=tp_size, rank=rank) for rank in range(tp_size)]


def ranks_of_own_requests(dp_size: int) -> list[Mapping]:
    return [Mapping(world_size=dp_size, dp_size=dp_size, rank=rank) for rank in range(dp_size)]


def join(shards: Sequence[torch.Tensor], spec: WeightSpec, *, have_own_requests: bool = False) -> torch.Tensor:
    """The whole tensor: copies must agree, columns stand side by side, every segment is joined on its own."""
    if spec.sharding == "replicated" or spec.divided_by == ("group" if have_own_requests else "groups"):
        assert all(torch.equal(piece, shards[0]) for piece in shards)
        return shards[0]
    if spec.sharding == "columns":
        return torch.cat(list(shards), dim=1)
    units = spec.units or (1,) * len(spec.segments)
    sizes = [max(unit, rows // len(shards)) for rows, unit in zip(spec.segments, units, strict=True)]
    per_rank = [torch.split(piece, sizes) for piece in shards]
    segments = zip(zip(*per_rank, strict=True), spec.segments, units, strict=True)
    return torch.cat([_join_segment(pieces, rows // unit) for pieces, rows, unit in segments])


def _join_segment(pieces: Sequence[torch.Tensor], num_units: int) -> torch.Tensor:
    """Neighbours hold the same unit where there are more ranks than units."""
    num_copies = max(1, len(pieces) // num_units)
    for first in range(0, len(pieces), num_copies):
        assert all(torch.equal(piece, pieces[first]) for piece in pieces[first : first + num_copies])
    return torch.cat(pieces[::num_copies])
