"""Launches of a step in three parts, each possibly a CUDA graph: target to logits, sampling, drafts.

A step that changes or reads its logits replays the first and the last part, and samples in its own way. Snapshots of
recurrent state (`backends/slots.py`) are copied by launches on the stream of the steps, before and after a step's
graph: in the order of the steps, whatever the host knows of them yet, and no graph depends on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dflash_trt.backends.cuda.handles import tensor_of
from dflash_trt.backends.cuda.logit_rules import StepRules
from dflash_trt.backends.graphs import Enqueue, unowned
from dflash_trt.backends.torch.logprobs import LogprobsReader
from dflash_trt.core.step_plan import StateCopies
from dflash_trt.kernels.row_copies_launch import RowCopies
from dflash_trt.network.decoder import TargetRun
from dflash_trt.network.ops import Acceptance, ExchangedRows, StepInputs
from dflash_trt.network.proposal import Proposal
from dflash_trt.network.state import StepState
from dflash_trt.network.step import Network, logits_at, read_logits, run_drafter, run_layers

SAMPLING = 1  # index of the part


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitUse:
    """Uses of a step's logits besides sampling. `make_rules` makes its rules and masks."""

    reader: LogprobsReader | None = None
    make_rules: Callable[[StepInputs[Tensor]], StepRules] | None = None

    @property
    def is_none(self) -> bool:
        return self.reader is None and self.make_rules is None

    @property
    def needs_target(self) -> bool:
        """True if the last layer's output is read, too, which no graph keeps."""
        return self.reader is not None and bool(self.reader.prompt_parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """Memory that steps of one shape read and write: the same addresses every time."""

    assemble: Callable[[], StepInputs[Tensor]]  # the first launches
    inputs: Callable[[], StepInputs[Tensor]]
    make_ops: Callable[..., Any]  # called with inputs
    store: Callable[[Acceptance[Tensor], Proposal[Tensor] | None], None]  # the last launches


class StepLaunches:
    """A step of one shape. Its parts run in order; values passed between parts live until the last one."""

    def __init__(
        self, network: Network[Tensor], state: StepState[Tensor], memory: StepMemory, *, num_draft_tokens: int
    ) -> None:
        self._network, self._state, self._memory = network, state, memory
        self._num_draft_tokens = num_draft_tokens
        self._ops: Any = None
        self._target: TargetRun[Any] | None = None
        self._acceptance: Acceptance[Any] | None = None
        self._logits: Tensor | None = None  # [R*(K+1), V]; after the last part of a graph it belongs to another graph

    @property
    def parts(self) -> tuple[Enqueue, Enqueue, Enqueue]:
        return self.run_target, self.sample, self.draft

    def run_target(self) -> None:
        inputs = self._memory.assemble()
        self._ops = self._memory.make_ops(inputs)
        self._target = run_layers(self._ops, self._network, inputs, self._state)
        hidden, exchanged = self._target.hidden, ExchangedRows(self._num_draft_tokens + 1)
        self._logits = tensor_of(logits_at(self._ops, self._network, hidden, inputs.logit_rows, exchanged))

    def sample(self, use: LogitUse | None = None) -> None:
        use, inputs = use or LogitUse(), self._memory.inputs()
        assert self._logits is not None
        rules = None if use.make_rules is None else use.make_rules(inputs)
        ops = self._memory.make_ops(inputs, rules=rules)
        if use.reader is not None:
            hidden = None if self._target is None else self._target.hidden
            read_logits(ops, self._network, use.reader, self._logits, hidden)
        self._acceptance = ops.sample_and_accept(self._logits)

    def draft(self) -> None:
        """The logits end here: the drafter's memory is counted without."""
        assert self._logits is not None and self._target is not None and self._acceptance is not None
        self._logits = unowned(self._logits) if self._logits.is_cuda else None
        target, self._target = self._target, None
        ops, self._ops = self._ops, None
        result = run_drafter(
            ops,
            self._network,
            self._memory.inputs(),
            self._state,
            target,
            self._acceptance,
            num_draft_tokens=self._num_draft_tokens,
        )
        self._memory.store(result.acceptance, result.proposal)


class DeviceSnapshots:
    """Copies between slots, on the current stream; snapshot i is slot `first_slot + i`."""

    def __init__(self, state: StepState[Tensor], *, first_slot: int) -> None:
        slots = state.slots
        self._slots = RowCopies(slots, slots, device=slots[0].device) if slots else None
        self._first_slot = first_slot

    def restore(self, copies: StateCopies) -> None:
        """Fill slots from snapshots, before a step."""
        for slot, snapshot in zip(copies.slots.tolist(), copies.snapshots.tolist(), strict=True):
            self._copy(self._first_slot + snapshot, slot)

    def save(self, copies: StateCopies) -> None:
        """Copy slots to snapshots, after a step."""
        for slot, snapshot in zip(copies.slots.tolist(), copies.snapshots.tolist(), strict=True):
            self._copy(slot, self._first_slot + snapshot)

    def warm_up(self) -> None:
        """Compile the kernel, on the slot of padding."""
        if self._slots is not None:
            self._copy(self._first_slot - 1, self._first_slot - 1)

    def _copy(self, source: int, destination: int) -> None:
        assert self._slots is not None, "a target without recurrent layers has no snapshots"
        self._slots.copy(source, destination)
