"""The whole step as one TensorRT network: its inputs, state and outputs, and the ops between them.

Input and output tensors are those of `core/step_spec.py`, and the state's. With plugins the state is no tensor of the
network: one input, `state_pools`, has the addresses of all pages. With plain layers each state is an input,
`target_kv.{i}` or `draft_kv.{i}`, [pages, 2, page_size, kv_heads, D], and the written pages leave as
`next_target_kv.{i}` and `next_draft_kv.{i}`.
"""

from collections.abc import Mapping as AbcMapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from dflash_trt.backends.tensorrt.collectives import make_collectives
from dflash_trt.backends.tensorrt.host_tensor import HostTensor
from dflash_trt.backends.tensorrt.layers import ITensor, Layers
from dflash_trt.backends.tensorrt.ops import (
    NEXT_PREFIX,
    LayersLowering,
    PluginMode,
    RopeTables,
    StatefulLowering,
    TrtOps,
)
from dflash_trt.backends.tensorrt.plugins import CONTEXT_WRITTEN, PluginLowering
from dflash_trt.core.config import CollectiveMode
from dflash_trt.core.dtype import FloatDType
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec, engine_states
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.core.state_spec import EngineStates, LayerState, PagedKv, SharedKv, paged
from dflash_trt.core.step_spec import STEP_INPUTS, STEP_OUTPUTS, Axis, StepTensor
from dflash_trt.formats.base import QuantizedWeight
from dflash_trt.network.ops import Cache, StepInputs, StepState
from dflash_trt.network.rank_tensors import RankTensors
from dflash_trt.network.step import Network, StepOutputs, bind_network, run_step

STATE_POOLS: Final = "state_pools"


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
    mapping: Mapping = field(default_factory=Mapping)
    quantization: QuantizationSpec | None = None
    plugins: PluginMode = "plugin"
    collectives: CollectiveMode = "native"  # of several ranks

    @property
    def has_drafts(self) -> bool:
        return self.draft is not None and self.max_draft_len > 0

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


def step_inputs_of(spec: StepNetworkSpec) -> tuple[IoTensor, ...]:
    return tuple(_io_tensor(tensor, spec) for tensor in STEP_INPUTS)


def step_outputs_of(spec: StepNetworkSpec) -> tuple[IoTensor, ...]:
    """Without `draft_tokens` when nothing is drafted."""
    return tuple(
        _io_tensor(tensor, spec) for tensor in STEP_OUTPUTS if spec.has_drafts or tensor.name != "draft_tokens"
    )


def pages_of(spec: StepNetworkSpec) -> tuple[IoTensor, ...]:
    """Every state, whether or not it is a tensor of the engine."""
    return tuple(
        IoTensor(
            name=state.name,
            dtype=state.dtype,
            shape=(-1, *state.page_shape(spec.page_size)),
            axes=("pages", "2", "page_size", "kv_heads", "D"),
        )
        for state in paged(spec.states)
    )


def state_inputs_of(spec: StepNetworkSpec) -> tuple[IoTensor, ...]:
    """Addresses of all states, int64 [states]; of plain layers the states."""
    if spec.plugins == "layers":
        return pages_of(spec)
    return (IoTensor(name=STATE_POOLS, dtype="int64", shape=(len(pages_of(spec)),), axes=("states",)),)


def state_outputs_of(spec: StepNetworkSpec) -> tuple[IoTensor, ...]:
    """Of plain layers the written states. Else one only where draft K/V are written and nobody reads them."""
    if spec.plugins == "layers":
        return tuple(replace(tensor, name=NEXT_PREFIX + tensor.name) for tensor in pages_of(spec))
    if spec.draft is None or spec.has_drafts:
        return ()
    return (IoTensor(name=CONTEXT_WRITTEN, dtype="int32", shape=(len(spec.states.draft),), axes=("draft layers",)),)


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
    inputs: StepInputs[ITensor] = StepInputs(
        **{tensor.name: _add_input(layers, tensor) for tensor in step_inputs_of(spec)}
    )
    state = {tensor.name: _add_input(layers, tensor) for tensor in state_inputs_of(spec)}
    collectives = make_collectives(layers, num_ranks=spec.mapping.tp_size, mode=spec.collectives)
    ops = TrtOps(layers, _lowering(layers, inputs, state, spec), inputs, rope_tables, collectives)

    def cache(of_layer: LayerState) -> Cache[ITensor]:
        kv = of_layer.source if isinstance(of_layer, SharedKv) else of_layer
        assert isinstance(kv, PagedKv), "refused by `unsupported_problems`"
        return Cache(state[STATE_POOLS if spec.plugins == "plugin" else kv.name], kv)

    outputs: StepOutputs[Any] = run_step(
        ops,
        _bind(spec, tensors, quantized or {}),
        inputs,
        StepState(target_kv=[cache(kv) for kv in spec.states.target], draft_kv=[cache(kv) for kv in spec.states.draft]),
        num_draft_tokens=spec.max_draft_len,
    )
    for tensor in step_outputs_of(spec):
        source = outputs if tensor.name == "draft_tokens" else outputs.acceptance
        layers.mark_output(getattr(source, tensor.name), tensor.name)
    state_outputs = ops.state_outputs()
    for tensor in state_outputs_of(spec):
        layers.mark_output(state_outputs[tensor.name], tensor.name)


def _lowering(
    layers: Layers, inputs: StepInputs[ITensor], state: AbcMapping[str, ITensor], spec: StepNetworkSpec
) -> StatefulLowering:
    if spec.plugins == "layers":
        return LayersLowering(layers, inputs, page_size=spec.page_size)
    return PluginLowering(layers, inputs, state[STATE_POOLS], spec.states, page_size=spec.page_size)


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
