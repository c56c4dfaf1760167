"""Sums, joins and exchanges over the ranks. NCCL makes the launches."""

from typing import Final

from dflash_trt.kernels.programs.program import FieldRule, Program, TensorRule

_X: Final = TensorRule("x", "F [N, C]")
_NUM_RANKS: Final = FieldRule("num_ranks", 1, 1024)

ALL_REDUCE: Final = Program(
    name="AllReduce", inputs=(_X,), outputs=(TensorRule("summed", "F [N, C]"),), fields=(_NUM_RANKS,)
)
ALL_GATHER: Final = Program(
    name="AllGather", inputs=(_X,), outputs=(TensorRule("gathered", "F [num_ranks * N, C]"),), fields=(_NUM_RANKS,)
)

_PARTS: Final = TensorRule("x", "F [num_ranks, N, C]")  # for each rank, rank 0's first
REDUCE_SCATTER: Final = Program(
    name="ReduceScatter", inputs=(_PARTS,), outputs=(TensorRule("summed", "F [N, C]"),), fields=(_NUM_RANKS,)
)
ALL_TO_ALL: Final = Program(
    name="AllToAll", inputs=(_PARTS,), outputs=(TensorRule("received", "F [num_ranks, N, C]"),), fields=(_NUM_RANKS,)
)
