"""The whole step as one TensorRT network: its inputs, state and outputs, and the ops between them.

Input and output tensors are as in `core/step_spec.py` (without drafts no DRAFT_INPUTS and DRAFT_OUTPUTS), plus the
state. The state is no tensor of the network: one input, `state_pools`, has the addresses of all of it, of
`target_kv.{i}` and `draft_kv.{i}`, [pages, 2, page_size, kv_heads, D] (for latents [pages, page_size, row]), and of the
parts of a recurrent state, `target_state.{i}.{part}`, [slots, ...]. Layers whose pages are only a window have a page
table of their own, `page_table.{window}`.
"""

from collections.abc import Mapping as AbcMapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from dflash_trt.backends.tensorrt.collectives import SharedRows, make_collectives
from dflash_trt.backends.tensorrt.deterministic_ops import DeterministicTrtOps
from dflash_trt.backends.tensorrt.host_tensor import HostTensor
from dflash_trt.backends.tensorrt.layers import ITensor, Layers
from dflash_trt.backends.tensorrt.ops import RopeTables, TrtOps
from dflash_trt.backends.tensorrt.plugins import CONTEXT_WRITTEN, AddNode, PluginLowering, add_plugin_node
from dflash_trt.core.config import CollectiveMode
from dflash_trt.core.dtype import FloatDType
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec, engine_states
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.core.sampling import MAX_TOP_LOGPROBS
from dflash_trt.core.state_spec import (
    EngineStates,
    LayerState,
    PagedRows,
    PagedState,
    Recurrent,
    SharedKv,
    page_group_of,
    paged,
)
from dflash_trt.core.step_spec import (
    DRAFT_CONFIDENCE,
    DRAFT_INPUTS,
    DRAFT_OUTPUTS,
    PLAN_INPUTS,
    STEP_INPUTS,
    STEP_OUTPUTS,
    Axis,
    StepTensor,
)
from dflash_trt.formats.base import QuantizedWeight
from dflash_trt.kernels.programs.sampling import MASK_TENSORS, RULE_TENSORS, SCORE_ROWS
from dflash_trt.network.ops import StepInputs
from dflash_trt.network.rank_tensors import RankTensors
from dflash_trt.network.state import Cache, LayerCache, RecurrentCache, RowCache, StepState, paged_cache
from dflash_trt.network.step import Network, StepOutputs, bind_network, run_step

STATE_POOLS: Final = "state_pools"
PAGE_TABLE: Final = next(
    tensor for tensor in STEP_INPUTS if tensor.name == "page_table"
)  # table of the first page group
HIDDEN_ROWS: Final = "hidden_rows"
SCORED: Final = ("scored_rows", "scored_tokens")
SLOT_IDS: Final = next(tensor for tensor in PLAN_INPUTS if tensor.name == "slot_ids")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNetworkSpec:
    """Parameters of the network apart from its weights. `max_draft_len` 0 drops the drafter's block.

    `quantization` decides which pages are FP8; the weights show which linear layers are quantized.
    """

    target: TargetSpec
    draft: DraftSpec | None
    dtype: FloatDType
    page_size: int
    max_draft_len: int
    page_windows: tuple[int, ...] = ()  # windows of the page groups after the first
    mapping: Mapping = field(default_factory=Mapping)
    quantization: QuantizationSpec | None = None
    collectives: CollectiveMode = "native"  # for several ranks
    split_length: int = 0  # keys of a split of attention in a deterministic engine, else 0

    @property
    def has_drafts(self) -> bool:
        return self.draft is not None and self.max_draft_len > 0

    @property
    def draft_topk(self) -> int:
        """C, of each draft; 0 without drafts."""
        return self.draft.draft_topk if self.draft is not None and self.has_drafts else 0

    @property
    def has_draft_confidence(self) -> bool:
        return self.draft is not None and self.has_drafts and self.draft.has_confidence

    @property
    def states(self) -> EngineStates:
        """States of one rank."""
        whole = engine_states(self.target, self.draft, dtype=self.dtype, quantization=self.quantization)
        return whole.shard(self.mapping)


@dataclass(frozen=True, kw_only=True, slots=True)
class IoTensor:
    """An input or output of the engine; -1 and an axis name where the size is decided per step."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]


def step_tensors_of(spec: StepNetworkSpec) -> tuple[StepTensor, ...]:
    """The step's own inputs, the page tables of windows, and the slots of requests."""
    tables = tuple(replace(PAGE_TABLE, name=table_name(window), is_by_group=False) for window in spec.page_windows)
    inputs = (tensor for tensor in STEP_INPUTS if spec.has_drafts or tensor.name not in DRAFT_INPUTS)
    return (*inputs, *tables, SLOT_IDS)


def table_name(window: int) -> str:
    """Name of the input with the page table of this window's group."""
    return f"{PAGE_TABLE.name}.{window}"


