"""The torch executor: the step run eagerly by PyTorch, the default on any machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from dflash_trt.backends.host_memory import HasPlaces, HostMemory
from dflash_trt.backends.padding import StepShape, exact_shape
from dflash_trt.backends.page_budget import PagePlan, plan_engine_pages
from dflash_trt.backends.sequence_batch import sequence_batches
from dflash_trt.backends.slots import DeviceSlots, PlanInputs, SlotSnapshots
from dflash_trt.backends.step_inputs import HostInputs, StepShapes, step_inputs, step_result
from dflash_trt.backends.torch.deferred_context import deferred_context
from dflash_trt.backends.torch.deterministic_ops import DeterministicNativeOps, DeterministicOps
from dflash_trt.backends.torch.layers import prepared
from dflash_trt.backends.torch.loading import (
    activation_dtype,
    allocate_state,
    limits_of,
    load_network,
    mapped_weights,
    rotaries_of,
    states_of,
)
from dflash_trt.backends.torch.logprobs import logprobs_reader
from dflash_trt.backends.torch.native.library import CpuKernels, NoKernels, cpu_kernels
from dflash_trt.backends.torch.native.ops import MAX_RECORDED_ROWS, NativeOps, fits, widened
from dflash_trt.backends.torch.native.programs import Programs
from dflash_trt.backends.torch.native.slots import NativeSlots
from dflash_trt.backends.torch.ops import RopeTable, TorchOps, make_rope_table
from dflash_trt.backends.torch.process_group import ONE_RANK, RankGroup
from dflash_trt.backends.torch.sampling import AdjustScores, adjustment
from dflash_trt.backends.torch.shared_rows import IdleRank, SharedRows
from dflash_trt.core.batch import ScheduledRequest, StepBatch, StepSampling, plan_of
from dflash_trt.core.expert_exchange import exchange_costs
from dflash_trt.core.logit_rules import RuledSlots
from dflash_trt.core.model.rope import Rotary
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.core.step_plan import (
    CHAINED,
    ExecutorLimits,
    FinishedStep,
    JointRows,
    PageCopies,
    PageCopyError,
    StepPlan,
    StepResult,
    StepRows,
    TokenMasks,
)
from dflash_trt.network.decoder import TargetRun
from dflash_trt.network.ops import Acceptance, ExchangedRows, StepInputs
from dflash_trt.network.step import (
    LogitsReader,
    Network,
    StepOutputs,
    accept,
    logits_at,
    run_drafter,
    run_layers,
    sequence_logits,
)

if TYPE_CHECKING:
    from dflash_trt.core.runtime_config import RuntimeConfig
    from dflash_trt.engine_dir import EngineDir


_MAX_TABLE_SIZE: Final = 8192  # entries that a step copies whether or not they are used

_ANY_BATCH: Final = StepBatch(
    requests=(
        ScheduledRequest(
            request_id="", token_ids=(0,), context_len=0, num_candidates=0, page_ids=(0,), sampling=StepSampling()
        ),
    ),
    num_draft_tokens=0,
)


class TorchExecutor(HasPlaces):
    """Implements `core.step_plan.StepExecutor`. Owns the pages and the slots."""

    has_queue = False
    can_retry = True

    def __init__(
        self,
        network: Network[Tensor],
        *,
        page_plan: PagePlan,
        max_batch_size: int,
        max_num_tokens: int,
        max_draft_len: int,
        quantization: QuantizationSpec | None = None,
        ranks: RankGroup = ONE_RANK,
        is_deterministic: bool = False,
        has_confidence: bool = False,
        on_read: Callable[[int], None] | None = None,
        kernels: CpuKernels | None = None,
    ) -> None:
        """`quantization` says which pages are FP8; quantized weights are in the network already.

        `ranks` have the other shards of the network; all run the same steps. With `has_confidence`, drafts come with
        one. `kernels` compute what they can.
        """
        assert ranks.num_ranks == network.mapping.world_size, "a shard of a network needs all of its ranks"
        self._ranks, self._shared = ranks, None
        if network.mapping.dp_size > 1:
            self._ranks, self._shared = ONE_RANK, _shared_rows_maker(network, ranks, is_deterministic)
        self.page_plan = page_plan
        states, dtype = states_of(network, quantization), activation_dtype(network)
        native = kernels if fits(dtype, states) else None
        if native is not None and dtype == torch.bfloat16:
            network, dtype = widened(network), torch.float32
        self.network = prepared(network, kernels, dtype=dtype, on_read=on_read)
        self.limits = limits_of(
            network,
            page_plan,
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            max_draft_len=max_draft_len,
            has_confidence=has_confidence,
        )
        self._rope_tables = _rope_tables(network, self.limits, dtype)
        self._inputs = HostInputs(self.limits)
        self._slots = DeviceSlots(self.limits) if kernels is None else NativeSlots(self.limits, kernels)
        self._shapes = StepShapes(self.limits, _step_shape)
        self._ruled_slots = RuledSlots(self.limits.max_positions)
        self._make_ops, programs = _ops_maker(native, ranks, is_deterministic=is_deterministic)
        self._programs = None if is_deterministic or network.target.is_recurrent else programs  # of whole steps
        self._state = allocate_state(
            states,
            num_pages=page_plan.num_pages,
            page_size=page_plan.page_size,
            num_slots=max_batch_size + 1 + page_plan.num_snapshots,
            page_windows=page_plan.page_windows,
        )
        self._idle = IdleRank(self.network, self._state, dtype)
        self._snapshots = SlotSnapshots(self._state.slots, first_slot=max_batch_size + 1)
        self._host_memory = HostMemory(
            self._state.paged, self.limits, slots=self._state.slots, is_shared=ranks.num_ranks > 1
        )
        self._context = deferred_context(
            self.network, page_plan, max_batch_size=max_batch_size, max_num_tokens=max_num_tokens, dtype=dtype
        )

    @classmethod
    def open(
        cls, engine: EngineDir, config: RuntimeConfig, *, rank: int = 0, ranks: RankGroup = ONE_RANK
    ) -> TorchExecutor:
        """Load one rank's weights and plan the pages, as many as every rank has room for.

        `num_threads` sets PyTorch's intra-op threads for the whole process. Pages are touched, and so cost memory,
        only when a request reaches them.

        Raises:
            CapacityError: see `plan_engine_pages`.
        """
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        manifest = engine.manifest
        build = manifest.build_config
        kernels = cpu_kernels()
        with mapped_weights(engine, rank) as tensors:
            network = load_network(
                engine, rank=rank, use_drafter=config.use_drafter, tensors=tensors, widens_linears=False
            )
            page_plan = plan_engine_pages(manifest, config)
            return cls(
                network,
                page_plan=page_plan.agreed(ranks.smallest),
                max_batch_size=build.max_batch_size,
                max_num_tokens=build.max_num_tokens,
                max_draft_len=build.max_draft_len,
                quantization=manifest.pretrained_config.quantization,
                ranks=ranks,
                is_deterministic=config.deterministic,
                has_confidence=config.adaptive_draft_length,
                on_read=engine.on_read,
                kernels=None if isinstance(kernels, NoKernels) else kernels,
            )

    def submit(self, plan: StepPlan) -> FinishedStep:
        """Run one step at once. Shapes and limits are the caller's duty, so a violation is a bug and asserted."""
        return FinishedStep(lambda: self._run(plan))

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepResult:
        shape = self._shapes.of(plan)
        self._copy_pages(plan.page_copies)
        if not plan.rows.num_requests:
            if plan.joint is not None and any(plan.joint.num_requests):
                self._idle.run(self._ops_of_no_step(plan.joint), plan.joint)
            return StepResult.of_no_rows()
        packed, inputs = self._inputs.pack(plan, shape, self._slots)
        if self._programs is not None and self._is_repeatable(plan, inputs):
            key = "step", shape, plan.rows.num_draft_tokens, torch.get_num_threads()
            return step_result(self._programs.run(key, partial(self._whole_step, plan, packed, inputs)))
        self._slots.assemble(packed, inputs)
        self._snapshots.restore(plan.restores)
        adjust, reader = adjustment(self._ruled_slots, plan, inputs), logprobs_reader(plan)
        ops = self._ops(
            inputs,
            num_draft_tokens=plan.rows.num_draft_tokens,
            adjust=adjust,
            masks=plan.masks,
            slot_ids=packed.slot_ids,
            joint=plan.joint,
        )
        outputs = self._outputs(ops, inputs, reader)
        ops.store_states()
        self._snapshots.save(plan.saves)
        self._store(packed, outputs)
        result = step_result(outputs)
        return result if reader is None else reader.added_to(result)

    def _is_repeatable(self, plan: StepPlan, inputs: StepInputs[Tensor]) -> bool:
        """True of a step that is nothing but calls of the CPU kernels: greedy, without rules or more log probabilities.

        No step of a network with recurrent layers is, and none that leaves its context to a later one.
        """
        is_small = plan.rows.total_tokens <= MAX_RECORDED_ROWS
        has_context = self._context is None or (plan.rows.num_draft_tokens > 0 and self._has_whole_context(plan.rows))
        is_plain = not (plan.slot_updates or plan.masks is not None or plan.has_logprobs or self._ruled_slots)
        return is_small and has_context and is_plain and not inputs.temperature.numpy().any()

    def _has_whole_context(self, rows: StepRows) -> bool:
        assert self._context is not None
        known = self._slots.context_lens.numpy()[rows.slot_ids]
        context_lens = np.where(rows.context_lens == CHAINED, known, rows.context_lens)
        page_tables = self._slots.page_table.numpy()[rows.slot_ids]
        return self._context.is_complete(page_tables, context_lens + rows.num_tokens)

    def _whole_step(self, plan: StepPlan, packed: PlanInputs, inputs: StepInputs[Tensor]) -> StepOutputs[Tensor]:
        self._slots.assemble(packed, inputs)
        ops = self._ops(inputs, num_draft_tokens=plan.rows.num_draft_tokens, slot_ids=packed.slot_ids)
        outputs = self._outputs(ops, inputs, None)
        self._store(packed, outputs)
        return outputs

    def _store(self, packed: PlanInputs, outputs: StepOutputs[Tensor]) -> None:
        acceptance = outputs.acceptance
        self._slots.store(packed.slot_ids, acceptance.bonus_tokens, outputs.proposal, acceptance.next_context_lens)

    def _outputs(
        self, ops: TorchOps, inputs: StepInputs[Tensor], reader: LogitsReader[Tensor] | None
    ) -> StepOutputs[Tensor]:
        state, context, has_drafts = self._state, self._context, ops.num_draft_tokens > 0
        if context is not None and has_drafts:
            context.complete(ops, state)
        target, acceptance = self._accepted(ops, inputs, reader)
        if context is not None and not has_drafts:
            context.keep(target, ops, state)
            return StepOutputs(acceptance=acceptance, proposal=None)
        return run_drafter(ops, self.network, inputs, state, target, acceptance, num_draft_tokens=ops.num_draft_tokens)

    def _accepted(
        self, ops: TorchOps, inputs: StepInputs[Tensor], reader: LogitsReader[Tensor] | None
    ) -> tuple[TargetRun[Tensor], Acceptance[Tensor]]:
        """The step up to its drafts, of which the sampler is computed anew."""

        def run_target() -> tuple[TargetRun[Tensor], Tensor]:
            target = run_layers(ops, self.network, inputs, self._state)
            return target, logits_at(
                ops, self.network, target.hidden, inputs.logit_rows, ExchangedRows(ops.num_draft_tokens + 1)
            )

        target, logits = ops.replayed("target", run_target)
        return target, accept(ops, self.network, target, logits, reader)

    def _copy_pages(self, copies: PageCopies) -> None:
        if not len(copies):
            return
        try:
            if self._context is not None:
                self._context.before_copies(self._ops_of_no_step(), copies, self._state)
            self._host_memory.copy(copies)
        except Exception as error:
            raise PageCopyError(f"{type(error).__name__}: {error}") from error

    @torch.inference_mode()
    def target_logits(self, token_ids: Sequence[int]) -> Tensor:  # float [N, V]
        """The target's logits after every token of one sequence: for measuring, on an idle executor.

        All ranks compute them, with copies of the rows where they have requests of their own.
        """
        assert 0 < len(token_ids) <= self.limits.max_seq_len
        logits = []
        for batch in sequence_batches(token_ids, self.limits):
            inputs = step_inputs(batch, page_windows=self.limits.page_windows)
            joint = JointRows.of([plan_of(batch)] * self.network.mapping.dp_size)
            ops = self._ops(inputs, num_draft_tokens=0, joint=joint)
            logits.append(sequence_logits(ops, self.network, inputs, self._state))
        return torch.cat(logits)

    def close(self) -> None:
        """Free weights and pages at once, even if the executor is still referenced. Idempotent."""
        for name in ("network", "_make_ops", "_programs", "_context", "_idle", "_state", "_snapshots", "_host_memory"):
            vars(self).pop(name, None)

    def _ops_of_no_step(self, joint: JointRows | None = None) -> TorchOps:
        """Ops that are given other rows than the step's own."""
        inputs = step_inputs(_ANY_BATCH, page_windows=self.limits.page_windows)
        return self._ops(inputs, num_draft_tokens=0, joint=joint)

    def _ops(
        self,
        inputs: StepInputs[Tensor],
        *,
        num_draft_tokens: int,
        adjust: AdjustScores | None = None,
        masks: TokenMasks | None = None,
        slot_ids: Tensor | None = None,
        joint: JointRows | None = None,
    ) -> TorchOps:
        return self._make_ops(
            inputs,
            self._rope_tables,
            page_size=self.limits.page_size,
            num_draft_tokens=num_draft_tokens,
            ranks=self._ranks,
            shared_rows=None if self._shared is None else self._shared(joint=joint),
            adjust=adjust,
            masks=masks,
            slot_ids=slot_ids,
            windows=[group.window for group in self.limits.page_windows],
            has_confidence=self.limits.has_draft_confidence,
        )


