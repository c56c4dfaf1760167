"""The step: one call verifies, accepts, lets the drafter observe and propose the next drafts.

Every tensor that enters or leaves is listed in `core/step_spec.py`. This is the function TensorRT compiles and torch
runs; the loop around it only moves integers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol

from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.network.decoder import TargetRun, TargetWeights, bind_target, last_of, logits_of, run_target
from dflash_trt.network.drafters.base import Drafter, bind_drafter
from dflash_trt.network.ops import Acceptance, ExchangedRows, Ops, StepInputs, T
from dflash_trt.network.proposal import Proposal
from dflash_trt.network.rank_tensors import RankTensors
from dflash_trt.network.state import StepState


@dataclass(frozen=True, kw_only=True, slots=True)
class Network(Generic[T]):
    """Specs and bound weights of one rank. Without a drafter the step decodes autoregressively."""

    target: TargetSpec
    target_weights: TargetWeights[T]
    draft: DraftSpec | None
    drafter: Drafter[T] | None
    mapping: Mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutputs(Generic[T]):
    """The outputs of `core/step_spec`: STEP_OUTPUTS and DRAFT_OUTPUTS. There is no proposal when K = 0."""

    acceptance: Acceptance[T]
    proposal: Proposal[T] | None


class LogitsReader(Protocol[T]):
    """Takes what it wants of a step's raw logits before they are sampled."""

    @property
    def prompt_parts(self) -> Sequence[T]:
        """int32 [M, 1] each: prompt tokens whose logits are wanted, in parts."""
        ...

    def read(self, logits: T) -> None:
        """[R*(K+1), V], at logit_rows."""
        ...

    def read_prompt(self, logits: T) -> None:
        """[M, V], of the next of `prompt_parts`."""
        ...


def bind_network(target: TargetSpec, draft: DraftSpec | None, tensors: RankTensors[T]) -> Network[T]:
    """Raises KeyError on a missing tensor."""
    weights = bind_target(target, tensors)
    return Network(
        target=target,
        target_weights=weights,
        draft=draft,
        drafter=None if draft is None else bind_drafter(draft, weights, tensors),
        mapping=tensors.mapping,
    )


def run_step(
    ops: Ops[T],
    network: Network[T],
    inputs: StepInputs[T],
    state: StepState[T],
    *,
    num_draft_tokens: int,
    logit_rows: T | None = None,
) -> StepOutputs[T]:
    """Target forward, sample and accept, observe, propose: in this order, with no host in between.

    `logit_rows`, [L], are the rows of tokens whose logits are computed, if more than those of `inputs` are: they come
    first.
    """
    target = run_layers(ops, network, inputs, state)
    rows = inputs.logit_rows if logit_rows is None else logit_rows
    exchanged = ExchangedRows(num_draft_tokens + 1)
    acceptance = accept(ops, network, target, logits_at(ops, network, target.hidden, rows, exchanged), None)
    return run_drafter(ops, network, inputs, state, target, acceptance, num_draft_tokens=num_draft_tokens)


def run_layers(ops: Ops[T], network: Network[T], inputs: StepInputs[T], state: StepState[T]) -> TargetRun[T]:
    """The first part of a step."""
    rows = ops.token_rows()
    tap_ids = () if network.draft is None else network.draft.target_layer_ids
    outputs = run_target(ops, network.target, network.target_weights, inputs.token_ids, rows, state.target_kv)
    tapped: dict[int, T] = {}
    for layer_id, hidden in enumerate(outputs):
        if layer_id in tap_ids:
            tapped[layer_id] = hidden
    return TargetRun(hidden=hidden, taps=[tapped[layer_id] for layer_id in tap_ids], rows=rows)


def accept(
    ops: Ops[T], network: Network[T], target: TargetRun[T], logits: T, reader: LogitsReader[T] | None
) -> Acceptance[T]:
    """Sample from the logits of a step. Callers keep no logits: the drafter's memory is counted without them."""
    if reader is not None:
        read_logits(ops, network, reader, logits, target.hidden)
    return ops.sample_and_accept(logits)


def logits_at(ops: Ops[T], network: Network[T], hidden: T, token_rows: T, exchanged: ExchangedRows) -> T:
    """The target's logits [M, V] at M rows of `hidden` [N, H]."""
    return logits_of(ops, network.target_weights, network.target, ops.gather_rows(hidden, token_rows), exchanged)


def read_logits(ops: Ops[T], network: Network[T], reader: LogitsReader[T], logits: T, hidden: T | None) -> None:
    """Pass the logits of a step to `reader`; logits of prompts follow from `hidden` [N, H]."""
    reader.read(logits)
    for part, token_rows in enumerate(reader.prompt_parts):
        assert hidden is not None
        reader.read_prompt(logits_at(ops, network, hidden, token_rows, ExchangedRows(prompt_part=part)))


def run_drafter(
    ops: Ops[T],
    network: Network[T],
    inputs: StepInputs[T],
    state: StepState[T],
    target: TargetRun[T],
    acceptance: Acceptance[T],
    *,
    num_draft_tokens: int,
) -> StepOutputs[T]:
    """The last part of a step."""
    drafter = network.drafter
    if drafter is None:
        return StepOutputs(acceptance=acceptance, proposal=None)
    drafter.observe(ops, inputs.token_ids, target, acceptance, state)
    proposal = drafter.propose(ops, acceptance, state, num_draft_tokens) if num_draft_tokens else None
    return StepOutputs(acceptance=acceptance, proposal=proposal)


def sequence_logits(ops: Ops[T], network: Network[T], inputs: StepInputs[T], state: StepState[T]) -> T:
    """The target's logits [N, V] after every token of a step, without sampling or drafts: for measuring."""
    weights = network.target_weights
    outputs = run_target(ops, network.target, weights, inputs.token_ids, ops.token_rows(), state.target_kv)
    return logits_of(ops, weights, network.target, last_of(outputs))
