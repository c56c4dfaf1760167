"""Attention, recurrence, sampling and experts as plugin nodes: the contract of plugins/README.md, for the network.

Knows the plugins' names, fields, inputs and outputs. The library itself is loaded by `compile/` before a network is
defined; a plugin that the registry lacks is an error that names it.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from dflash_trt.backends.tensorrt.host_tensor import HostTensor
from dflash_trt.backends.tensorrt.layers import Dim, ITensor, Layers
from dflash_trt.core.errors import BuildError
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.model.gqa import Gqa
from dflash_trt.core.quantization import LayerKvScales
from dflash_trt.core.sampling import STEP_SAMPLING_FIELDS
from dflash_trt.core.state_spec import EngineStates, LayerState, Recurrent, SharedKv
from dflash_trt.core.step_spec import DRAFT_INPUTS
from dflash_trt.kernels.launch_rules import NO_CHUNK, NO_WINDOW
from dflash_trt.network.ops import Acceptance, DeltaParameters, StackedExperts, StepInputs
from dflash_trt.network.proposal import Proposal
from dflash_trt.network.state import Cache, LatentCache, PagedCache, RecurrentCache, RowCache

PLUGIN_NAMESPACE: Final = "dflash_trt"
PLUGIN_VERSION: Final = "2"
PAGE_FIELDS: Final = ("state", "page_type", "page_size")  # an index in `state_pools`; 0: pages of F, 1: of FP8
PAGE_SCALES: Final = ("k_scale", "v_scale")  # 1 for pages that are not FP8
SCORE_FACTORS: Final = ("softcap", "score_scale")
NO_SOFTCAP: Final = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginContract:
    """One plugin. `fields` are int32 scalars, `real_fields` float32."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    fields: tuple[str, ...]
    real_fields: tuple[str, ...] = ()


ATTEND_PAGES: Final = PluginContract(
    name="AttendPages",
    inputs=("q", "k", "v", "state_pools", "positions", "token_offsets", "context_lens", "page_table", "sinks"),
    outputs=("attended",),
    fields=(*PAGE_FIELDS, "window", "chunk", "has_sinks", "shares_kv"),
    real_fields=(*PAGE_SCALES, *SCORE_FACTORS),
)
ATTEND_LATENTS: Final = PluginContract(
    name="AttendLatents",
    inputs=(
        *("q", "own", "q_nope", "k_factor", "v_factor"),
        *("state_pools", "positions", "token_offsets", "context_lens", "page_table"),
    ),
    outputs=("attended", "direct"),
    fields=(*PAGE_FIELDS, "latent_dim", "max_verify_rows"),
    real_fields=("k_scale", "score_scale"),
)
ATTEND_DRAFT: Final = PluginContract(
    name="AttendDraft",
    inputs=(
        "context_k",
        "context_v",
        "q",
        "block_k",
        "block_v",
        "state_pools",
        "positions",
        "token_offsets",
        "page_table",
        "next_context_lens",
    ),
    outputs=("attended",),
    fields=(*PAGE_FIELDS, "window", "is_causal", "is_window_anchored", "first_key", "shares_kv"),
    real_fields=(*PAGE_SCALES, *SCORE_FACTORS),
)
WRITE_DRAFT_CONTEXT: Final = PluginContract(
    name="WriteDraftContext",
    inputs=("context_k", "context_v", "state_pools", "positions", "token_offsets", "page_table", "next_context_lens"),
    outputs=("written",),  # [1], for who reads the pages later in the step; its value means nothing
    fields=PAGE_FIELDS,
    real_fields=PAGE_SCALES,
)
PREVIOUS_ROWS: Final = PluginContract(
    name="PreviousRows",
    inputs=("x", "state_pools", "positions", "token_offsets", "context_lens", "page_table"),
    outputs=("before",),
    fields=("state", "page_size"),
)
CONTEXT_WRITTEN: Final = "context_written"  # an engine output: the tokens of WriteDraftContext

