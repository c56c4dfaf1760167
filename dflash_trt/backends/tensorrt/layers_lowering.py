"""The stateful ops in plain TensorRT layers; see `StatefulLowering`.

Pages and slots are values here: inputs of the network, and what a step has written leaves as outputs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from dflash_trt.backends.tensorrt import lowering_attention as trt_attention
from dflash_trt.backends.tensorrt import lowering_drafts as trt_drafts
from dflash_trt.backends.tensorrt import lowering_eagle3 as trt_eagle3
from dflash_trt.backends.tensorrt import lowering_experts as trt_experts
from dflash_trt.backends.tensorrt import lowering_latents as trt_latents
from dflash_trt.backends.tensorrt import lowering_sampling as trt_sampling
from dflash_trt.backends.tensorrt.layers import Dim, Handle, ITensor, Layers
from dflash_trt.backends.tensorrt.lowering_gated_delta import DeltaLowering
from dflash_trt.backends.tensorrt.lowering_pages import Pages
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.model.gqa import Gqa
from dflash_trt.network.ops import Acceptance, DeltaParameters, StackedExperts, StepInputs
from dflash_trt.network.proposal import Proposal
from dflash_trt.network.state import Cache, LatentCache, PagedCache, RecurrentCache, RowCache

NEXT_PREFIX: Final = "next_"  # of the output that pages leave by


class LayersLowering:
    """Plain layers: slow and exact, buildable without the plugin library. Pages are inputs and outputs."""

    def __init__(
        self,
        layers: Layers,
        inputs: StepInputs[ITensor],
        page_tables: Sequence[ITensor],  # int32 [R, P], of every page group
        slot_ids: ITensor | None = None,  # int64 [R]; of a target with recurrent layers
        *,
        page_size: int,
        max_num_tokens: int,
        num_choices: int,  # of a draft; 0 without drafts
    ) -> None:
        self._layers = layers
        self._num_choices = num_choices
        self._inputs = inputs
        self._index = [
            trt_attention.index_step(layers, replace(inputs, page_table=table), page_size=page_size)
            for table in page_tables
        ]
        self._written: dict[str, ITensor] = {}
        self._deltas: DeltaLowering | None = None
        if slot_ids is not None:
            of_row = self._index[0].request_of_row
            self._deltas = DeltaLowering(layers, inputs, slot_ids, of_row, max_num_tokens=max_num_tokens)

    def attend_pages(
        self,
        q: ITensor,
        kv: tuple[ITensor, ITensor] | None,  # None: an earlier layer has written the pages
        cache: Cache[ITensor],
        gqa: Gqa,
        sinks: ITensor | None,  # float32 [heads]
    ) -> ITensor:
        index = self._index[cache.group]
        if kv is None:
            pages = self._pages_behind(cache)
        else:
            pages = trt_attention.write_rows(self._layers, index, kv, _pages(cache))
            self._take(cache, pages)
        return trt_attention.attend_pages(self._layers, index, q, pages, gqa, sinks)

    def attend_latents(
        self,
        queries: tuple[ITensor, ITensor],
        own: ITensor,
        factors: tuple[ITensor, ITensor],
        cache: LatentCache[ITensor],
        score_scale: float,
    ) -> tuple[ITensor, None]:
        """All are absorbed: the direct form of one prompt would be that of every row here."""
        attended, pages = trt_latents.attend_latents(self._layers, self._index[0], queries[0], own, cache, score_scale)
        self._take(cache, pages)
        return attended, None

    def attend_draft(
        self,
        context: tuple[ITensor, ITensor] | None,  # None: an earlier pass of a chain has written the pages
        q: ITensor,
        block: tuple[ITensor, ITensor],
        cache: Cache[ITensor],
        limits: ITensor,
        gqa: Gqa,
        *,
        block_width: Dim,
    ) -> ITensor:
        """`limits` are where the blocks begin, too."""
        layers, index = self._layers, self._index[cache.group]
        if context is not None:
            self.write_draft_context(context, cache, limits)
        pages = self._pages_behind(cache)
        return trt_attention.attend_draft(layers, index, q, block, pages, limits, gqa, block_width=block_width)

    def write_draft_context(self, context: tuple[ITensor, ITensor], cache: Cache[ITensor], limits: ITensor) -> None:
        index = self._index[cache.group]
        self._take(cache, trt_attention.write_draft_context(self._layers, index, context, _pages(cache), limits))

    def sample_and_accept(self, logits: ITensor) -> Acceptance[ITensor]:
        return trt_sampling.sample_and_accept(self._layers, logits, self._inputs, num_choices=self._num_choices)

    def draft_tokens(
        self,
        logits: ITensor,
        next_context_lens: ITensor,
        draft_to_target: ITensor | None,  # int64 [V]
        num_slots: Dim,
        *,
        num_choices: int,
    ) -> Proposal[ITensor]:
        given = (logits, next_context_lens, draft_to_target, self._inputs, num_slots)
        return trt_drafts.draft_tokens(self._layers, *given, num_choices=num_choices)

    def previous_rows(self, x: ITensor, cache: RowCache[ITensor]) -> ITensor:
        before, written = trt_eagle3.previous_rows(self._layers, x, self._inputs, self._index[0], cache)
        self._written[NEXT_PREFIX + cache.spec.name] = written
        return before

    def experts(self, x: ITensor, logits: ITensor, experts: StackedExperts[Handle], moe: Moe) -> ITensor:
        return trt_experts.run_experts(self._layers, x, logits, experts, moe)

    def gated_delta(
        self,
        qkvz: ITensor,
        ba: ITensor,
        parameters: DeltaParameters[ITensor],
        cache: RecurrentCache[ITensor],
        eps: float,
    ) -> ITensor:
        assert self._deltas is not None, "a target with recurrent layers has slots"
        out, written = self._deltas.run(qkvz, ba, parameters, cache, eps)
        self._written |= {NEXT_PREFIX + name: tensor for name, tensor in written.items()}
        return out

    def state_outputs(self) -> dict[str, ITensor]:
        """The written pages and slots."""
        return self._written

    def _pages_behind(self, cache: Cache[ITensor]) -> Pages:
        """As this step has written them."""
        return replace(_pages(cache), tensor=self._written[NEXT_PREFIX + cache.spec.name])

    def _take(self, cache: PagedCache[ITensor], written: Pages) -> None:
        name = NEXT_PREFIX + cache.spec.name
        assert name not in self._written, f"{cache.spec.name} has two writers in one step"
        self._written[name] = written.tensor


def _pages(cache: Cache[ITensor]) -> Pages:
    return Pages(cache.tensor, cache.spec.scales)
