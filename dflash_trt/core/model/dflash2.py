"""DFlash2's additions to a DFlash drafter: convolutions over a draft block, and a candidate selector."""

from typing import Annotated

from pydantic import Field

from dflash_trt.core.frozen import Frozen, Scale, Size
from dflash_trt.core.weight_spec import WeightSpec, WeightTable

MAX_TAPS = 4


class BlockConv(Frozen):
    """Grouped dynamic causal convolution over the slots of a block, before and after every sublayer.

    The filter of a slot and channel is a base, one for each side of the sublayer, and a part that its group of
    `group_size` channels has in common: a projection of the slot's normed hidden state, which both sides share.
    """

    kernel_size: Annotated[int, Field(ge=1, le=MAX_TAPS)]
    group_size: Size

    def num_coefficients(self, hidden_size: int) -> int:
        """Coefficients of a slot on one side."""
        return self.kernel_size * (hidden_size // self.group_size)

    def weights(self, prefix: str, hidden_size: int) -> WeightTable:
        """On every rank: the hidden states are, too."""
        return {
            f"{prefix}.base": WeightSpec(shape=(2, self.kernel_size, hidden_size)),
            f"{prefix}.filter": WeightSpec(shape=(2 * self.num_coefficients(hidden_size), hidden_size)),
        }


class CandidateSelector(Frozen):
    """Chooses one of the `top_k` most likely tokens of every slot, walking from the anchor.

    The score of token b after token a in a slot with hidden state h is logit(b) + <P[a] * W h, S[b]>, with codebooks P
    and S of `rank`. So the scale of the logits matters: they are multiplied by `output_multiplier`.
    """

    rank: Size
    top_k: Size
    output_multiplier: Scale = 1.0

    def weights(self, prefix: str, hidden_size: int, vocab_size: int) -> WeightTable:
        codebook = WeightSpec(shape=(vocab_size, self.rank))
        return {
            f"{prefix}.predecessor.embedding": codebook,
            f"{prefix}.successor.embedding": codebook,
            f"{prefix}.hidden": WeightSpec(shape=(self.rank, hidden_size)),
        }
