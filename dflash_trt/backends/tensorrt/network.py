"""The whole step as one TensorRT network: its inputs, state and outputs, and the ops between them.

Input and output tensors are those of `core/step_spec.py` (without drafts none of DRAFT_INPUTS and DRAFT_OUTPUTS), and
the state's. With plugins the state is no tensor of the network: one input, `state_pools`, has the addresses of all of
it. With plain layers each state is an input, `target_kv.{i}` or `draft_kv.{i}`, [pages, 2, page_size, kv_heads, D] (of
latents [pages, page_size, row]), or some, `target_state.{i}.{part}`, [slots, ...], and what was written leaves as
`next_target_kv.{i}` and so on. Layers with pages of a window alone have a page table of their own,
`page_table.{window}`.
"""

from collections.abc import Mapping as AbcMapping
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from dflash_trt.backends.tensorrt.collectives import make_collectives
from dflash_trt.backends.tensorrt.host_tensor import HostTensor
from dflash_trt.backends.tensorrt.layers import ITensor, Layers
from dflash_trt.backends.tensorrt.layers_lowering import NEXT_PREFIX, LayersLowering
from dflash_trt.backends.tensorrt.lowering_gated_delta import slot_tensor_name
from dflash_trt.backends.tensorrt.ops import PluginMode, RopeTables, TrtOps
from dflash_trt.backends.tensorrt.plugins import CONTEXT_WRITTEN, PluginLowering
from dflash_trt.backends.tensorrt.stateful_lowering import StatefulLowering
from dflash_trt.core.config import CollectiveMode
from dflash_trt.core.dtype import FloatDType
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec, engine_states
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.core.state_spec import (
    EngineStates,
    LayerState,
    PagedKv,
    PagedLatent,
    PagedRows,
    PagedState,
    Recurrent,
    SharedKv,
    page_group_of,
    paged,
)
from dflash_trt.core.step_spec import (
    DRAFT_INPUTS,
    DRAFT_OUTPUTS,
    PLAN_INPUTS,
    STEP_INPUTS,
    STEP_OUTPUTS,
    Axis,
    StepTensor,
)
from dflash_trt.formats.base import QuantizedWeight
from dflash_trt.network.ops import StepInputs
from dflash_trt.network.rank_tensors import RankTensors
from dflash_trt.network.state import Cache, LatentCache, LayerCache, RecurrentCache, RowCache, StepState
from dflash_trt.network.step import Network, StepOutputs, bind_network, run_step

STATE_POOLS: Final = "state_pools"
PAGE_TABLE: Final = next(tensor for tensor in STEP_INPUTS if tensor.name == "page_table")  # of the first page group
SLOT_IDS: Final = next(tensor for tensor in PLAN_INPUTS if tensor.name == "slot_ids")  # where recurrent states are


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNetworkSpec:
    """Parameters of the network apart from its weights. `max_draft_len` 0 drops the drafter's block.

    `quantization` decides which pages are FP8; the weights show which linear layers are quantized. `plugins` says what
    attention and sampling are, and with it how the state enters.
    """

    target: TargetSpec
    draft: DraftSpec | None
    dtype: FloatDType
    page_size: int
    max_draft_len: int
    max_num_tokens: int  # of a step: how deep plain layers of a recurrence are
    page_windows: tuple[int, ...] = ()  # of the page groups behind the first
    mapping: Mapping = field(default_factory=Mapping)
    quantization: QuantizationSpec | None = None
    plugins: PluginMode = "plugin"
    collectives: CollectiveMode = "native"  # of several ranks

    @property
    def has_drafts(self) -> bool:
        return self.draft is not None and self.max_draft_len > 0

    @property
    def num_choices(self) -> int:
        """C, of each draft; 0 without drafts."""
        return self.draft.num_choices if self.draft is not None and self.has_drafts else 0

    @property
    def states(self) -> EngineStates:
        """Of one rank."""
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
    """The step's own inputs, the page tables of windows, and the slots of requests where a state is found by slot."""
    tables = tuple(replace(PAGE_TABLE, name=table_name(window), is_by_group=False) for window in spec.page_windows)
    inputs = (tensor for tensor in STEP_INPUTS if spec.has_drafts or tensor.name not in DRAFT_INPUTS)
    return (*inputs, *tables, *([SLOT_IDS] if spec.states.is_recurrent else []))


def table_name(window: int) -> str:
    """Of the input that is the page table of the group with this window."""
    return f"{PAGE_TABLE.name}.{window}"


def pool_axis(window: int | None) -> str:
    """Of the pages of a group's layers; None: the first group's."""
    return "pages" if window is None else f"pages.{window}"


def step_inputs_of(spec: StepNetworkSpec) -> tuple[IoTensor, ...]:
    return tuple(_io_tensor(tensor, spec) for tensor in step_tensors_of(spec))


def step_outputs_of(spec: StepNetworkSpec) -> tuple[IoTensor, ...]:
    """Without `draft_tokens`, and what they were drawn from, when nothing is drafted."""
    if not spec.has_drafts:
        return tuple(_io_tensor(tensor, spec) for tensor in STEP_OUTPUTS if tensor.name != "draft_tokens")
    return tuple(_io_tensor(tensor, spec) for tensor in (*STEP_OUTPUTS, *DRAFT_OUTPUTS))


