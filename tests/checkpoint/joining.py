"""The inverse of sharding, written from WeightSpec's docstring alone: what the shards of all ranks make together."""

from collections.abc import Sequence

import torch

from dflash_trt.core.mapping import Mapping
from dflash_trt.core.weight_spec import WeightSpec


def ranks(tp_size: int) -> list[Mapping]:
    return [Mapping(world_size=tp_size, tp_size=tp_size, rank=rank) for rank in range(tp_size)]


def join(shards: Sequence[torch.Tensor], spec: WeightSpec) -> torch.Tensor:
    """The whole tensor: replicas must agree, columns stand side by side, every segment is joined on its own."""
    if spec.sharding == "replicated":
        assert all(torch.equal(piece, shards[0]) for piece in shards)
        return shards[0]
    if spec.sharding == "columns":
        return torch.cat(list(shards), dim=1)
    sizes = [rows // len(shards) for rows in spec.segments]
    per_rank = [torch.split(piece, sizes) for piece in shards]
    return torch.cat([torch.cat(pieces) for pieces in zip(*per_rank, strict=True)])