SAMPLE_AND_ACCEPT: Final = PluginContract(
    name="SampleAndAccept",
    inputs=(
        "logits",
        "token_ids",
        "positions",
        "token_offsets",
        "context_lens",
        "logit_rows",
        "num_candidates",
        *DRAFT_INPUTS,
        *(row.name for row in STEP_SAMPLING_FIELDS),
    ),
    outputs=("emitted_tokens", "emitted_logprobs", "num_accepted", "bonus_tokens", "next_context_lens"),
    fields=("num_choices",),  # 0 without drafts: `choices` and `chances` are not read
)
DRAFT_TOKENS: Final = PluginContract(
    name="DraftTokens",
    inputs=("logits", "temperature", "seed", "draft_stream", "next_context_lens", "draft_to_target"),
    outputs=("token_ids", "draft_choices", "draft_chances"),
    fields=("has_map", "num_choices"),
)
_MATRIX_INPUTS: Final = ("codes", "block_scale", "block_rows", "row_scale", "input_scale", "bias")
_MATRIX_FIELDS: Final = ("form", "has_row_scale", "has_input_scale", "has_bias")
EXPERTS: Final = PluginContract(
    name="Experts",
    inputs=(
        *("x", "logits", "choice_bias"),
        *(f"{matrix}_{name}" for matrix in ("gate_up", "down") for name in _MATRIX_INPUTS),
    ),
    outputs=("out",),
    fields=(
        *("first_expert", "num_chosen", "routing", "normalizes", "has_choice_bias"),
        *("num_groups", "num_chosen_groups", "activation", "scales_inputs"),
        *(f"{matrix}_{name}" for matrix in ("gate_up", "down") for name in _MATRIX_FIELDS),
    ),
    real_fields=("routing_scale", "limit", "alpha"),
)
GATED_DELTA: Final = PluginContract(
    name="GatedDelta",
    inputs=(
        *("qkvz", "ba", "conv", "log_rate", "dt_bias", "norm"),
        *("state_pools", "slot_ids", "token_offsets", "context_lens"),
    ),
    outputs=("out",),
    fields=("state", "num_records", "num_key_heads"),  # the first index of its six in `state_pools`
    real_fields=("eps",),
)
ALL_REDUCE: Final = PluginContract(name="AllReduce", inputs=("x",), outputs=("summed",), fields=("num_ranks",))
ALL_GATHER: Final = PluginContract(name="AllGather", inputs=("x",), outputs=("gathered",), fields=("num_ranks",))
PLUGINS: Final = (
    ATTEND_PAGES,
    ATTEND_DRAFT,
    WRITE_DRAFT_CONTEXT,
    PREVIOUS_ROWS,
    SAMPLE_AND_ACCEPT,
    DRAFT_TOKENS,
    EXPERTS,
    GATED_DELTA,
    ATTEND_LATENTS,
    ALL_REDUCE,
    ALL_GATHER,
)


class PluginLowering:
    """The stateful ops as nodes of the plugin library; see `StatefulLowering`.

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
        max_verify_rows: int,  # of a request that is not a prompt
        num_choices: int,  # of a draft; 0 without drafts
        slot_ids: ITensor | None = None,  # int64 [R]; of a target with recurrent layers
    ) -> None:
        self._layers = layers
        self._inputs = inputs
        self._page_tables = page_tables
        self._state_pools = state_pools
        self._slot_ids = slot_ids
        own = [state for state in states if not isinstance(state, SharedKv)]
        firsts = accumulate((num_pools(state) for state in own), initial=0)
        self._indices = {state.name: index for state, index in zip(own, firsts, strict=False)}
        self._page_size = page_size
        self._max_verify_rows = max_verify_rows
        self._num_choices = num_choices
        self._num_nodes = 0
        self._written: list[ITensor] = []

    def attend_pages(
        self,
        q: ITensor,
        kv: tuple[ITensor, ITensor] | None,
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
        flags = {"chunk": gqa.mask.chunk or NO_CHUNK, "has_sinks": int(sinks is not None), "shares_kv": int(kv is None)}
        return self._page_node(ATTEND_PAGES, given, cache, _scores(gqa) | flags)

    def _row_not_read(self, cache: Cache[ITensor], q: ITensor) -> ITensor:  # F [1, kv_heads, D]
        shape = (1, cache.spec.num_kv_heads, cache.spec.head_dim)
        return self._layers.cast_like(self._layers.floats([0.0] * math.prod(shape), shape), q)

    def attend_latents(
        self,
        queries: tuple[ITensor, ITensor],
        own: ITensor,
        factors: tuple[ITensor, ITensor],
        cache: LatentCache[ITensor],
        score_scale: float,
    ) -> tuple[ITensor, ITensor]:
        given = {"q": queries[0], "own": own, "q_nope": queries[1], "k_factor": factors[0], "v_factor": factors[1]}
        sizes = {"latent_dim": cache.spec.latent_dim, "max_verify_rows": self._max_verify_rows}
        attended, direct = self._outputs_over_pages(ATTEND_LATENTS, given, cache, sizes | {"score_scale": score_scale})
        return attended, direct

    def attend_draft(
        self,
        context: tuple[ITensor, ITensor] | None,
        q: ITensor,
        block: tuple[ITensor, ITensor],
        cache: Cache[ITensor],
        limits: ITensor,
        gqa: Gqa,
        *,
        block_width: Dim,
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
        given = {"logits": logits}
        if not self._num_choices:
            given |= {"choices": self._layers.ints([0], (1, 1)), "chances": self._layers.floats([0.0], (1, 1))}
        outputs = self._node(SAMPLE_AND_ACCEPT, given, {"num_choices": self._num_choices})
        return Acceptance(**dict(zip(SAMPLE_AND_ACCEPT.outputs, outputs, strict=True)))

    def draft_tokens(
        self,
        logits: ITensor,
        next_context_lens: ITensor,
        draft_to_target: ITensor | None,  # int64 [V]
        num_slots: Dim,
        *,
        num_choices: int,
    ) -> Proposal[ITensor]:
        not_read = self._layers.ints([0], (1,), "int64")
        given = {"logits": logits, "next_context_lens": next_context_lens}
        given |= {"draft_to_target": not_read if draft_to_target is None else draft_to_target}
        fields: dict[str, float] = {"has_map": int(draft_to_target is not None), "num_choices": num_choices}
        made = self._node(DRAFT_TOKENS, given, fields)
        if isinstance(num_slots, int):
            sizes = (num_slots, *[num_slots * num_choices] * 2)
            made = [self._layers.reshape(x, (-1, size)) for x, size in zip(made, sizes, strict=True)]
        tokens, choices, chances = made
        return Proposal(tokens=tokens, choices=choices, chances=chances)

    def previous_rows(self, x: ITensor, cache: RowCache[ITensor]) -> ITensor:
        fields: dict[str, float] = {"state": self._indices[cache.spec.name], "page_size": self._page_size}
        return self._node(PREVIOUS_ROWS, {"x": x, "state_pools": self._state_pools}, fields)[0]

    def experts(self, x: ITensor, logits: ITensor, experts: StackedExperts[HostTensor], moe: Moe) -> ITensor:
        from dflash_trt.backends.tensorrt.experts_node import experts_node  # of those who have Triton

        given, fields = experts_node(self._layers, experts, moe, of_f=x)
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
        given |= {"qkvz": qkvz, "ba": ba, "state_pools": self._state_pools, "slot_ids": self._slot_ids}
        sizes = {"num_records": state.num_records, "num_key_heads": state.num_key_heads, "eps": eps}
        return self._node(GATED_DELTA, given, {"state": self._indices[state.name]} | sizes)[0]

    def state_outputs(self) -> dict[str, ITensor]:
        """What keeps writers alive that nobody reads: TensorRT removes a node without a way to an output."""
        return {CONTEXT_WRITTEN: self._layers.concat(self._written, 0)} if self._written else {}

    def _page_node(
        self, contract: PluginContract, given: dict[str, ITensor], cache: PagedCache[ITensor], fields: dict[str, float]
    ) -> ITensor:
        return self._outputs_over_pages(contract, given, cache, fields)[0]

    def _outputs_over_pages(
        self, contract: PluginContract, given: dict[str, ITensor], cache: PagedCache[ITensor], fields: dict[str, float]
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
        group = cache.group if isinstance(cache, Cache) else 0  # latents keep all positions
        own_pages = {"state_pools": self._state_pools, "page_table": self._page_tables[group]}
        return self._node(contract, given | own_pages, own | fields)

    def _node(self, contract: PluginContract, given: dict[str, ITensor], fields: dict[str, float]) -> list[ITensor]:
        """Inputs that are not `given` are the step's, by name."""
        inputs = [given[name] if name in given else getattr(self._inputs, name) for name in contract.inputs]
        name = f"{contract.name}.{self._num_nodes}"
        plugin = make_plugin(self._layers.trt, contract, name=name, fields=fields)
        self._num_nodes += 1
        layer = self._layers.add_layer("add_plugin_v3", inputs, [], plugin)
        layer.name = name
        return [self._layers.output_of(layer, i) for i in range(len(contract.outputs))]


