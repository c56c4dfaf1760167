"""Attention and sampling as plugin nodes: the contract of plugins/README.md, from the network's side.

Knows the plugins' names, fields, inputs and outputs. The library itself is loaded by `compile/` before a network is
defined; a plugin that the registry lacks is an error that names it.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from dflash_trt.backends.tensorrt.layers import ITensor, Layers
from dflash_trt.backends.tensorrt.lowering_pages import Pages
from dflash_trt.core.errors import BuildError
from dflash_trt.core.model.gqa import AttentionMask
from dflash_trt.core.quantization import LayerKvScales
from dflash_trt.core.sampling import STEP_SAMPLING_FIELDS
from dflash_trt.kernels.launch_rules import NO_WINDOW
from dflash_trt.network.ops import Acceptance, StepInputs

PLUGIN_NAMESPACE: Final = "dflash_trt"
PLUGIN_VERSION: Final = "1"
PAGE_SCALES: Final = ("k_scale", "v_scale")  # 1 for pages that are not FP8


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginContract:
    """One plugin. `fields` are int32 scalars, `real_fields` float32; `aliased` pairs an output with the input whose
    memory it shares.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    fields: tuple[str, ...]
    real_fields: tuple[str, ...] = ()
    aliased: tuple[tuple[str, str], ...] = ()


ATTEND_PAGES: Final = PluginContract(
    name="AttendPages",
    inputs=("q", "k", "v", "pages", "positions", "token_offsets", "context_lens", "page_table"),
    outputs=("attended", "next_pages"),
    fields=("page_size", "window"),
    real_fields=PAGE_SCALES,
    aliased=(("next_pages", "pages"),),
)
ATTEND_DRAFT: Final = PluginContract(
    name="AttendDraft",
    inputs=(
        "context_k",
        "context_v",
        "q",
        "block_k",
        "block_v",
        "pages",
        "positions",
        "token_offsets",
        "page_table",
        "next_context_lens",
    ),
    outputs=("attended", "next_pages"),
    fields=("page_size", "window", "is_causal", "is_window_anchored"),
    real_fields=PAGE_SCALES,
    aliased=(("next_pages", "pages"),),
)
WRITE_DRAFT_CONTEXT: Final = PluginContract(
    name="WriteDraftContext",
    inputs=("context_k", "context_v", "pages", "positions", "token_offsets", "page_table", "next_context_lens"),
    outputs=("next_pages",),
    fields=("page_size",),
    real_fields=PAGE_SCALES,
    aliased=(("next_pages", "pages"),),
)
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
        *(row.name for row in STEP_SAMPLING_FIELDS),
    ),
    outputs=("emitted_tokens", "emitted_logprobs", "num_accepted", "bonus_tokens", "next_context_lens"),
    fields=(),
)
PLUGINS: Final = (ATTEND_PAGES, ATTEND_DRAFT, WRITE_DRAFT_CONTEXT, SAMPLE_AND_ACCEPT)


class PluginLowering:
    """The stateful ops as nodes of the plugin library; see `StatefulLowering`."""

    def __init__(self, layers: Layers, inputs: StepInputs[ITensor], *, page_size: int) -> None:
        self._layers = layers
        self._inputs = inputs
        self._page_size = page_size
        self._num_nodes = 0

    def attend_pages(
        self, q: ITensor, kv: tuple[ITensor, ITensor], pages: Pages, mask: AttentionMask
    ) -> tuple[ITensor, ITensor]:
        assert mask.is_causal and not mask.is_window_anchored  # targets are; other configs are refused
        given = {"q": q, "k": kv[0], "v": kv[1]}
        attended, written = self._page_node(ATTEND_PAGES, given, pages, {"window": _window(mask)})
        return attended, written

    def attend_draft(
        self,
        context: tuple[ITensor, ITensor],
        q: ITensor,
        block: tuple[ITensor, ITensor],
        pages: Pages,
        limits: ITensor,
        mask: AttentionMask,
    ) -> tuple[ITensor, ITensor]:
        given = _context(context, limits) | {"q": q, "block_k": block[0], "block_v": block[1]}
        flags = {name: int(getattr(mask, name)) for name in ("is_causal", "is_window_anchored")}
        fields = {"window": _window(mask), **flags}
        attended, written = self._page_node(ATTEND_DRAFT, given, pages, fields)
        return attended, written

    def write_draft_context(self, context: tuple[ITensor, ITensor], pages: Pages, limits: ITensor) -> ITensor:
        return self._page_node(WRITE_DRAFT_CONTEXT, _context(context, limits), pages, {})[0]

    def sample_and_accept(self, logits: ITensor) -> Acceptance[ITensor]:
        outputs = self._node(SAMPLE_AND_ACCEPT, {"logits": logits}, {})
        return Acceptance(**dict(zip(SAMPLE_AND_ACCEPT.outputs, outputs, strict=True)))

    def _page_node(
        self, contract: PluginContract, given: dict[str, ITensor], pages: Pages, fields: dict[str, int]
    ) -> list[ITensor]:
        scales = pages.scales or LayerKvScales()
        own = {"page_size": self._page_size, "k_scale": scales.k, "v_scale": scales.v}
        return self._node(contract, given | {"pages": pages.tensor}, own | fields)

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
            hint="Make it with scripts/build_plugin and pass it, or build with plugins='layers' (slow).",
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


def missing_plugins(registry: Any) -> Sequence[str]:
    """Names of the contract that the registry does not know."""
    return [
        plugin.name for plugin in PLUGINS if registry.get_creator(plugin.name, PLUGIN_VERSION, PLUGIN_NAMESPACE) is None
    ]


def _context(context: tuple[ITensor, ITensor], limits: ITensor) -> dict[str, ITensor]:
    return {"context_k": context[0], "context_v": context[1], "next_context_lens": limits}


def _window(mask: AttentionMask) -> int:
    return NO_WINDOW if mask.window is None else mask.window
