"""Position of a rank in its world, with the terms of TensorRT-LLM's Mapping."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from dflash_trt.core.frozen import Frozen

NumRanks = Annotated[int, Field(ge=1, le=1024)]


class Mapping(Frozen):
    """world_size = tp_size * pp_size * dp_size; ranks of one tensor-parallel group are adjacent.

    Each of `dp_size` groups of ranks has requests of its own, and attention that its `tp_size` ranks divide:
    TensorRT-LLM's attention data parallelism. All ranks divide MLPs and heads, and groups divide embeddings. Experts
    are divided among all ranks: each of `ep_size` groups of adjacent ranks has a part of them, whose rows and columns
    its `moe_tp_size` ranks divide.

    With `dcp_size` ranks of decode context parallelism (vLLM's name), each rank of a tensor-parallel group keeps every
    dcp_size-th position of the latents.
    """

    world_size: NumRanks = 1
    tp_size: NumRanks = 1
    pp_size: NumRanks = 1
    dp_size: NumRanks = 1
    ep_size: NumRanks = 1
    dcp_size: NumRanks = 1
    rank: int = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.world_size != self.tp_size * self.pp_size * self.dp_size:
            sizes = f"tp_size {self.tp_size} * pp_size {self.pp_size} * dp_size {self.dp_size}"
            raise ValueError(f"world_size {self.world_size} is not {sizes}")
        if self.num_expert_ranks % self.ep_size:
            raise ValueError(f"ep_size {self.ep_size} does not divide the {self.num_expert_ranks} ranks of experts")
        if self.dcp_size not in (1, self.tp_size):
            raise ValueError(f"dcp_size {self.dcp_size} is neither 1 nor tp_size {self.tp_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in 0..{self.world_size - 1}")
        return self

    def of_rank(self, rank: int) -> "Mapping":
        """The same mapping for another rank."""
        return Mapping(**(self.model_dump() | {"rank": rank}))

    def num_kv_heads_of(self, num_kv_heads: int) -> int:
        """K/V heads per rank: its share of them, or a copy of one if there are more ranks than heads."""
        return max(1, num_kv_heads // self.tp_size)

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def num_expert_ranks(self) -> int:
        """Ranks that divide a layer's experts, MLPs and heads: all of a stage."""
        return self.tp_size * self.dp_size

    @property
    def dp_rank(self) -> int:
        """The number of its group."""
        return self.expert_rank // self.tp_size

    @property
    def expert_rank(self) -> int:
        """This one's number among them."""
        return self.rank % self.num_expert_ranks

    @property
    def moe_tp_size(self) -> int:
        return self.num_expert_ranks // self.ep_size

    @property
    def moe_tp_rank(self) -> int:
        return self.expert_rank % self.moe_tp_size

    @property
    def ep_rank(self) -> int:
        return self.expert_rank // self.moe_tp_size
