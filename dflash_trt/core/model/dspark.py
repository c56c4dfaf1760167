"""DSpark's additions to a DFlash drafter: logits that depend on the previous draft, and a confidence for each draft.

Definition: arXiv 2607.05147, github.com/deepseek-ai/DeepSpec and PyPI `speculators` 0.9 (`models/dspark`).
"""

from typing import Literal

from dflash_trt.core.frozen import Frozen, Size
from dflash_trt.core.weight_spec import WeightSpec, WeightTable

MarkovType = Literal["vanilla", "gated", "rnn"]


class DSparkHeads(Frozen):
    """The Markov head adds W2 m to the logits of a slot: m [rank] comes from W1[x], where x is the previous draft.

    `vanilla`: m = W1[x]. `gated`: m = sigmoid(G [h; W1[x]] + b) * W1[x], where h is the slot's normed hidden state.
    `rnn`: [g; c; o] = J [s; W1[x]; h] + b and m = tanh(o), with a state s that is zero before the block's first slot;
    the next one is sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c).

    With `drafts_from_anchor` every slot predicts the token after its own position, the anchor's slot the first draft.

    The confidence of a draft is sigmoid(c . [h; W1[x]] + b), without W1[x] unless `confidence_reads_token`.
    """

    rank: Size
    markov_type: MarkovType = "vanilla"
    drafts_from_anchor: bool = True
    has_confidence: bool = False
    confidence_reads_token: bool = True

    def weights(self, hidden_size: int, *, vocab_size: int, draft_vocab_size: int) -> WeightTable:
        """On every rank: a slot's bias would need an exchange otherwise."""
        rank = self.rank
        table = {
            "draft.markov.previous.embedding": WeightSpec(shape=(vocab_size, rank)),
            "draft.markov.bias": WeightSpec(shape=(draft_vocab_size, rank)),
        }
        if self.markov_type == "gated":
            table["draft.markov.gate"] = WeightSpec(shape=(rank, hidden_size + rank))
            table["draft.markov.gate_bias"] = WeightSpec(shape=(rank,))
        elif self.markov_type == "rnn":
            table["draft.markov.cell"] = WeightSpec(shape=(3 * rank, 2 * rank + hidden_size))
            table["draft.markov.cell_bias"] = WeightSpec(shape=(3 * rank,))
        if self.has_confidence:
            width = hidden_size + rank * self.confidence_reads_token
            table["draft.confidence"] = WeightSpec(shape=(1, width), is_plain=True)
            table["draft.confidence_bias"] = WeightSpec(shape=(1,))
        return table