def make_plugin(trt: Any, contract: PluginContract, *, name: str, fields: dict[str, float]) -> Any:
    """A build-phase instance from the registry. `fields` are all of the contract's.

    Raises:
        BuildError: no loaded library has the plugin, or it refused the fields.
    """
    creator = trt.get_plugin_registry().get_creator(contract.name, PLUGIN_VERSION, PLUGIN_NAMESPACE)
    wanted = f"{PLUGIN_NAMESPACE}::{contract.name} version {PLUGIN_VERSION}"
    if creator is None:
        raise BuildError.about(
            "TensorRT plugin",
            expected=wanted,
            found="no loaded library that has it",
            hint="Make it with scripts/build_plugin of a source checkout and pass it, or build with plugins='layers' "
            "(slow).",
        )
    integers = {key: (ctypes.c_int32 * 1)(int(fields[key])) for key in contract.fields}
    reals = {key: (ctypes.c_float * 1)(fields[key]) for key in contract.real_fields}
    collection = trt.PluginFieldCollection(  # of pointers: the values live until the plugin is made
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


def num_pools(state: LayerState) -> int:
    """Addresses of a state in `state_pools`, one for each of its tensors."""
    return len(state.tensors()) if isinstance(state, Recurrent) else 1


def missing_plugins(registry: Any) -> Sequence[str]:
    """Names of the contract that the registry does not know."""
    return [
        plugin.name for plugin in PLUGINS if registry.get_creator(plugin.name, PLUGIN_VERSION, PLUGIN_NAMESPACE) is None
    ]


def _context(context: tuple[ITensor, ITensor], limits: ITensor) -> dict[str, ITensor]:
    return {"context_k": context[0], "context_v": context[1], "next_context_lens": limits}


def _scores(gqa: Gqa) -> dict[str, float]:
    window = gqa.mask.window
    return {
        "window": NO_WINDOW if window is None else window,
        "softcap": gqa.softcap or NO_SOFTCAP,
        "score_scale": gqa.score_scale,
    }
