"""TensorRT networks over tiny checkpoints, and an executor that runs one in the interpreter."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_trt.backends.step_inputs import step_inputs, step_result
from dflash_trt.backends.tensorrt.buffers import EngineState
from dflash_trt.backends.tensorrt.host_tensor import HostTensor
from dflash_trt.backends.tensorrt.host_views import host_tensor
from dflash_trt.backends.tensorrt.host_weights import host_rope_tables
from dflash_trt.backends.tensorrt.layers import Layers
from dflash_trt.backends.tensorrt.module import make_logger
from dflash_trt.backends.tensorrt.network import (
    StepNetworkSpec,
    define_step_network,
    state_inputs_of,
    state_outputs_of,
    step_outputs_of,
)
from dflash_trt.backends.tensorrt.rule_inputs import RuleInputs
from dflash_trt.backends.tensorrt.scored_rows import ScoredRows
from dflash_trt.backends.tensorrt.support import network_spec
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.batch import SlotMirror, StepBatch, request_results
from dflash_trt.core.config import CollectiveMode
from dflash_trt.core.dtype import FloatDType, torch_dtype
from dflash_trt.core.mapping import Mapping as RankMapping
from dflash_trt.core.model.draft import engine_weights
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.core.step_plan import CHAINED, ExecutorLimits, FinishedStep, PageWindow, StepPlan, StepResult
from dflash_trt.core.step_spec import DRAFT_OUTPUTS
from dflash_trt.core.weight_spec import rank_shard
from dflash_trt.engine_dir import EngineDir
from dflash_trt.formats.base import QuantizedWeight, tensor_name
from dflash_trt.formats.registry import split_quantized
from dflash_trt.network.ops import Acceptance
from dflash_trt.network.proposal import Proposal
from dflash_trt.network.step import StepOutputs
from tests.engines import PAGE_SIZE
from tests.trt.interpreter import NetworkInterpreter, RunNode
from tests.trt.plugin_reference import PluginReference
from tests.trt.recorder import CheckedNetwork, FakePlugins, PluginNode, checked_module

MAX_SEQ_LEN = 128
MAX_NUM_TOKENS = 64


@dataclass(kw_only=True)
class DefinedStep:
    """A network with everything it needs to stay alive. `constants` are by the names its layers carry.

    `nodes` are its plugin nodes, whose fields may be changed before it is interpreted.
    """

    trt: Any
    builder: Any
    network: Any
    logger: Any
    layers: Layers
    spec: StepNetworkSpec
    nodes: list[PluginNode]
    constants: dict[str, Tensor] = field(default_factory=dict)

    def interpreter(self, run_node: RunNode | None = None) -> NetworkInterpreter:
        """With `run_node` for the plugin nodes; by default what plugins/README.md says that they compute."""
        plugins = self.nodes, run_node or PluginReference()
        return NetworkInterpreter(self.trt, self.network, self.constants, plugins)


def define_pair(
    trt: Any,
    target: Path,
    drafter: Path | None = None,
    *,
    dtype: FloatDType = "float32",
    collectives: CollectiveMode = "native",
    max_draft_len: int | None = None,
    missing: tuple[str, ...] = (),
    quantized: Mapping[str, QuantizedWeight[Tensor]] | None = None,
    mapping: RankMapping | None = None,
    pages: QuantizationSpec | None = None,
    has_page_groups: bool = False,
    split_length: int = 0,
) -> DefinedStep:
    """The step network of two checkpoints, with one page table unless it `has_page_groups`. `pages` says which are FP8.

    The plugin library lacks the `missing` plugins.
    """
    spec, tensors = open_spec(target, drafter, dtype=dtype, mapping=mapping)
    spec = replace(spec, quantization=pages, collectives=collectives, split_length=split_length)
    if max_draft_len is not None:
        spec = replace(spec, max_draft_len=max_draft_len)
    if has_page_groups:
        spec = replace(spec, page_windows=spec.states.windows(MAX_SEQ_LEN + spec.max_draft_len))
    return define_step(trt, spec, tensors, quantized or {}, missing=missing)


def define_engine(
    trt: Any, engine: EngineDir, *, rank: int = 0, split_length: int = 0, collectives: CollectiveMode = "native"
) -> DefinedStep:
    """The step network of one rank of an engine directory of the torch backend."""
    config = engine.manifest.pretrained_config
    config = config.model_copy(update={"mapping": config.mapping.of_rank(rank)})
    spec = network_spec(config, engine.manifest.build_config)
    spec = replace(spec, split_length=split_length, collectives=collectives)
    whole = engine_weights(config.target, config.draft, config.quantization)
    table = {name: rank_shard(weight, config.mapping) for name, weight in whole.items()}
    formats = config.quantization.linears if config.quantization else {}
    plain, quantized = split_quantized(load_file(engine.weights_path(rank)), table, formats)
    return define_step(trt, spec, plain, quantized)


def define_step(
    trt: Any,
    spec: StepNetworkSpec,
    tensors: Mapping[str, Tensor],
    quantized: Mapping[str, QuantizedWeight[Tensor]],
    *,
    missing: tuple[str, ...] = (),
) -> DefinedStep:
    """Through the API of TensorRT 11.4 alone, and in a network of TensorRT-RTX but for the plugin nodes."""
    logger = make_logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    plugins = FakePlugins(trt, missing=missing)
    layers = Layers(checked_module(trt, plugins), CheckedNetwork(network, plugins), logger)
    rope_tables = host_rope_tables(spec, max_seq_len=MAX_SEQ_LEN)
    hosts = host_tensors(tensors)
    define_step_network(layers, spec, hosts, quantized=host_quantized(quantized), rope_tables=rope_tables)
    constants = {host.name: tensor_of(host) for host in layers.constant_owners}
    return DefinedStep(
        trt=trt,
        builder=builder,
        network=network,
        logger=logger,
        layers=layers,
        spec=spec,
        nodes=plugins.nodes,
        constants=constants,
    )


def open_spec(
    target: Path, drafter: Path | None, *, dtype: FloatDType, mapping: RankMapping | None = None
) -> tuple[StepNetworkSpec, dict[str, Tensor]]:
    """The network of two checkpoints with small pages, and its weights, or one rank's share of both."""
    mapping = mapping or RankMapping()
    pair = open_pair(target, drafter)
    spec = StepNetworkSpec(
        target=pair.target,
        draft=pair.draft,
        dtype=dtype,
        page_size=PAGE_SIZE,
        max_draft_len=pair.draft.max_draft_len if pair.draft else 0,
        mapping=mapping,
    )
    return spec, dict(pair.iter_weights(dtype=torch_dtype(dtype), mapping=mapping))