def pool_axis(window: int | None) -> str:
    """Page axis of a group's layers; None means the first group."""
    return "pages" if window is None else f"pages.{window}"


def step_inputs_of(spec: StepNetworkSpec) -> tuple[IoTensor, ...]:
    return tuple(_io_tensor(tensor, spec) for tensor in step_tensors_of(spec))


def rule_inputs_of(spec: StepNetworkSpec) -> tuple[IoTensor, ...]:
    """Token masks of a step's rows of logits, then logit rules by slot."""
    words = -(-spec.target.vocab_size // 32)

    def size(axis: str) -> int:
        return words if axis.startswith("ceil_div") else int(axis) if axis.isdecimal() else -1

    return tuple(
        IoTensor(name=rule.name, dtype=rule.dtype, shape=tuple(map(size, rule.shape)), axes=rule.shape)
        for rule in (*MASK_TENSORS, *RULE_TENSORS)
    )


def score_inputs_of(spec: StepNetworkSpec) -> tuple[IoTensor, ...]:
    """The tokens whose logits are computed, those of `logit_rows` first, and the rows of logits that are scored."""
    scored = (IoTensor(name=name, dtype="int64", shape=(-1,), axes=("scored",)) for name in SCORED)
    return (IoTensor(name=HIDDEN_ROWS, dtype="int32", shape=(-1,), axes=("L",)), *scored)


def score_outputs_of(spec: StepNetworkSpec) -> tuple[IoTensor, ...]:
    """Log probabilities of the scored rows."""
    sizes = {"scored": -1, "num_top": num_top_of(spec)}
    return tuple(
        IoTensor(name=rule.name, dtype=rule.dtype, shape=tuple(sizes[axis] for axis in rule.shape), axes=rule.shape)
        for rule in SCORE_ROWS.outputs
    )


def num_top_of(spec: StepNetworkSpec) -> int:
    """The most likely tokens that a scored row has."""
    return min(MAX_TOP_LOGPROBS, spec.target.vocab_size)


def step_outputs_of(spec: StepNetworkSpec) -> tuple[IoTensor, ...]:
    """Without `draft_tokens` and their top-k candidates when nothing is drafted; their confidence if it is known."""
    if not spec.has_drafts:
        return tuple(_io_tensor(tensor, spec) for tensor in STEP_OUTPUTS if tensor.name != "draft_tokens")
    confidence = (DRAFT_CONFIDENCE,) if spec.has_draft_confidence else ()
    return tuple(_io_tensor(tensor, spec) for tensor in (*STEP_OUTPUTS, *confidence, *DRAFT_OUTPUTS))


def state_tensors_of(spec: StepNetworkSpec) -> tuple[IoTensor, ...]:
    """Pages or slots of every state, in the order of `state_pools`. They are no tensors of the engine."""
    return tuple(tensor for state in spec.states for tensor in _tensors_of(state, spec))


def _tensors_of(state: LayerState, spec: StepNetworkSpec) -> tuple[IoTensor, ...]:
    if isinstance(state, Recurrent):
        return tuple(
            IoTensor(
                name=slot_tensor_name(state, part),
                dtype=dtype,
                shape=(-1, *shape),
                axes=("slots", *(str(size) for size in shape)),
            )
            for part, (shape, dtype) in state.tensors().items()
        )
    if isinstance(state, SharedKv):
        return ()
    pool = pool_axis((None, *spec.page_windows)[page_group_of(state, spec.page_windows)])
    shape = (-1, *state.page_shape(spec.page_size))
    return (IoTensor(name=state.name, dtype=state.dtype, shape=shape, axes=(pool, *state.page_axes)),)


def slot_tensor_name(state: Recurrent, part: str) -> str:
    """Name of a tensor of the state, unique in an engine."""
    return f"{state.name}.{part}"


def state_inputs_of(spec: StepNetworkSpec) -> tuple[IoTensor, ...]:
    """Addresses of all states, int64 [states]."""
    return (IoTensor(name=STATE_POOLS, dtype="int64", shape=(len(state_tensors_of(spec)),), axes=("states",)),)


def state_outputs_of(spec: StepNetworkSpec) -> tuple[IoTensor, ...]:
    """One output if draft K/V are written but not read."""
    if spec.draft is None or spec.has_drafts:
        return ()
    return (
        IoTensor(name=CONTEXT_WRITTEN, dtype="int32", shape=(len(paged(spec.states.draft)),), axes=("draft layers",)),
    )


def define_step_network(
    layers: Layers,
    spec: StepNetworkSpec,
    tensors: AbcMapping[str, HostTensor],
    *,
    quantized: AbcMapping[str, QuantizedWeight[HostTensor]] | None = None,
    rope_tables: RopeTables,
    add_node: AddNode = add_plugin_node,
) -> None:
    """Fill the empty network of `layers`, which keeps the host tensors; they must live as long.

    Raises:
        BuildError: TensorRT refused a layer, or the plugin library lacks a plugin.
    """
    given = {tensor.name: _add_input(layers, tensor) for tensor in step_inputs_of(spec)}
    by_slot = {tensor.name: _add_input(layers, tensor) for tensor in rule_inputs_of(spec)}
    by_slot[SLOT_IDS.name] = given.pop(SLOT_IDS.name)
    hidden_rows, *scored = (_add_input(layers, tensor) for tensor in score_inputs_of(spec))
    page_tables = [given[PAGE_TABLE.name], *(given.pop(table_name(window)) for window in spec.page_windows)]
    inputs: StepInputs[ITensor] = StepInputs(**given)
    [pools] = [_add_input(layers, tensor) for tensor in state_inputs_of(spec)]
    sizes = {"page_size": spec.page_size, "draft_topk": spec.draft_topk, "split_length": spec.split_length}
    sizes["max_verify_rows"] = 1 + (spec.max_draft_len if spec.has_drafts else 0)
    lowering = PluginLowering(
        layers, inputs, page_tables, pools, spec.states, add_node=add_node, by_slot=by_slot, **sizes
    )
    mapping, is_in_order = spec.mapping, spec.split_length > 0
    collectives = make_collectives(layers, num_ranks=mapping.world_size, mode=spec.collectives, add_node=add_node)
    shared_rows = None
    if collectives is not None and mapping.dp_size > 1:
        shared_rows = SharedRows(layers, collectives, rank=mapping.dp_rank, is_in_order=is_in_order)
        collectives = None  # attention is whole on each rank
    make_ops = partial(DeterministicTrtOps, rank=mapping.tp_rank) if is_in_order else TrtOps
    ops = make_ops(layers, lowering, inputs, rope_tables, collectives, shared_rows, max_draft_len=spec.max_draft_len)
    outputs: StepOutputs[Any] = run_step(
        ops,
        _bind(spec, tensors, quantized or {}),
        inputs,
        _step_state(spec, pools),
        num_draft_tokens=spec.max_draft_len,
        logit_rows=hidden_rows,
    )
    named = {tensor.name: getattr(outputs.acceptance, tensor.name, None) for tensor in STEP_OUTPUTS}
    if outputs.proposal is not None:
        proposal = ops.of_this_step(outputs.proposal)
        named |= {
            "draft_tokens": proposal.tokens,
            "next_draft_topk_ids": proposal.draft_topk_ids,
            "next_draft_topk_probs": proposal.draft_topk_probs,
            DRAFT_CONFIDENCE.name: proposal.confidence,
        }
    named |= lowering.scored_rows(*scored, num_top=num_top_of(spec)) | {**ops.state_outputs()}
    for tensor in (*step_outputs_of(spec), *score_outputs_of(spec), *state_outputs_of(spec)):
        layers.mark_output(named[tensor.name], tensor.name)


def _step_state(spec: StepNetworkSpec, pools: ITensor) -> StepState[ITensor]:
    caches = [_cache(found, pools, spec.page_windows) for found in spec.states.target]
    draft_caches = [_cache(found, pools, spec.page_windows) for found in paged(spec.states.draft)]
    features = [RowCache(pools, found) for found in spec.states.draft if isinstance(found, PagedRows)]
    return StepState(
        target_kv=caches,
        draft_kv=[cache for cache in draft_caches if isinstance(cache, Cache)],
        draft_features=next(iter(features), None),
    )


def _cache(state: LayerState, state_pools: ITensor, page_windows: tuple[int, ...]) -> LayerCache[ITensor]:
    """With the addresses of all states as its tensor."""
    if isinstance(state, Recurrent):
        return RecurrentCache(dict.fromkeys(state.tensors(), state_pools), state)
    pages = state.owner
    assert isinstance(pages, PagedState), "layers have no rows of their own"
    return paged_cache(state_pools, pages, page_group_of(pages, page_windows))


def _bind(
    spec: StepNetworkSpec, tensors: AbcMapping[str, HostTensor], quantized: AbcMapping[str, QuantizedWeight[HostTensor]]
) -> Network[Any]:
    def rows(tensor: HostTensor, start: int, stop: int) -> HostTensor:
        return tensor.rows(start, stop)

    rank_tensors = RankTensors(plain=tensors, quantized=quantized, mapping=spec.mapping, slice_rows=rows)
    return bind_network(spec.target, spec.draft, rank_tensors)


def _io_tensor(tensor: StepTensor, spec: StepNetworkSpec) -> IoTensor:
    fixed: dict[Axis, int] = {} if spec.has_drafts else {"K+1": 1, "K": 0}
    shape = tuple(fixed.get(axis, -1) for axis in tensor.axes)
    return IoTensor(name=tensor.name, dtype=tensor.dtype, shape=shape, axes=tensor.axes)


def _add_input(layers: Layers, tensor: IoTensor) -> ITensor:
    return layers.add_input(tensor.name, tensor.dtype, tensor.shape, tensor.axes)
