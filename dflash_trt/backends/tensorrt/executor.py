"""The TensorRT executor: the step as one engine call, with the same protocol as the torch executor.

Knows shapes, memory and graphs; the engine knows the network. Imports TensorRT, and touches the GPU, in `open`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dflash_trt.backends.graphs import Capture, CudaCapture, GraphCache
from dflash_trt.backends.host_memory import HasPlaces, HostMemory
from dflash_trt.backends.padding import StepShape, full_block_shapes, prefill_kernel_shapes, verify_block_shape
from dflash_trt.backends.page_budget import TENSORRT_FREE_MEMORY_FRACTION, PagePlan, plan_engine_pages
from dflash_trt.backends.slots import SlotSnapshots
from dflash_trt.backends.staging import StagedStep, new_timer
from dflash_trt.backends.step_inputs import check_plan
from dflash_trt.backends.tensorrt.buffers import EngineState, StepBuffers, shapes_of
from dflash_trt.backends.tensorrt.communicator import Communicator
from dflash_trt.backends.tensorrt.context import StepContexts
from dflash_trt.backends.tensorrt.engine import check_engine_io, deserialize
from dflash_trt.backends.tensorrt.network import StepNetworkSpec
from dflash_trt.backends.tensorrt.profiles import max_prompt_scores
from dflash_trt.backends.tensorrt.rule_inputs import RuleInputs
from dflash_trt.backends.tensorrt.scored_rows import ScoredRows, StepScores
from dflash_trt.backends.torch.process_group import ONE_RANK, RankGroup
from dflash_trt.core.batch import StepBatch, plan_of
from dflash_trt.core.step_plan import ExecutorLimits, JointRows, StepHandle, StepPlan

if TYPE_CHECKING:
    from dflash_trt.core.runtime_config import RuntimeConfig
    from dflash_trt.engine_dir import EngineDir


class TensorRTExecutor(HasPlaces):
    """Implements `core.step_plan.StepExecutor` over a deserialized engine. Owns the pages and the slots.

    An error of a GPU is sticky: nothing runs after it in this process.
    """

    has_queue = True
    can_retry = False

    def __init__(
        self,
        contexts: StepContexts,
        spec: StepNetworkSpec,
        limits: ExecutorLimits,
        *,
        stream: Any,
        capture: Capture | None,
        device: torch.device,
    ) -> None:
        """Steps of the shapes for which `contexts` has one each are captured with `capture`, in `warm_up`."""
        self.limits = limits
        self.page_plan: PagePlan  # set by `open`, which knows the memory
        self._owners: tuple[Any, ...] = ()  # the engine, and what must outlive it
        self._communicator: Communicator | None = None  # for several ranks
        self._spec = spec
        self._stream = stream
        self._contexts = contexts
        of_engine = engine_limits(spec, limits)
        self._buffers = StepBuffers(spec, of_engine, device=device)
        self._rules = RuleInputs(of_engine, vocab_size=spec.target.vocab_size, device=device)
        self._scores = ScoredRows(spec, of_engine, device=device)
        first_snapshot = limits.max_batch_size + 1  # behind the slot of padding
        num_slots = first_snapshot + (limits.num_snapshots or 0)
        self.state = EngineState(
            spec, num_pages=limits.num_pages, num_slots=num_slots, device=device, page_windows=limits.page_windows
        )
        self._snapshots = SlotSnapshots(list(self.state.slots.values()), first_slot=first_snapshot)
        self._host_memory = HostMemory(
            self.state.paged,
            limits,
            slots=list(self.state.slots.values()),
            is_page_locked=device.type == "cuda",
            is_shared=spec.mapping.world_size > 1,
        )
        self.graphs = GraphCache(capture)
        by_slot = self._rules.by_slot
        contexts.bind(self._buffers.tensors | self.state.tensors | by_slot | self._scores.outputs)
        contexts.set_shapes(shapes_of(by_slot))
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # zeroed, before another stream writes into it

    @classmethod
    def open(
        cls,
        engine_dir: EngineDir,
        config: RuntimeConfig,
        *,
        rank: int = 0,
        ranks: RankGroup = ONE_RANK,
        draft_lens: Sequence[int] | None = None,
        plugin_library: Path | None = None,
    ) -> TensorRTExecutor:
        """Open one rank of an engine directory, on the current GPU. Without `use_drafter` it does not draft.

        Verify blocks of every K in `draft_lens` are captured ahead; None means only the engine's largest K. Contexts,
        with their activations, take memory before the pages do. `plugin_library` defaults to the directory's own.

        Raises:
            CapacityError: see `plan_engine_pages`, or no room for the contexts.
            EngineDirError: no GPU, no TensorRT, no plugin library, an engine made for others, or one whose pages are
                not written where they should be (see `canary`), or whose ranks exchange nothing (see
                `exchange_check`).
            RankError: NCCL failed.
        """
        from dflash_trt.backends.tensorrt.canary import check_pages
        from dflash_trt.backends.tensorrt.compatibility import check_identity, plan_path, spec_of
        from dflash_trt.backends.tensorrt.exchange_check import check_exchange, check_shared_rows
        from dflash_trt.backends.tensorrt.module import load_tensorrt

        library = check_identity(engine_dir, plugin_library=plugin_library)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)  # the CPU still packs and reads steps
        spec = spec_of(engine_dir, rank)
        engine, owners = deserialize(plan_path(engine_dir, rank), plugin_library=library)
        check_engine_io(engine, spec)
        device, stream = _gpu()
        communicator = _communicator(ranks, rank, device, stream)
        if communicator is not None:
            engine = communicator.given_to(engine, mode=spec.collectives, plugin_library=library)
        limits = _limits_without_pages(engine_dir, spec, config)
        lens = (limits.max_draft_len,) if draft_lens is None else draft_lens
        strategy = load_tensorrt("tensorrt").ExecutionContextAllocationStrategy.USER_MANAGED
        captured = captured_shapes(spec, limits, lens)
        contexts = StepContexts(engine, strategy, stream, captured=captured, device=device)
        pages = _page_plan(engine_dir, spec, config, ranks)  # from the memory that the contexts leave
        limits = limits_with_pages(limits, pages, is_recurrent=spec.states.is_recurrent)
        executor = cls(contexts, spec, limits, stream=stream, capture=CudaCapture(stream), device=device)
        executor.page_plan = pages
        executor._owners = (engine, *owners)
        executor._communicator = communicator
        executor.warm_up()
        check_pages(executor)
        if communicator is not None:
            if spec.mapping.dp_size > 1:
                check_shared_rows(executor, ranks)
            else:
                check_exchange(executor, rank=rank, num_ranks=ranks.num_ranks)
        return executor

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Load the kernels of every step, and capture those that have a context of their own, before serving.

        The steps consist of padding alone, which touches no page and no request's slot.
        """
        lens = sorted({shape.num_draft_tokens for shape in self._contexts.captured}, reverse=True)
        eager = [shape for length in lens for shape in prefill_kernel_shapes(self.limits, length)]
        for shape in sorted([*self._contexts.captured, *eager], key=lambda shape: shape.num_tokens, reverse=True):
            self._buffers.staging.stage(plan_of(StepBatch(requests=(), num_draft_tokens=shape.num_draft_tokens)), shape)
            with self._on_stream():
                self._buffers.staging.upload()
                if shape.has_graph:
                    self.graphs.capture(shape, partial(self._enqueue, shape))
                else:
                    self._enqueue(shape)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> StepHandle:
        """Enqueue one step. Shapes and limits are the caller's duty: violations are bugs, and asserted.

        An engine with a drafter always drafts at least one token. Where ranks have requests of their own, a rank
        without rows runs a step of padding, and plans that do not say the size of a step are alike on all ranks.
        """
        check_plan(plan, self.limits)
        if not any((plan.joint or JointRows.of([plan])).num_requests):
            with self._on_stream():
                return self._host_memory.copied(plan.page_copies, self._buffers.device)
        given = self._with_drafts(plan)
        shape = verify_block_shape(given, self.limits)
        self._buffers.staging.stage(given, shape)
        with self._on_stream():
            started = new_timer(self._buffers.device)
            self._host_memory.copy(plan.page_copies)
            self._buffers.staging.upload()
            self._snapshots.restore(plan.restores)
            masks = self._rules.of_step(given, shape)
            scores = self._scores.of_step(given, shape)
            if masks is not None or scores is not None:
                shape = replace(shape, has_graph=False, is_decode=shape.is_decode and not given.num_read_prompt_rows)
            self.graphs.run(shape, partial(self._enqueue, shape, masks, scores))
            self._snapshots.save(plan.saves)
            if scores is not None:
                scores.download()
            result = self._buffers.results.download(
                shape, num_requests=plan.rows.num_requests, has_drafts=plan.rows.num_draft_tokens > 0
            )
        return StagedStep(result, started, reader=scores)

    def close(self) -> None:
        """Free engine, contexts and pages on the device at once, even if the executor is still referenced.

        Idempotent.
        """
        if "graphs" not in vars(self):
            return
        on_gpu = self._buffers.device.type == "cuda"
        if on_gpu:
            self._stream.synchronize()
        for name in (
            "graphs",
            "_contexts",
            "_owners",
            "state",
            "_snapshots",
            "_host_memory",
            "_buffers",
            "_rules",
            "_scores",
        ):  # graphs before contexts, then the engine
            del vars(self)[name]
        if self._communicator is not None:
            self._communicator.close()
        if on_gpu:
            torch.cuda.empty_cache()

    def pages(self) -> dict[str, Tensor]:
        """The pages as they are now, by state name."""
        return dict(self.state.pages)

    def inspect(self, trt: Any) -> str:
        """The engine inspector's JSON; `trt` is the engine's module."""
        engine, *_ = self._owners
        information: str = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
        return information

    def _with_drafts(self, plan: StepPlan) -> StepPlan:
        """With the K of the engine's step: an engine with a drafter drafts a token at least."""
        num_drafts = max(plan.rows.num_draft_tokens, 1) if self._spec.has_drafts else 0
        if num_drafts == plan.rows.num_draft_tokens:
            return plan
        masks = plan.masks and plan.masks.widened(plan.rows.num_draft_tokens + 1, num_drafts + 1)
        return replace(plan, rows=replace(plan.rows, num_draft_tokens=num_drafts), masks=masks)

    def _enqueue(
        self, shape: StepShape, masks: dict[str, Tensor] | None = None, scores: StepScores | None = None
    ) -> None:
        """The launches of a step; what a CUDA graph holds. `masks` are of a step with logit rules or token masks."""
        context, staging = self._contexts.of(shape), self._buffers.staging
        self._buffers.assemble(shape)
        if masks is not None:
            self._rules.write_tokens(staging.plan_inputs(shape), staging.inputs(shape))
        logit_rows = staging.inputs(shape).logit_rows.flatten()
        given = self._rules.without if masks is None else masks
        given = given | (self._scores.without(logit_rows) if scores is None else scores.inputs(logit_rows))
        context.bind(given)
        context.enqueue(self._buffers.shapes(shape) | shapes_of(given))
        self._buffers.store(shape)

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._buffers.device.type == "cuda" else contextlib.nullcontext()


