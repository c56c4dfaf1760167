"""The ops of drafters that are plain layers whatever the rest of the network is."""

from dflash_trt.backends.tensorrt.layers import Dim, Handle, ITensor, Layers
from dflash_trt.backends.tensorrt.lowering_dflash2 import block_conv, select_tokens
from dflash_trt.network.ops import Acceptance, Codebooks, StepInputs


class DrafterOps:
    """A part of `Ops[Handle]`, for one network."""

    def __init__(self, layers: Layers, inputs: StepInputs[ITensor], *, max_draft_len: int) -> None:
        self._layers = layers
        self._inputs = inputs
        self._max_draft_len = max_draft_len

    def block_conv(self, x: ITensor, filters: ITensor, base: Handle) -> ITensor:
        rows, layers = self._inputs.logit_rows, self._layers
        num_requests, num_slots = layers.dim(rows, 0), layers.dim(rows, 1)
        return block_conv(layers, x, filters, base, num_requests=num_requests, num_slots=num_slots)

    def select_tokens(
        self, logits: ITensor, hidden: ITensor, codebooks: Codebooks[Handle], acceptance: Acceptance[ITensor]
    ) -> ITensor:
        num_slots, max_slots = num_drafts(self._layers, self._inputs), self._max_draft_len
        return select_tokens(
            self._layers, logits, hidden, codebooks, acceptance, self._inputs, num_slots=num_slots, max_slots=max_slots
        )


def num_drafts(layers: Layers, inputs: StepInputs[ITensor]) -> Dim:
    """K."""
    width = layers.dim(inputs.logit_rows, 1)
    return width - 1 if isinstance(width, int) else layers.binary("SUB", width, 1)
