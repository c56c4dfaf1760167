"""A gated delta net: projections around the recurrence, which is one op."""

from dataclasses import dataclass
from typing import Any, Generic

from dflash_trt.core.model.gated_delta import GatedDelta
from dflash_trt.network.ops import DeltaParameters, Linear, Ops, Rows, T
from dflash_trt.network.rank_tensors import RankTensors
from dflash_trt.network.state import RecurrentCache


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaWeights(Generic[T]):
    """See `GatedDelta.weights`."""

    spec: GatedDelta
    qkvz: Linear[T]
    ba: Linear[T]
    parameters: DeltaParameters[T]
    o: Linear[T]

    def run(self, ops: Ops[T], x: T, rows: Rows[T], cache: RecurrentCache[T], *, rope: Any, eps: float) -> T:
        qkvz, ba = ops.linear(x, self.qkvz), ops.linear(x, self.ba)
        return ops.linear(ops.gated_delta(qkvz, ba, self.parameters, rows, cache, self.spec, eps), self.o)


def bind(spec: GatedDelta, tensors: RankTensors[T], prefix: str) -> GatedDeltaWeights[T]:
    return GatedDeltaWeights(
        spec=spec,
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
