"""The step: one call verifies, accepts, feeds the draft context and drafts the next block.

Every tensor that enters or leaves is listed in `core/step_spec.py`. This is the function TensorRT compiles and torch
runs; the loop around it only moves integers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model_spec import DraftSpec, TargetSpec
from dflash_trt.network.decoder import TargetHidden, forward_target, logits_of
from dflash_trt.network.drafters.dflash import draft_context, draft_tokens
from dflash_trt.network.ops import Acceptance, Ops, StepInputs, StepState, T
from dflash_trt.network.weights import DraftWeights, TargetWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class Network(Generic[T]):
    """Specs and bound weights of one rank. Without a drafter the step is plain autoregressive decoding."""

    target: TargetSpec
    target_weights: TargetWeights[T]
    draft: DraftSpec | None
    draft_weights: DraftWeights[T] | None
    mapping: Mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutputs(Generic[T]):
    """The outputs of `core/step_spec.STEP_OUTPUTS`; draft_tokens is None when K = 0."""

    acceptance: Acceptance[T]
    draft_tokens: T | None


def run_step(
    ops: Ops[T], network: Network[T], inputs: StepInputs[T], state: StepState[T], *, num_draft_tokens: int
) -> StepOutputs[T]:
    """Target forward, sample and accept, draft context, draft: in this order, with no host in between."""
    draft, draft_weights = network.draft, network.draft_weights
    hidden = _run_target(ops, network, inputs, state, tap_layer_ids=draft.target_layer_ids if draft else ())
    rows = ops.gather_rows(hidden.last, inputs.logit_rows)
    acceptance = ops.sample_and_accept(logits_of(ops, network.target_weights, network.target, rows))
    if draft is None or draft_weights is None:
        return StepOutputs(acceptance=acceptance, draft_tokens=None)

    context = draft_context(ops, draft, draft_weights, taps=hidden.taps, positions=inputs.positions)
    if num_draft_tokens == 0:
        for layer_context, cache in zip(context, state.draft_kv, strict=True):
            ops.write_draft_context(layer_context, cache, acceptance)
        return StepOutputs(acceptance=acceptance, draft_tokens=None)

    tokens = draft_tokens(
        ops,
        draft,
        draft_weights,
        network.mapping,
        context=context,
        caches=state.draft_kv,
        acceptance=acceptance,
    )
    return StepOutputs(acceptance=acceptance, draft_tokens=tokens)


def sequence_logits(ops: Ops[T], network: Network[T], inputs: StepInputs[T], state: StepState[T]) -> T:
    """The target's logits [N, V] after every token of a step, without sampling or drafts: for measuring."""
    hidden = _run_target(ops, network, inputs, state, tap_layer_ids=())
    return logits_of(ops, network.target_weights, network.target, hidden.last)


def _run_target(
    ops: Ops[T], network: Network[T], inputs: StepInputs[T], state: StepState[T], *, tap_layer_ids: Sequence[int]
) -> TargetHidden[T]:
    return forward_target(
        ops,
        network.target,
        network.target_weights,
        network.mapping,
        token_ids=inputs.token_ids,
        positions=inputs.positions,
        caches=state.target_kv,
        tap_layer_ids=tap_layer_ids,
    )
