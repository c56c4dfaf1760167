"""The ops of a step that read or write state, sample, or run experts: what a lowering computes in its own way."""

from collections.abc import Mapping
from typing import Protocol

from dflash_trt.backends.tensorrt.layers import Dim, Handle, ITensor
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.model.gqa import Gqa
from dflash_trt.network.ops import Acceptance, DeltaParameters, StackedExperts
from dflash_trt.network.proposal import Proposal
from dflash_trt.network.state import Cache, LatentCache, RecurrentCache, RowCache


class StatefulLowering(Protocol):
    """The ops that exist as a plugin node and as plain layers; see `Ops` for what they compute."""

    def attend_pages(
        self,
        q: ITensor,
        kv: tuple[ITensor, ITensor] | None,  # None: an earlier layer has written the pages
        cache: Cache[ITensor],
        gqa: Gqa,
        sinks: ITensor | None,  # float32 [heads]
    ) -> ITensor: ...

    def attend_latents(
        self,
        # [T, heads, latent_dim + rope_dim], absorbed and rotated; [heads, T, nope_dim] before the key's factor
        queries: tuple[ITensor, ITensor],
        own: ITensor,  # [T, latent_dim + rope_dim], written first
        factors: tuple[ITensor, ITensor],  # [heads, nope_dim, latent_dim], [heads, v_head_dim, latent_dim]
        cache: LatentCache[ITensor],
        score_scale: float,
    ) -> tuple[ITensor, ITensor | None]:
        """Sums of latents [T, heads, latent_dim], before the value's factor, and what to add behind it.

        That is [T, heads, v_head_dim]: results of rows that are attended directly, whose sums are zeros, and zeros of
        the others. None: all are absorbed.
        """
        ...

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
    ) -> ITensor: ...

    def write_draft_context(self, context: tuple[ITensor, ITensor], cache: Cache[ITensor], limits: ITensor) -> None: ...

    def sample_and_accept(self, logits: ITensor) -> Acceptance[ITensor]: ...

    def draft_tokens(
        self,
        logits: ITensor,
        next_context_lens: ITensor,
        draft_to_target: ITensor | None,  # int64 [V]
        num_slots: Dim,
        *,
        num_choices: int,
    ) -> Proposal[ITensor]: ...

    def previous_rows(self, x: ITensor, cache: RowCache[ITensor]) -> ITensor: ...

    def experts(self, x: ITensor, logits: ITensor, experts: StackedExperts[Handle], moe: Moe) -> ITensor: ...

    def gated_delta(
        self,
        qkvz: ITensor,
        ba: ITensor,
        parameters: DeltaParameters[ITensor],
        cache: RecurrentCache[ITensor],
        eps: float,
    ) -> ITensor: ...

    def state_outputs(self) -> Mapping[str, ITensor]:
        """Outputs of the engine besides those of the step, by name."""
        ...
