"""Gated delta nets over the GPU kernels. States are written in place: after a GPU error nothing runs."""

from dataclasses import dataclass

from torch import Tensor

from dflash_trt.kernels.gated_delta_launch import DeltaRows, DeltaWeights, run_gated_delta
from dflash_trt.network.ops import DeltaParameters, Rows
from dflash_trt.network.state import RecurrentCache


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSlots:
    """Slots of a step's requests; `max_rows` is the most rows of a request, None if unknown."""

    slot_ids: Tensor  # int64 [R]
    max_rows: int | None = None


def apply_gated_delta(
    qkvz: Tensor,
    ba: Tensor,
    parameters: DeltaParameters[Tensor],
    rows: Rows[Tensor],
    slots: StepSlots,
    cache: RecurrentCache[Tensor],
    eps: float,
    *,
    is_in_order: bool = False,
) -> Tensor:
    """See `Ops.gated_delta`, and `run_gated_delta` for the order."""
    assert rows.token_offsets is not None, "a draft block has no recurrent layers"
    step = DeltaRows(
        slot_ids=slots.slot_ids,
        token_offsets=rows.token_offsets,
        context_lens=rows.context_lens,
        has_prompts=slots.max_rows is None or slots.max_rows > cache.spec.num_records,
    )
    weights = DeltaWeights(
        conv=parameters.conv, log_rate=parameters.log_rate, dt_bias=parameters.dt_bias, norm=parameters.norm
    )
    return run_gated_delta(qkvz, ba, weights, step, cache.tensors, cache.spec, eps, is_in_order=is_in_order)
