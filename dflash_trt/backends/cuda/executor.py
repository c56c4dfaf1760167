"""The torch executor on a GPU: our kernels, CUDA graphs, no word between host and device in a step.

A step is one copy in, one graph (or, with a long prefill chunk, the same launches one by one), one copy out. On a CPU
it runs in Triton's interpreter, which is for tests.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from dflash_trt.backends.cuda.experts import prepare_device_experts
from dflash_trt.backends.cuda.gated_delta import StepSlots
from dflash_trt.backends.cuda.host_memory import PageLockedMemory
from dflash_trt.backends.cuda.linear import prepare_device_linear, prepare_fixed_linear
from dflash_trt.backends.cuda.logit_rules import StepRules
from dflash_trt.backends.cuda.ops import TorchGpuOps
from dflash_trt.backends.cuda.resources import GpuResources
from dflash_trt.backends.cuda.shipped import use_shipped_kernels
from dflash_trt.backends.cuda.step_launches import SAMPLING, DeviceSnapshots, LogitUse, StepLaunches, StepMemory
from dflash_trt.backends.graphs import CudaCapture, GraphCache
from dflash_trt.backends.host_memory import HasPlaces
from dflash_trt.backends.logit_rules import DeviceRules, mask_tensors
from dflash_trt.backends.padding import StepShape, decode_shape, joint_rows, step_shape, warm_shapes
from dflash_trt.backends.page_budget import GPU_FREE_MEMORY_FRACTION, PagePlan, plan_engine_pages
from dflash_trt.backends.sequence_batch import sequence_batches
from dflash_trt.backends.slots import PageTables
from dflash_trt.backends.staging import InputStaging, ResultStaging, StagedStep, new_timer
from dflash_trt.backends.step_inputs import StepShapes
from dflash_trt.backends.torch.loading import (
    activation_dtype,
    allocate_state,
    limits_of,
    load_network,
    states_of,
    with_experts,
    with_linears,
)
from dflash_trt.backends.torch.logprobs import logprobs_reader
from dflash_trt.backends.torch.process_group import ONE_RANK, RankGroup
from dflash_trt.backends.torch.shared_rows import IdleRank, SharedRows
from dflash_trt.core.batch import StepBatch, plan_of
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.expert_exchange import exchange_costs
from dflash_trt.core.host_resources import available_cores
from dflash_trt.core.logprobs import PromptRows, TopRows
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from dflash_trt.core.step_plan import JointRows, StepHandle, StepPlan, TokenMasks
from dflash_trt.kernels.attention_fixed import FixedSplits
from dflash_trt.kernels.compiling import kernels_compiled_alone
from dflash_trt.kernels.launching import MAX_REQUESTS
from dflash_trt.kernels.rope_and_pages_launch import MAX_POSITIONS, DraftLayers, stack_draft_layers
from dflash_trt.kernels.routing_launch import tile_edges
from dflash_trt.kernels.sampling_launch import SamplingOutputs, score_rows
from dflash_trt.network.ops import Acceptance, StepInputs
from dflash_trt.network.proposal import Proposal
from dflash_trt.network.state import StepState
from dflash_trt.network.step import Network, sequence_logits

if TYPE_CHECKING:
    from dflash_trt.core.runtime_config import RuntimeConfig
    from dflash_trt.engine_dir import EngineDir


_LOG = logging.getLogger(__name__)
_SAMPLED: Final = LogitUse()
_MAX_COMPILERS: Final = 32  # threads; Python's part of a compilation, a fifth, is one at a time


class TorchGpuExecutor(HasPlaces):
    """Implements `core.step_plan.StepExecutor`.

    Owns pages, slots and staging memory; `device` holds weights. GPU errors are sticky: nothing runs after one in this
    process.
    """

    has_queue = True
    can_retry = False
    _host_memory: PageLockedMemory

    def __init__(
        self,
        network: Network[Tensor],
        *,
        page_plan: PagePlan,
        max_batch_size: int,
        max_num_tokens: int,
        max_draft_len: int,
        device: torch.device,
        quantization: QuantizationSpec | None = None,
        ranks: RankGroup = ONE_RANK,
        is_deterministic: bool = False,
    ) -> None:
        """`ranks` have the other shards of the network; all run steps of the same shapes.

        Raises ConfigError if the engine is too large for the kernels.
        """
        assert ranks.num_ranks == network.mapping.world_size, "a shard of a network needs all of its ranks"
        self._ranks, self._dtype = ranks, activation_dtype(network)
        _check_sizes(max_batch_size, page_plan.max_seq_len + 2 * max_draft_len, page_plan.page_size)
        _check_parts(network.mapping.dcp_size, is_deterministic)
        self.page_plan, self.is_deterministic = page_plan, is_deterministic
        self.network = _prepared(network, is_deterministic=is_deterministic)
        self.limits = limits_of(
            network,
            page_plan,
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            max_draft_len=max_draft_len,
        )
        self._state = allocate_state(
            states_of(network, quantization),
            num_pages=page_plan.num_pages,
            page_size=page_plan.page_size,
            num_slots=max_batch_size + 1 + page_plan.num_snapshots,
            device=device,
            page_windows=page_plan.page_windows,
        )
        self._snapshots = DeviceSnapshots(self._state, first_slot=max_batch_size + 1)
        self._host_memory = PageLockedMemory.of(self._state, self.limits, device, is_shared=ranks.num_ranks > 1)
        max_rows = max_batch_size * (self.limits.max_draft_len + 1)
        self._resources = GpuResources.allocate(
            network.target,
            network.draft,
            mapping=network.mapping,
            max_tokens=max(max_num_tokens, max_rows),
            max_rows=max_rows,
            draft_layers=_draft_layers(self.network, self._state),
            dtype=self._dtype,
            device=device,
            splits=self._splits(max_rows) if is_deterministic else None,
        )
        self._device, self._shapes = device, StepShapes(self.limits, step_shape)
        self._staging = InputStaging(self.limits, device)
        self._tables = PageTables(self.limits, device=device)
        self._results, self._rules = ResultStaging(self.limits, device), DeviceRules(self.limits, device)
        self._stream = _new_stream(device)
        self.graphs = GraphCache(None if self._stream is None else CudaCapture(self._stream))
        self._captured: dict[StepShape, StepLaunches] = {}

    @classmethod
    def open(
        cls,
        engine: EngineDir,
        config: RuntimeConfig,
        *,
        rank: int = 0,
        ranks: RankGroup = ONE_RANK,
        draft_lens: Sequence[int] | None = None,
        device: torch.device | None = None,
    ) -> TorchGpuExecutor:
        """Load one rank's weights to the current GPU and plan the pages in its remaining free memory.

        Every rank gets as many pages as all of them have room for. Steps of every K in `draft_lens` are compiled and
        captured ahead; None means only the engine's largest K.

        Raises:
            ConfigError: the engine is larger than the kernels are made for.
            CapacityError: see `plan_engine_pages`.
        """
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)  # the CPU still packs and reads steps
        device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
        manifest = engine.manifest
        build = manifest.build_config
        network = load_network(engine, rank=rank, use_drafter=config.use_drafter, device=str(device))
        page_plan = plan_engine_pages(
            manifest,
            config,
            free_bytes=lambda: int(torch.cuda.mem_get_info(device)[0]),
            default_fraction=GPU_FREE_MEMORY_FRACTION,
        )
        executor = cls(
            network,
            page_plan=page_plan.agreed(ranks.smallest),
            max_batch_size=build.max_batch_size,
            max_num_tokens=build.max_num_tokens,
            max_draft_len=build.max_draft_len,
            device=device,
            quantization=manifest.pretrained_config.quantization,
            ranks=ranks,
            is_deterministic=config.deterministic,
        )
        if device.type == "cuda":
            use_shipped_kernels(engine, warn=_LOG.warning if ranks.rank == 0 else _LOG.debug)
            lens = (executor.limits.max_draft_len,) if draft_lens is None else draft_lens
            pads_prompts = network.mapping.dp_size == 1
            edges = executor.tile_edges
            executor.warm_up(warm_shapes(executor.limits, lens, tile_edges=edges, pads_prompts=pads_prompts))
        return executor

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> StepHandle:
        """Enqueue one step. Shapes and limits are the caller's duty: violations are bugs, and asserted."""
        joint = plan.joint if plan.joint is not None and any(plan.joint.num_requests) else None
        pads = joint is not None and joint.is_decode  # as many verify blocks on all ranks
        if not plan.rows.num_requests and not pads:
            with self.on_stream():
                if joint is not None:
                    any_shape = decode_shape(1, 0)
                    ops: Any = self._ops_of(any_shape, joint)(self._inputs(any_shape), self._resources)
                    self._idle.run(ops, joint)
                return self._host_memory.copied(plan.page_copies, self._device)
        shape = self._shapes.of(plan)
        self._staging.stage(plan, shape)
        with self.on_stream():
            started = new_timer(self._device)
            self._host_memory.copy(plan.page_copies)
            self._staging.upload()
            self._snapshots.restore(plan.restores)
            use = self._logit_use(plan, shape)
            self._run(shape, use, None if pads else joint)
            self._snapshots.save(plan.saves)
            if use.reader is not None:
                use.reader.download()
            result = self._results.download(
                shape, num_requests=plan.rows.num_requests, has_drafts=plan.rows.num_draft_tokens > 0
            )
        return StagedStep(result, started, reader=use.reader)

    def _logit_use(self, plan: StepPlan, shape: StepShape) -> LogitUse:
        has_rules = self._rules.update(plan)
        return LogitUse(
            reader=logprobs_reader(plan, self._device, score_rows),
            make_rules=self._rules_of(shape, plan.masks) if has_rules or plan.masks is not None else None,
        )

    def _rules_of(self, shape: StepShape, masks: TokenMasks | None) -> Callable[[StepInputs[Tensor]], StepRules]:
        """Called with the inputs of the step, on its stream."""
        vocab_size, num_rows = self.network.target.vocab_size, shape.num_requests * shape.width
        tensors = mask_tensors(masks, num_rows=num_rows, vocab_size=vocab_size, device=self._device)
        return lambda inputs: StepRules(self._rules, tensors, self._staging.plan_inputs(shape), inputs)

    @torch.inference_mode()
    def warm_up(self, shapes: Iterable[StepShape]) -> None:
        """Compile the kernels of these steps, and capture their graphs.

        The steps consist of padding alone, which touches no page and no request's slot. Each runs a second time under
        rules and masks, which no graph holds; the first also has its logits read.
        """
        shapes = tuple(shapes)
        if self._stream is not None:
            self.compile_kernels(shapes)
        for index, shape in enumerate(shapes):
            self._warm_up(shape, is_first=index == 0, captures=True)
        self.wait()

    def compile_kernels(self, shapes: Sequence[StepShape]) -> None:
        """Fill Triton's disk cache from threads of rank 0, while all ranks run the steps that use the kernels."""
        num_threads = min(_MAX_COMPILERS, available_cores()) if self._ranks.rank == 0 else 0
        with kernels_compiled_alone(num_threads) as compiling:
            for index, shape in enumerate(shapes):
                self._warm_up(shape, is_first=index == 0, captures=False)
                if index == 0 and self._ranks.smallest(int(compiling.has_all_cached())):
                    break
                compiling.take_over()
        self._ranks.smallest(0)  # wait for rank 0

    def _warm_up(self, shape: StepShape, *, is_first: bool, captures: bool) -> None:
        padding = plan_of(StepBatch(requests=(), num_draft_tokens=shape.num_draft_tokens))
        self._staging.stage(padding, shape)
        read = replace(padding, top_rows=TopRows.first(), prompt_rows=PromptRows.first()) if is_first else padding
        with self.on_stream():
            if is_first:
                self._snapshots.warm_up()
                self._host_memory.warm_up()
            reader = logprobs_reader(read, self._device, score_rows)
            use = LogitUse(make_rules=self._rules_of(shape, None), reader=reader)
            self._staging.upload()
            if shape.has_graph and captures:
                launches = self._launches(shape)
                self.graphs.capture(shape, *launches.parts)
                self._captured[shape] = launches
            else:
                self._run(shape)
            self._run(shape, use)

    @torch.inference_mode()
    def enqueue(self, batch: StepBatch, *, times: int = 1, after_each: Callable[[], object] | None = None) -> None:
        """Enqueue one step `times` times and read nothing back: for measuring the device only.

        Waits only for the previous copy of the inputs. `after_each` may enqueue more.
        """
        plan = plan_of(batch, max_pages=self.limits.max_pages)
        shape = self._shapes.of(plan)
        self._staging.stage(plan, shape)
        with self.on_stream():
            self._staging.upload()
            for _ in range(times):
                self._run(shape)
                if after_each is not None:
                    after_each()

    @property
    def tile_edges(self) -> list[int]:
        """Numbers of tokens after which a layer's experts use other tiles: see `warm_shapes`."""
        if self.is_deterministic:
            return []
        target, draft = self.network.target, self.network.draft
        moes = {*target.moes, *(draft.moes if draft else ())}
        edges = (tile_edges(moe.num_experts_per_token, moe.num_experts) for moe in moes)
        return sorted({edge for of_layer in edges for edge in of_layer})

    @property
    def pages(self) -> list[Tensor]:
        """Pages of every layer, the target's first."""
        return self._state.pages

    def wait(self) -> None:
        """Until the device is done with everything."""
        if self._stream is not None:
            self._stream.synchronize()

    @torch.inference_mode()
    def target_logits(self, token_ids: Sequence[int]) -> Tensor:  # float [N, V]
        """The target's logits after every token of one sequence: for measuring, on an idle executor."""
        assert 0 < len(token_ids) <= min(self.limits.max_seq_len, self.limits.max_num_tokens)
        return torch.cat([self._logits_of(batch) for batch in sequence_batches(token_ids, self.limits)])

    def _logits_of(self, batch: StepBatch) -> Tensor:
        shape = StepShape(
            num_requests=1, num_tokens=batch.num_tokens, num_draft_tokens=0, is_decode=False, has_graph=False
        )
        self._staging.stage(plan_of(batch, max_pages=self.limits.max_pages), shape)
        with self.on_stream():
            self._staging.upload()
            inputs = self._assembled(shape)
            slots = StepSlots(slot_ids=self._staging.plan_inputs(shape).slot_ids)
            ops: Any = self._ops_of(shape)(inputs, self._resources, slots=slots)
            logits: Tensor = sequence_logits(ops, self.network, inputs, self._state)
            return logits.cpu()

    def _assembled(self, shape: StepShape) -> StepInputs[Tensor]:
        """The first launches of a step: its inputs, with a page table for each group, [G, R, P]."""
        self._staging.assemble(shape, self._tables.views(shape))
        return self._inputs(shape)

    def _inputs(self, shape: StepShape) -> StepInputs[Tensor]:
        return replace(self._staging.inputs(shape), page_table=self._tables.views(shape))

    def _run(self, shape: StepShape, use: LogitUse = _SAMPLED, joint: JointRows | None = None) -> None:
        """Replay what is captured of a step, and enqueue the rest. `joint` is of ranks whose rows are not alike."""
        captured = None if use.needs_target else self._captured.get(shape)
        launches = captured or self._launches(shape, joint)
        replaced = {} if use.is_none else {SAMPLING: partial(launches.sample, use)}
        key = shape if captured is not None else None
        self.graphs.run(key, *launches.parts, replaced=replaced)

    def _launches(self, shape: StepShape, joint: JointRows | None = None) -> StepLaunches:
        outputs, drafts = self._outputs(shape)
        plan = self._staging.plan_inputs(shape)
        make_ops = partial(
            self._ops_of(shape, joint),
            resources=self._resources,
            outputs=outputs,
            slots=StepSlots(slot_ids=plan.slot_ids, max_rows=shape.width if shape.is_decode else None),
        )

        def store(acceptance: Acceptance[Tensor], proposal: Proposal[Tensor] | None) -> None:
            if proposal is not None:
                drafts.tokens.copy_(proposal.tokens)
                if drafts.confidence is not None and proposal.confidence is not None:
                    drafts.confidence.copy_(proposal.confidence)
            self._staging.store(shape, acceptance.bonus_tokens, proposal, acceptance.next_context_lens)

        memory = StepMemory(
            assemble=partial(self._assembled, shape),
            inputs=partial(self._inputs, shape),
            make_ops=make_ops,
            store=store,
        )
        return StepLaunches(self.network, self._state, memory, num_draft_tokens=shape.num_draft_tokens)

    def _ops_of(self, shape: StepShape, joint: JointRows | None = None) -> Callable[..., TorchGpuOps]:
        """Makes the ops of a step; ranks with requests of their own exchange rows alone."""
        num_ranks, make = self.network.mapping.dp_size, partial(TorchGpuOps, num_draft_tokens=shape.num_draft_tokens)
        if num_ranks == 1:
            return partial(make, ranks=self._ranks)
        capability = torch.cuda.get_device_capability(self._device) if self._device.type == "cuda" else None
        shared = SharedRows(
            ranks=self._ranks,
            joint=joint or joint_rows(shape, num_ranks),
            is_in_order=self.is_deterministic,
            ep_size=self.network.mapping.ep_size,
            costs=None if joint is None else exchange_costs(capability),  # without: a graph's
        )
        return partial(make, shared_rows=shared)

    @cached_property
    def _idle(self) -> IdleRank:
        return IdleRank(self.network, self._state, self._dtype)

    def _splits(self, max_rows: int) -> FixedSplits:
        limits = self.limits
        return FixedSplits.of(
            max_requests=limits.max_batch_size, max_rows=max_rows, max_keys=limits.max_pages * limits.page_size
        )

    def _outputs(self, shape: StepShape) -> tuple[SamplingOutputs, Proposal[Tensor]]:
        acceptance, drafts = self._results.outputs(shape)
        return SamplingOutputs(
            **{item.name: getattr(acceptance, item.name) for item in fields(SamplingOutputs)}
        ), drafts

    def close(self) -> None:
        """Free weights, pages and graphs at once, even if the executor is still referenced. Idempotent."""
        if "network" not in vars(self):
            return
        self.wait()
        for name in (
            "network",
            "_idle",
            "graphs",
            "_captured",
            "_state",
            "_snapshots",
            "_host_memory",
            "_resources",
            "_staging",
            "_tables",
            "_results",
            "_rules",
        ):
            vars(self).pop(name, None)
        if self._stream is not None:
            torch.cuda.empty_cache()

    def on_stream(self) -> contextlib.AbstractContextManager[Any]:
        """The stream that steps run on, as a context."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _prepared(network: Network[Tensor], *, is_deterministic: bool) -> Network[Tensor]:
    """Drafts decide how fast a text comes and never which: the drafter needs no fixed tiles."""
    experts = partial(prepare_device_experts, has_fixed_tiles=is_deterministic)
    prepare = prepare_fixed_linear if is_deterministic else prepare_device_linear
    return with_linears(with_experts(network, experts), prepare, prepare_draft=prepare_device_linear)


def _check_sizes(max_batch_size: int, num_positions: int, page_size: int) -> None:
    """Raises ConfigError for sizes that the kernels do not support."""
    if page_size & (page_size - 1):
        hint = "Build the engine with a page_size of 16, 32 or 64."
        raise ConfigError.about("page_size", expected="a power of two on a GPU", found=str(page_size), hint=hint)
    for name, found, most in (
        ("max_batch_size", max_batch_size, MAX_REQUESTS),
        ("max_seq_len and drafts", num_positions, MAX_POSITIONS),
    ):
        if found > most:
            hint = "Build the engine with less."
            raise ConfigError.about(name, expected=f"at most {most} on a GPU", found=str(found), hint=hint)


def _check_parts(dcp_size: int, is_deterministic: bool) -> None:
    """Raises ConfigError for what ranks that divide positions cannot do on a GPU."""
    if dcp_size > 1 and is_deterministic:
        expected, hint = "dcp_size 1 on a GPU", 'Build the engine without --dcp-size, or run it with device "cpu".'
        raise ConfigError.about("deterministic", expected=expected, found=f"dcp_size {dcp_size}", hint=hint)


def _draft_layers(network: Network[Tensor], state: StepState[Tensor]) -> DraftLayers | None:
    """None without a drafter, and for one whose keys no launch of all layers writes; see `TorchGpuOps.store_kv`."""
    if network.drafter is None or network.draft is None:
        return None
    is_partial = any(gqa.rotary.head_dim != gqa.head_dim for gqa in network.draft.attentions)
    if is_partial or (network.draft.mtp is not None and network.draft.mtp.has_offset_norms):
        return None
    norms = [layer.mixer.k_norm for layer in network.drafter.layers]
    scales = [cache.spec.scales or LayerKvScales() for cache in state.draft_kv]
    return stack_draft_layers(
        [cache.tensor for cache in state.draft_kv],
        k_norms=[norm for norm in norms if norm is not None] or None,
        k_scales=[scale.k for scale in scales],
        v_scales=[scale.v for scale in scales],
    )


def _new_stream(device: torch.device) -> Any:
    """None on a CPU. Weights and pages were made on another stream, so they are waited for here, once."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    make_stream: Any = torch.cuda.Stream  # untyped in PyTorch
    return make_stream(device)
