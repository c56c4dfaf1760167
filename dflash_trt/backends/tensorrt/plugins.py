"""Attention, recurrence, sampling and experts as plugin nodes: the contract of plugins/README.md.

Names, fields, inputs and outputs are those of `kernels/programs`. The library itself is loaded by `compile/` before a
network is defined; a plugin that the registry lacks is an error that names it.
"""

import ctypes
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, TypeAlias

from dflash_trt.backends.tensorrt.host_tensor import HostTensor
from dflash_trt.backends.tensorrt.layers import Dim, ITensor, Layers
from dflash_trt.core.errors import BuildError
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.model.gqa import Gqa
from dflash_trt.core.quantization import LayerKvScales
from dflash_trt.core.state_spec import EngineStates
from dflash_trt.formats.int8 import Int8Weight
from dflash_trt.kernels.launch_rules import NO_CHUNK, NO_WINDOW
from dflash_trt.kernels.programs import (
    ATTEND_DRAFT,
    ATTEND_IN_SPLITS,
    ATTEND_LATENTS,
    ATTEND_LATENTS_IN_SPLITS,
    ATTEND_PAGES,
    DRAFT_TOKENS,
    EXPERTS,
    GATED_DELTA,
    GATED_DELTA_IN_ORDER,
    HEAD_PRODUCT,
    INT8_LINEAR,
    LINEAR,
    NAMESPACE,
    PREVIOUS_ROWS,
    PROGRAMS,
    RMS_NORM,
    SAMPLE_AND_ACCEPT,
    SCORE_ROWS,
    VERSION,
    WRITE_DRAFT_CONTEXT,
)
from dflash_trt.kernels.programs.program import Program
from dflash_trt.network.ops import Acceptance, DeltaParameters, Linear, StackedExperts, StepInputs
from dflash_trt.network.proposal import Proposal
from dflash_trt.network.state import Cache, LatentCache, PagedCache, RecurrentCache, RowCache

NO_SOFTCAP: Final = 0.0
CONTEXT_WRITTEN: Final = "context_written"  # an engine output: the tokens of WriteDraftContext


# Adds a node of a name, with inputs in the program's order and all of its fields, and gives its outputs.
AddNode: TypeAlias = Callable[[Layers, Program, str, Sequence[ITensor], Mapping[str, float]], list[ITensor]]


