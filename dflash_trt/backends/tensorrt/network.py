"""The whole step as one TensorRT network: its inputs, state and outputs, and the ops between them.

Input and output tensors are those of `core/step_spec.py`. State tensors are `target_kv.{i}` and `draft_kv.{i}`,
[pages, 2, page_size, kv_heads, D]; the written pages leave as `next_target_kv.{i}` and `next_draft_kv.{i}`, at the
same address (plugins) or at another (plain layers).
"""

from collections.abc import Mapping as AbcMapping
from dataclasses import dataclass, field
from typing import Any

from dflash_trt.backends.tensorrt.host_tensor import HostTensor
from dflash_trt.backends.tensorrt.layers import ITensor, Layers
from dflash_trt.backends.tensorrt.ops import LayersLowering, PluginMode, RopeTables, TrtOps
from dflash_trt.backends.tensorrt.plugins import PluginLowering
from dflash_trt.core.dtype import FloatDType
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec, engine_states
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.core.state_spec import EngineStates
from dflash_trt.core.step_spec import STEP_INPUTS, STEP_OUTPUTS, Axis, StepTensor
from dflash_trt.formats.base import QuantizedWeight
from dflash_trt.network.ops import Cache, StepInputs, StepState
from dflash_trt.network.rank_tensors import RankTensors
from dflash_trt.network.step import Network, StepOutputs, bind_network, run_step

NEXT_PREFIX = "next_"  # of a state tensor's output


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
    mapping: Mapping = field(default_factory=Mapping)
    quantization: QuantizationSpec | None = None

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


def state_of(spec: StepNetworkSpec) -> tuple[IoTensor, ...]:
    """Inputs; each has an output of the same dtype and shape, named with NEXT_PREFIX."""
    return tuple(
        IoTensor(
            name=state.name,
            dtype=state.dtype,
            shape=(-1, *state.page_shape(spec.page_size)),
            axes=("pages", "2", "page_size", "kv_heads", "D"),
        )
        for state in spec.states
    )


def define_step_network(
    layers: Layers,
    spec: StepNetworkSpec,
    tensors: AbcMapping[str, HostTensor],
    *,
    quantized: AbcMapping[str, QuantizedWeight[HostTensor]] | None = None,
    rope_tables: RopeTables,
    plugins: PluginMode,
) -> None:
    """Fill the empty network of `layers`. The host tensors must live as long as `layers`, which keeps them.

    Raises:
        BuildError: TensorRT refused a layer, or the plugin library lacks a plugin.
    """
    inputs: StepInputs[ITensor] = StepInputs(
        **{tensor.name: _add_input(layers, tensor) for tensor in step_inputs_of(spec)}
    )
    state = {tensor.name: _add_input(layers, tensor) for tensor in state_of(spec)}
    lowering = (
        PluginLowering(layers, inputs, page_size=spec.page_size)
        if plugins == "plugin"
        else LayersLowering(layers, inputs, page_size=spec.page_size)
    )
    ops = TrtOps(layers, lowering, inputs, rope_tables, tp_size=spec.mapping.tp_size)
    outputs: StepOutputs[Any] = run_step(
        ops,
        _bind(spec, tensors, quantized or {}),
        inputs,
        StepState(
            target_kv=[Cache(state[kv.name], kv) for kv in spec.states.target],
            draft_kv=[Cache(state[kv.name], kv) for kv in spec.states.draft],
        ),
        num_draft_tokens=spec.max_draft_len,
    )
    for tensor in step_outputs_of(spec):
        source = outputs if tensor.name == "draft_tokens" else outputs.acceptance
        layers.mark_output(getattr(source, tensor.name), tensor.name)
    written = ops.written_pages()
    for name in state:
        layers.mark_output(written[name], NEXT_PREFIX + name, is_aliased=plugins == "plugin")


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