def engine_limits(spec: StepNetworkSpec, limits: ExecutorLimits) -> ExecutorLimits:
    """With the K and C of the engine's steps, which drafts in every one of them if it can.

    The positions stay the scheduler's, which lays out page tables by their number.
    """
    most = spec.max_draft_len if spec.has_drafts else 0
    max_seq_len = limits.max_positions - most
    return replace(
        limits,
        max_draft_len=most,
        draft_topk=spec.draft_topk,
        has_draft_confidence=spec.has_draft_confidence,
        max_seq_len=max_seq_len,
    )


def captured_shapes(spec: StepNetworkSpec, limits: ExecutorLimits, draft_lens: Iterable[int]) -> list[StepShape]:
    """Verify blocks of every bucket and every K that the engine may run with."""
    most = engine_limits(spec, limits).max_draft_len
    least = min(1, most)  # K = 0 runs as 1
    lens = {min(max(length, least), most) for length in (*draft_lens, 0)}
    return [shape for length in sorted(lens) for shape in full_block_shapes(limits, num_draft_tokens=length)]


def _gpu() -> tuple[torch.device, Any]:
    """The current one, and a stream of its own for the steps."""
    make_stream: Any = torch.cuda.Stream  # untyped in PyTorch
    return torch.device("cuda"), make_stream()