class PluginLowering:
    """Ops that read or write state, sample or run experts, as nodes of the plugin library; see `Ops`.

    Pages are no tensors of the network: nodes find them at the addresses in `state_pools`, by the index of their state.
    """

    def __init__(
        self,
        layers: Layers,
        inputs: StepInputs[ITensor],
        page_tables: Sequence[ITensor],  # int32 [R, P], of every page group
        state_pools: ITensor,  # int64 [states]
        states: EngineStates,
        *,
        page_size: int,
        max_verify_rows: int,  # per request that is not a prompt
        draft_topk: int,  # per draft; 0 without drafts
        add_node: AddNode,
        by_slot: Mapping[str, ITensor],  # slot_ids, int64 [R], logit rules and token masks
        split_length: int = 0,  # keys; with one, a row's bits depend on its request alone
    ) -> None:
        self._layers = layers
        self._add_node = add_node
        self._inputs = inputs
        self._page_tables = page_tables
        self._state_pools = state_pools
        self._by_slot = by_slot
        own = dict.fromkeys(state.owner for state in states)
        firsts = accumulate((state.num_tensors for state in own), initial=0)
        self._indices = {state.name: index for state, index in zip(own, firsts, strict=False)}
        self._page_size = page_size
        self._max_verify_rows = max_verify_rows
        self._draft_topk = draft_topk
        self._split_length = split_length
        self._num_nodes = 0
        self._written: list[ITensor] = []
        self._logits: ITensor | None = None

    def attend_pages(
        self,
        q: ITensor,
        kv: tuple[ITensor, ITensor] | None,  # None if an earlier layer has written the pages
        cache: Cache[ITensor],
        gqa: Gqa,
        sinks: ITensor | None,  # float32 [heads]
    ) -> ITensor:
        """Without `kv`: q depends on the node that has written the pages, as everything after that layer does."""
        assert gqa.mask.is_causal and not gqa.mask.is_window_anchored  # targets are; other configs are refused
        num_heads = q.shape[1]
        not_read = self._layers.floats([0.0] * num_heads, (num_heads,))
        k, v = kv or (self._row_not_read(cache, q),) * 2
        given = {"q": q, "k": k, "v": v, "sinks": not_read if sinks is None else sinks}
        fields = _scores(gqa) | {"chunk": gqa.mask.chunk or NO_CHUNK, "max_verify_rows": self._max_verify_rows}
        fields |= {"has_sinks": int(sinks is not None), "shares_kv": int(kv is None)}
        program = ATTEND_PAGES
        if self._split_length:
            program, fields = ATTEND_IN_SPLITS, fields | {"split_length": self._split_length}
        return self._page_node(program, given, cache, fields)

    def _row_not_read(self, cache: Cache[ITensor], q: ITensor) -> ITensor:  # F [1, kv_heads, D]
        shape = (1, cache.spec.num_kv_heads, cache.spec.head_dim)
        return self._layers.cast_like(self._layers.floats([0.0] * math.prod(shape), shape), q)

    def attend_latents(
        self,
        # [T, heads, latent_dim + rope_dim], absorbed and rotated; [heads, T, nope_dim] before the key's factor
        queries: tuple[ITensor, ITensor],
        own: ITensor,  # [T, latent_dim + rope_dim], written first
        factors: tuple[ITensor, ITensor],  # [heads, nope_dim, latent_dim], [heads, v_head_dim, latent_dim]
        cache: LatentCache[ITensor],
        score_scale: float,
    ) -> tuple[ITensor, ITensor]:
        """Sums of latents [T, heads, latent_dim], before the value's factor, and an addend for after it.

        The addend is [T, heads, v_head_dim]: results of rows that are attended directly, whose sums are zeros, and
        zeros for the others.
        """
        given = {"q": queries[0], "own": own, "q_nope": queries[1], "k_factor": factors[0], "v_factor": factors[1]}
        fields: dict[str, float] = {"latent_dim": cache.spec.latent_dim, "score_scale": score_scale}
        fields |= {"max_verify_rows": self._max_verify_rows}
        program = ATTEND_LATENTS
        if self._split_length:
            program, fields = ATTEND_LATENTS_IN_SPLITS, fields | {"split_length": self._split_length}
        attended, direct = self._outputs_over_pages(program, given, cache, fields)
        return attended, direct

    def head_product(self, x: ITensor, factor: ITensor) -> ITensor:  # F [N, heads, I], [heads, I, O]
        """Each head's rows times its own matrix, with fixed tiles."""
        return self._node(HEAD_PRODUCT, {"x": x, "factor": factor}, {})[0]

    def attend_draft(
        self,
        context: tuple[ITensor, ITensor] | None,  # None if an earlier pass of a chain has written the pages
        q: ITensor,
        block: tuple[ITensor, ITensor],
        cache: Cache[ITensor],
        limits: ITensor,
        gqa: Gqa,
    ) -> ITensor:
        """Without `context`: q depends on the node that has written it, through the draft of that pass."""
        kv = context or (self._row_not_read(cache, q),) * 2
        given = _context(kv, limits) | {"q": q, "block_k": block[0], "block_v": block[1]}
        flags = {name: int(getattr(gqa.mask, name)) for name in ("is_causal", "is_window_anchored", "first_key")}
        flags |= {"shares_kv": int(context is None)}
        return self._page_node(ATTEND_DRAFT, given, cache, _scores(gqa) | flags)

    def write_draft_context(self, context: tuple[ITensor, ITensor], cache: Cache[ITensor], limits: ITensor) -> None:
        self._written.append(self._page_node(WRITE_DRAFT_CONTEXT, _context(context, limits), cache, {}))

    def sample_and_accept(self, logits: ITensor) -> Acceptance[ITensor]:
        self._logits = logits
        given = {**self._by_slot, "logits": logits}
        if not self._draft_topk:
            given |= {
                "draft_topk_ids": self._layers.ints([0], (1, 1)),
                "draft_topk_probs": self._layers.floats([0.0], (1, 1)),
            }
        outputs = self._node(SAMPLE_AND_ACCEPT, given, {"draft_topk": self._draft_topk})
        return Acceptance(**dict(zip(SAMPLE_AND_ACCEPT.output_names, outputs, strict=True)))

    def scored_rows(self, rows: ITensor, tokens: ITensor, *, num_top: int) -> dict[str, ITensor]:
        """Log probabilities under the logits that were sampled last."""
        assert self._logits is not None
        given = {"logits": self._logits, "scored_rows": rows, "scored_tokens": tokens}
        outputs = self._node(SCORE_ROWS, given, {"num_top": num_top})
        return dict(zip(SCORE_ROWS.output_names, outputs, strict=True))

    def draft_tokens(
        self,
        logits: ITensor,
        next_context_lens: ITensor,
        draft_to_target: ITensor | None,  # int64 [V]
        num_slots: Dim,
        *,
        draft_topk: int,
    ) -> Proposal[ITensor]:
        not_read = self._layers.ints([0], (1,), "int64")
        given = {"logits": logits, "next_context_lens": next_context_lens}
        given |= {"draft_to_target": not_read if draft_to_target is None else draft_to_target}
        fields: dict[str, float] = {"has_map": int(draft_to_target is not None), "draft_topk": draft_topk}
        made = self._node(DRAFT_TOKENS, given, fields)
        if isinstance(num_slots, int):
            sizes = (num_slots, *[num_slots * draft_topk] * 2)
            made = [self._layers.reshape(x, (-1, size)) for x, size in zip(made, sizes, strict=True)]
        tokens, draft_topk_ids, draft_topk_probs = made
        return Proposal(tokens=tokens, draft_topk_ids=draft_topk_ids, draft_topk_probs=draft_topk_probs)

    def previous_rows(self, x: ITensor, cache: RowCache[ITensor]) -> ITensor:
        fields: dict[str, float] = {"state": self._indices[cache.spec.name], "page_size": self._page_size}
        return self._node(PREVIOUS_ROWS, {"x": x, "state_pools": self._state_pools}, fields)[0]

    def int8_linear(self, x: ITensor, weight: Int8Weight[HostTensor], bias: HostTensor | None) -> ITensor:
        """With exact sums: any tile gives the same bits."""
        layers = self._layers
        not_read = layers.cast_like(layers.floats([0.0], (1,)), x)
        given = {"x": x, "codes": layers.tensor(weight.codes), "weight_scale": layers.tensor(weight.weight_scale)}
        given |= {"bias": not_read if bias is None else layers.tensor(bias)}
        return self._node(INT8_LINEAR, given, {"has_bias": int(bias is not None)})[0]

    def linear(self, x: ITensor, linear: Linear[HostTensor]) -> ITensor:
        """With fixed tiles. Raises BuildError without Triton, whose kernels say how the weights are packed."""
        _check_triton("linear layers with --deterministic")
        from dflash_trt.backends.tensorrt.experts_node import linear_nodes

        nodes = linear_nodes(self._layers, linear, of_f=x)
        outs = [self._node(LINEAR, given | {"x": x}, fields)[0] for given, fields in nodes]
        return outs[0] if len(outs) == 1 else self._layers.concat(outs, 1)

    def rms_norm(self, x: ITensor, weight: ITensor, eps: float) -> ITensor:  # F [N, C], float32 [C]
        return self._node(RMS_NORM, {"x": x, "weight": weight}, {"eps": eps})[0]

    def experts(self, x: ITensor, logits: ITensor, experts: StackedExperts[HostTensor], moe: Moe) -> ITensor:
        """Raises BuildError without Triton, whose kernels say how the weights are packed."""
        _check_triton("experts")
        from dflash_trt.backends.tensorrt.experts_node import experts_node

        given, fields = experts_node(self._layers, experts, moe, of_f=x, has_fixed_tiles=self._split_length > 0)
        return self._node(EXPERTS, given | {"x": x, "logits": logits}, fields)[0]

    def gated_delta(
        self,
        qkvz: ITensor,
        ba: ITensor,
        parameters: DeltaParameters[ITensor],
        cache: RecurrentCache[ITensor],
        eps: float,
    ) -> ITensor:
        state = cache.spec
        given = {name: getattr(parameters, name) for name in ("conv", "log_rate", "dt_bias", "norm")}
        given |= {"qkvz": qkvz, "ba": ba, "state_pools": self._state_pools, "slot_ids": self._by_slot["slot_ids"]}
        sizes = {"num_records": state.num_records, "num_key_heads": state.num_key_heads, "eps": eps}
        program = GATED_DELTA_IN_ORDER if self._split_length else GATED_DELTA
        return self._node(program, given, {"state": self._indices[state.name]} | sizes)[0]

    def state_outputs(self) -> dict[str, ITensor]:
        """An output that keeps unread writers alive: TensorRT removes a node without a way to an output."""
        return {CONTEXT_WRITTEN: self._layers.concat(self._written, 0)} if self._written else {}

    def _page_node(
        self, program: Program, given: dict[str, ITensor], cache: PagedCache[ITensor], fields: dict[str, float]
    ) -> ITensor:
        return self._outputs_over_pages(program, given, cache, fields)[0]

    def _outputs_over_pages(
        self, program: Program, given: dict[str, ITensor], cache: PagedCache[ITensor], fields: dict[str, float]
    ) -> list[ITensor]:
        state = cache.spec
        scales = state.scales or LayerKvScales()
        own = {
            "state": self._indices[state.name],
            "page_type": int(state.scales is not None),
            "page_size": self._page_size,
            "k_scale": scales.k,
            "v_scale": scales.v,
        }
        own_pages = {"state_pools": self._state_pools, "page_table": self._page_tables[cache.group]}
        return self._node(program, given | own_pages, own | fields)

    def _node(self, program: Program, given: dict[str, ITensor], fields: dict[str, float]) -> list[ITensor]:
        """Inputs that are not `given` are the step's, by name."""
        inputs = [given[name] if name in given else getattr(self._inputs, name) for name in program.input_names]
        name = f"{program.name}.{self._num_nodes}"
        self._num_nodes += 1
        return self._add_node(self._layers, program, name, inputs, fields)