def _ops_maker(
    kernels: CpuKernels | None, ranks: RankGroup, *, is_deterministic: bool
) -> tuple[Callable[..., TorchOps], Programs | None]:
    """What makes the ops of a step, and their programs. An exchange with other ranks is no call of a kernel."""
    if kernels is None:
        return DeterministicOps if is_deterministic else TorchOps, None
    programs = Programs(kernels) if ranks.num_ranks == 1 else None
    ops = DeterministicNativeOps if is_deterministic else NativeOps
    return partial(ops, kernels=kernels, programs=programs), programs


def _shared_rows_maker(network: Network[Tensor], ranks: RankGroup, is_in_order: bool) -> Callable[..., SharedRows]:
    costs, ep_size = exchange_costs(None), network.mapping.ep_size
    return partial(SharedRows, ranks=ranks, is_in_order=is_in_order, ep_size=ep_size, costs=costs)


def _step_shape(plan: StepPlan, limits: ExecutorLimits) -> StepShape:
    """The plan's own, whose page table is as wide as any if that is small: a shape that comes again."""
    shape = exact_shape(plan)
    has_wide_table = plan.rows.num_requests * limits.table_width <= _MAX_TABLE_SIZE
    return replace(shape, num_pages=None) if has_wide_table else shape


def _rope_tables(network: Network[Tensor], limits: ExecutorLimits, dtype: torch.dtype) -> dict[Rotary, RopeTable]:
    num_positions = limits.max_positions + limits.max_draft_len + 1  # a draft block reaches further
    return {
        rotary: make_rope_table(rotary, num_positions=num_positions, dtype=dtype) for rotary in rotaries_of(network)
    }