def host_tensors(tensors: Mapping[str, Tensor]) -> dict[str, HostTensor]:
    return {name: host_tensor(name, tensor) for name, tensor in tensors.items()}


def host_quantized(quantized: Mapping[str, QuantizedWeight[Tensor]]) -> dict[str, QuantizedWeight[HostTensor]]:
    def hosted(name: str, weight: QuantizedWeight[Tensor]) -> QuantizedWeight[HostTensor]:
        return weight.map_tensors(lambda field, tensor: host_tensor(tensor_name(name, field), tensor))

    return {name: hosted(name, weight) for name, weight in quantized.items()}


def tensor_of(host: HostTensor) -> Tensor:
    """A copy of the memory that a HostTensor points at."""
    dtype = getattr(torch, host.dtype)
    size = host.num_elements * dtype.itemsize
    raw = (ctypes.c_uint8 * size).from_address(host.address)
    return torch.frombuffer(raw, dtype=torch.uint8).clone().view(dtype).reshape(host.shape)


class InterpretedExecutor:
    """Implements `core.step_plan.StepExecutor` over an interpreted network; K = 0 runs as K = 1 without its drafts."""

    def __init__(
        self,
        defined: DefinedStep,
        *,
        num_pages: int = 512,
        num_window_pages: int | None = None,
        max_seq_len: int = MAX_SEQ_LEN,
        max_batch_size: int = 8,
        run_node: RunNode | None = None,
    ) -> None:
        """Groups with a window have `num_window_pages` each; None: as many as the first."""
        spec = defined.spec
        self.limits = ExecutorLimits(
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            max_num_tokens=MAX_NUM_TOKENS,
            max_draft_len=spec.max_draft_len,
            draft_topk=spec.draft_topk,
            page_size=spec.page_size,
            num_pages=num_pages,
            page_windows=tuple(PageWindow(window, num_window_pages or num_pages) for window in spec.page_windows),
        )
        self._spec = spec
        self._slots = SlotMirror(self.limits.max_positions, windows=spec.page_windows, max_pages=self.limits.max_pages)
        self._interpreter = defined.interpreter(run_node)
        num_slots = self.limits.max_batch_size + 1
        self._draft_topk_tensors = {
            tensor.name: torch.zeros(num_slots, spec.max_draft_len * spec.draft_topk, dtype=torch_dtype(tensor.dtype))
            for tensor in DRAFT_OUTPUTS
        }
        cpu, windows = torch.device("cpu"), self.limits.page_windows
        self._scores = ScoredRows(spec, self.limits, device=cpu)
        self._rules = RuleInputs(self.limits, vocab_size=spec.target.vocab_size, device=cpu)
        self._state = EngineState(spec, num_pages=num_pages, num_slots=num_slots, device=cpu, page_windows=windows)

    @property
    def state(self) -> dict[str, Tensor]:
        """The pages of requests, by name of the state."""
        sizes = (self.limits.num_pages, *(group.num_pages for group in self.limits.page_windows))
        return {name: pages[: sizes[self._state.group_of(name)]] for name, pages in self._state.pages.items()}

    def submit(self, plan: StepPlan) -> FinishedStep:
        return FinishedStep(lambda: self._step(plan))

    @torch.inference_mode()
    def _step(self, plan: StepPlan) -> StepResult:
        batch = self._slots.assemble(plan, page_size=self.limits.page_size)
        least = 1 if self._spec.has_drafts else 0
        num_draft_tokens = max(batch.num_draft_tokens, least)
        rows = StepBatch(requests=batch.requests, num_draft_tokens=num_draft_tokens)
        inputs = step_inputs(rows, page_windows=self.limits.page_windows)
        named = {item.name: getattr(inputs, item.name) for item in fields(inputs)}
        tables = inputs.page_table.view(self.limits.num_page_groups, len(batch.requests), -1)
        names = ["page_table", *(f"page_table.{window}" for window in self._spec.page_windows)]
        named |= dict(zip(names, tables, strict=True))
        named["slot_ids"] = slots = torch.from_numpy(plan.rows.slot_ids)
        named |= self._rules.by_slot | self._rules.without | self._scores.without(inputs.logit_rows.flatten())
        width = num_draft_tokens * self._spec.draft_topk
        draft_topk_ids, draft_topk_probs = (stored[slots, :width] for stored in self._draft_topk_tensors.values())
        is_chained = torch.from_numpy(plan.rows.context_lens == CHAINED)
        named |= {"draft_topk_ids": draft_topk_ids, "draft_topk_probs": draft_topk_probs * is_chained[:, None]}
        given = {tensor.name: self._state.tensors[tensor.name] for tensor in state_inputs_of(self._spec)}
        outputs = self._interpreter.run(named | given)
        written = {tensor.name for tensor in state_outputs_of(self._spec)}
        of_step = {tensor.name for tensor in step_outputs_of(self._spec)} | set(self._scores.outputs)
        assert set(outputs) == of_step | written
        for name in written:
            self._state.tensors[name].copy_(outputs[name])
        for name, stored in self._draft_topk_tensors.items():
            if name in outputs:
                stored[slots, :width] = outputs[name]
        acceptance = Acceptance(
            emitted_tokens=outputs["emitted_tokens"],
            emitted_logprobs=outputs["emitted_logprobs"],
            num_accepted=outputs["num_accepted"],
            bonus_tokens=outputs["num_accepted"],  # not an output of the engine
            next_context_lens=outputs["next_context_lens"],
        )
        confidence = outputs.get("draft_confidence")
        has_drafts = batch.num_draft_tokens > 0
        proposal = Proposal(tokens=outputs["draft_tokens"], confidence=confidence) if has_drafts else None
        result = step_result(StepOutputs(acceptance=acceptance, proposal=proposal))
        self._slots.store(plan, request_results(result))
        return result