def _communicator(ranks: RankGroup, rank: int, device: torch.device, stream: Any) -> Communicator | None:
    """That of several ranks, after a sum over it."""
    if ranks.num_ranks == 1:
        return None
    communicator = Communicator.join(ranks.shared_bytes, rank=rank, num_ranks=ranks.num_ranks)
    communicator.check_sum(device, stream.cuda_stream)
    return communicator


def _limits_without_pages(engine_dir: EngineDir, spec: StepNetworkSpec, config: RuntimeConfig) -> ExecutorLimits:
    build = engine_dir.manifest.build_config
    return ExecutorLimits(
        max_batch_size=build.max_batch_size,
        max_seq_len=build.max_seq_len,
        max_num_tokens=build.max_num_tokens,
        max_draft_len=spec.max_draft_len if config.use_drafter else 0,
        draft_topk=spec.draft_topk if config.use_drafter else 0,
        has_draft_confidence=spec.has_draft_confidence and config.use_drafter,
        page_size=spec.page_size,
        num_pages=0,
        max_prompt_scores=max_prompt_scores(build),
    )


def limits_with_pages(limits: ExecutorLimits, pages: PagePlan, *, is_recurrent: bool) -> ExecutorLimits:
    """Of a target with recurrent layers, snapshots are in the memory of pages, too."""
    return replace(
        limits,
        num_pages=pages.num_pages,
        page_windows=pages.page_windows,
        num_snapshots=pages.num_snapshots if is_recurrent else None,
        num_host_pages=pages.num_host_pages,
        num_host_snapshots=pages.num_host_snapshots,
    )


def _page_plan(engine_dir: EngineDir, spec: StepNetworkSpec, config: RuntimeConfig, ranks: RankGroup) -> PagePlan:
    """Pages for this GPU's free memory, and no more than any other rank has."""
    pages = plan_engine_pages(
        engine_dir.manifest,
        config.model_copy(update={"use_drafter": True}),  # the engine has the drafter's pages in any case
        free_bytes=lambda: int(torch.cuda.mem_get_info()[0]),
        default_fraction=TENSORRT_FREE_MEMORY_FRACTION,
        has_groups=bool(spec.page_windows),
    )
    return pages.agreed(ranks.smallest)