def _check_triton(what: str) -> None:
    """Raises BuildError without it."""
    try:
        importlib.import_module("triton")
    except ImportError as cause:
        hint = "Install it: pip install 'dflash-trt[kernels]' (on Linux)."
        expected = f"an importable Python package, for the kernels of {what}"
        raise BuildError.about("triton", expected=expected, found=str(cause), hint=hint) from cause


def add_plugin_node(
    layers: Layers, program: Program, name: str, inputs: Sequence[ITensor], fields: Mapping[str, float]
) -> list[ITensor]:
    """Implements AddNode with a plugin of the registry.

    Raises:
        BuildError: see `make_plugin`.
    """
    plugin = make_plugin(layers.trt, program, name=name, fields=fields)
    layer = layers.add_layer("add_plugin_v3", list(inputs), [], plugin)
    layer.name = name
    return [layers.output_of(layer, i) for i in range(len(program.outputs))]


def make_plugin(trt: Any, program: Program, *, name: str, fields: Mapping[str, float]) -> Any:
    """A build-phase instance from the registry. `fields` are all of the program's.

    Raises:
        BuildError: no loaded library has the plugin, or it refused the fields.
    """
    creator = trt.get_plugin_registry().get_creator(program.name, VERSION, NAMESPACE)
    wanted = f"{NAMESPACE}::{program.name} version {VERSION}"
    if creator is None:
        raise BuildError.about(
            "TensorRT plugin",
            expected=wanted,
            found="no loaded library that has it",
            hint="Make it with dflash-trt build-plugin and pass it.",
        )
    integers = {key: (ctypes.c_int32 * 1)(int(fields[key])) for key in program.integer_fields}
    reals = {key: (ctypes.c_float * 1)(fields[key]) for key in program.real_fields}
    collection = trt.PluginFieldCollection(  # it has pointers: the values live until the plugin is made
        [trt.PluginField(key, value, trt.PluginFieldType.INT32) for key, value in integers.items()]
        + [trt.PluginField(key, value, trt.PluginFieldType.FLOAT32) for key, value in reals.items()]
    )
    plugin = creator.create_plugin(name, collection, trt.TensorRTPhase.BUILD)
    if plugin is None:
        raise BuildError.about(
            f"TensorRT plugin {wanted}",
            expected=f"to accept the fields {fields}",
            found="a refusal",
            hint="Build the plugin library from the same version of dflash-trt.",
        )
    return plugin


def missing_plugins(registry: Any) -> Sequence[str]:
    """Names of programs that the registry does not know."""
    return [plugin.name for plugin in PROGRAMS if registry.get_creator(plugin.name, VERSION, NAMESPACE) is None]


def _context(context: tuple[ITensor, ITensor], limits: ITensor) -> dict[str, ITensor]:
    return {"context_k": context[0], "context_v": context[1], "next_context_lens": limits}


def _scores(gqa: Gqa) -> dict[str, float]:
    window = gqa.mask.window
    return {
        "window": NO_WINDOW if window is None else window,
        "softcap": gqa.softcap or NO_SOFTCAP,
        "score_scale": gqa.score_scale,
    }