def state_tensors_of(spec: StepNetworkSpec) -> tuple[IoTensor, ...]:
    """Pages or slots of every state, in the order of `state_pools`, whether or not they are tensors of the engine."""
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
    assert isinstance(state, PagedState | PagedRows)
    pool = pool_axis((None, *spec.page_windows)[page_group_of(state, spec.page_windows)])
    shape = (-1, *state.page_shape(spec.page_size))
    axes = (pool, "2", "page_size", "kv_heads", "D") if isinstance(state, PagedKv) else (pool, "page_size", "row")
    return (IoTensor(name=state.name, dtype=state.dtype, shape=shape, axes=axes),)


def state_inputs_of(spec: StepNetworkSpec) -> tuple[IoTensor, ...]:
    """Addresses of all states, int64 [states]; of plain layers the states."""
    if spec.plugins == "layers":
        return state_tensors_of(spec)
    return (IoTensor(name=STATE_POOLS, dtype="int64", shape=(len(state_tensors_of(spec)),), axes=("states",)),)


def state_outputs_of(spec: StepNetworkSpec) -> tuple[IoTensor, ...]:
    """Of plain layers the written states. Else one only where draft K/V are written and nobody reads them."""
    if spec.plugins == "layers":
        return tuple(replace(tensor, name=NEXT_PREFIX + tensor.name) for tensor in state_tensors_of(spec))
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
) -> None:
    """Fill the empty network of `layers`. The host tensors must live as long as `layers`, which keeps them.

    Raises:
        BuildError: TensorRT refused a layer, or the plugin library lacks a plugin.
    """
    given = {tensor.name: _add_input(layers, tensor) for tensor in step_inputs_of(spec)}
    slot_ids = given.pop(SLOT_IDS.name, None)
    page_tables = [given[PAGE_TABLE.name], *(given.pop(table_name(window)) for window in spec.page_windows)]
    inputs: StepInputs[ITensor] = StepInputs(**given)
    state = {tensor.name: _add_input(layers, tensor) for tensor in state_inputs_of(spec)}
    collectives = make_collectives(layers, num_ranks=spec.mapping.tp_size, mode=spec.collectives)
    lowering = _lowering(layers, inputs, page_tables, slot_ids, state, spec)
    ops = TrtOps(layers, lowering, inputs, rope_tables, collectives, max_draft_len=spec.max_draft_len)
    caches = [_cache(found, state, spec.page_windows) for found in spec.states.target]
    draft_caches = [_cache(found, state, spec.page_windows) for found in paged(spec.states.draft)]

    outputs: StepOutputs[Any] = run_step(
        ops,
        _bind(spec, tensors, quantized or {}),
        inputs,
        StepState(
            target_kv=caches,
            draft_kv=[cache for cache in draft_caches if isinstance(cache, Cache)],
            draft_features=next(
                (_rows(found, state) for found in spec.states.draft if isinstance(found, PagedRows)), None
            ),
        ),
        num_draft_tokens=spec.max_draft_len,
    )
    named = {tensor.name: getattr(outputs.acceptance, tensor.name, None) for tensor in STEP_OUTPUTS}
    if outputs.proposal is not None:
        proposal = ops.of_this_step(outputs.proposal)
        named |= {f"draft_{item.name}": getattr(proposal, item.name) for item in fields(proposal)}
    for tensor in step_outputs_of(spec):
        layers.mark_output(named[tensor.name], tensor.name)
    state_outputs = ops.state_outputs()
    for tensor in state_outputs_of(spec):
        layers.mark_output(state_outputs[tensor.name], tensor.name)


def _cache(state: LayerState, tensors: AbcMapping[str, ITensor], page_windows: tuple[int, ...]) -> LayerCache[ITensor]:
    """The tensors of a state where they are some of the network, else the addresses of all states."""
    pools = tensors.get(STATE_POOLS)
    if isinstance(state, Recurrent):
        parts = state.tensors()
        found = {part: tensors.get(slot_tensor_name(state, part), pools) for part in parts}
        return RecurrentCache(found, state)
    if isinstance(state, PagedLatent):
        return LatentCache(tensors.get(state.name, pools), state)
    kv = state.source if isinstance(state, SharedKv) else state
    assert isinstance(kv, PagedKv), "refused by `unsupported_problems`"
    return Cache(tensors.get(kv.name, pools), kv, page_group_of(kv, page_windows))


def _rows(state: PagedRows, tensors: AbcMapping[str, ITensor]) -> RowCache[ITensor]:
    return RowCache(tensors.get(state.name, tensors.get(STATE_POOLS)), state)


def _lowering(
    layers: Layers,
    inputs: StepInputs[ITensor],
    page_tables: Sequence[ITensor],
    slot_ids: ITensor | None,
    state: AbcMapping[str, ITensor],
    spec: StepNetworkSpec,
) -> StatefulLowering:
    if spec.plugins == "layers":
        sizes = {"page_size": spec.page_size, "max_num_tokens": spec.max_num_tokens, "num_choices": spec.num_choices}
        return LayersLowering(layers, inputs, page_tables, slot_ids, **sizes)
    pools = state[STATE_POOLS]
    sizes = {
        "page_size": spec.page_size,
        "max_verify_rows": 1 + (spec.max_draft_len if spec.has_drafts else 0),
        "num_choices": spec.num_choices,
    }
    return PluginLowering(layers, inputs, page_tables, pools, spec.states, slot_ids=slot_ids, **sizes)


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
