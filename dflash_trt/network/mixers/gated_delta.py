"""A gated delta net: projections around the recurrence, which is one op."""

from dataclasses import dataclass
from typing import Generic

from dflash_trt.core.model.gated_delta import GatedDelta
from dflash_trt.network.ops import DeltaParameters, Linear, Ops, Rows, T
from dflash_trt.network.rank_tensors import RankTensors
from dflash_trt.network.state import RecurrentCache


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaWeights(Generic[T]):
    """See `GatedDelta.weights`."""

    qkvz: Linear[T]
    ba: Linear[T]
    parameters: DeltaParameters[T]
    o: Linear[T]


def bind_gated_delta(tensors: RankTensors[T], prefix: str) -> GatedDeltaWeights[T]:
    return GatedDeltaWeights(
        qkvz=tensors.linear(f"{prefix}.qkvz"),
        ba=tensors.linear(f"{prefix}.ba"),
        parameters=DeltaParameters(
            conv=tensors[f"{prefix}.conv"],
            log_rate=tensors[f"{prefix}.log_rate"],
            dt_bias=tensors[f"{prefix}.dt_bias"],
            norm=tensors[f"{prefix}.gated_norm"],
        ),
        o=tensors.summed_linear(f"{prefix}.o"),
    )


def run_gated_delta(
    ops: Ops[T],
    spec: GatedDelta,
    weights: GatedDeltaWeights[T],
    x: T,  # [N, H], normed
    rows: Rows[T],
    cache: RecurrentCache[T],
    *,
    eps: float,
) -> T:  # [N, H], of one rank: to be summed
    qkvz, ba = ops.linear(x, weights.qkvz), ops.linear(x, weights.ba)
    return ops.linear(ops.gated_delta(qkvz, ba, weights.parameters, rows, cache, spec, eps), weights.o)
