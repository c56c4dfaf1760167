"""The step contract: every tensor that enters and leaves one engine call.

    T tokens in the step   R requests   K draft tokens per request   P pages per request (max)   G page groups
    C top-k candidates of a draft, for rejection sampling

K is chosen per step, down to 0. A request verifies `num_candidates` <= K drafts and always leaves with K new ones.

A row of logits gives a token only if the sum of its exponentials is finite and not 0: no NaN, no +inf, not all -inf.
The log probability of any other row is NaN, so that the device can report it without a synchronization; its token is
in the vocabulary and means nothing. Only `backends/step_inputs.step_result` reads the NaN.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from dflash_trt.core.dtype import DType
from dflash_trt.core.sampling import STEP_SAMPLING_FIELDS

Axis = Literal["T", "R", "R+1", "K", "K+1", "K*C", "P", "G"]


@dataclass(frozen=True, slots=True)
class StepTensor:
    """A name, a dtype and symbolic axes. `padding` is the value of a padding row.

    A tensor that `is_by_group` has the rows of every page group, concatenated.
    """

    name: str
    dtype: DType
    axes: tuple[Axis, ...]
    meaning: str
    padding: float = 0
    is_by_group: bool = False

    def extents(self, sizes: Mapping[Axis, int]) -> list[int]:
        first, *others = (sizes[axis] for axis in self.axes)
        return [first * sizes["G"] if self.is_by_group else first, *others]

    def num_elements(self, sizes: Mapping[Axis, int]) -> int:
        return prod(self.extents(sizes))


STEP_INPUTS: tuple[StepTensor, ...] = (
    StepTensor("token_ids", "int32", ("T",), "prompt chunk, or [anchor, draft_1 .. draft_n]"),
    StepTensor("positions", "int32", ("T",), "absolute positions"),
    StepTensor("token_offsets", "int32", ("R+1",), "cumulative token counts per request"),
    StepTensor("context_lens", "int32", ("R",), "tokens whose K/V are committed == position of the anchor"),
    StepTensor("page_table", "int32", ("R", "P"), "page ids, a table for each page group", is_by_group=True),
    StepTensor("logit_rows", "int32", ("R", "K+1"), "rows that need logits; the last one repeated to fill"),
    StepTensor("num_candidates", "int32", ("R",), "drafts to verify; 0 for a prefill chunk"),
    StepTensor(
        "draft_topk_ids", "int32", ("R", "K*C"), "top-k candidates that each draft was sampled from, draft by draft"
    ),
    StepTensor("draft_topk_probs", "float32", ("R", "K*C"), "their draft probabilities; 0 where nothing was sampled"),
    *(
        StepTensor(row.name, row.dtype, ("R",), row.help, padding=row.off or 0)
        for row in STEP_SAMPLING_FIELDS
        if row.dtype is not None
    ),
)

# Made on the device from the plan and from the slots of its rows, before the engine call; the others come as they are.
ASSEMBLED: Final = ("token_ids", "positions", "context_lens", "page_table", "draft_topk_ids", "draft_topk_probs")

# Inputs of engines that draft.
DRAFT_INPUTS: Final = ("draft_topk_ids", "draft_topk_probs")

# Inputs that the host sends for a step; instead of the assembled tensors, the values of given rows.
PLAN_INPUTS: tuple[StepTensor, ...] = (
    StepTensor("slot_ids", "int64", ("R",), "the slot of each request; padding has the last one"),
    StepTensor("token_rows", "int64", ("T",), "the request of each token; R for padding"),
    *(tensor for tensor in STEP_INPUTS if tensor.name not in ("positions", "page_table", *DRAFT_INPUTS)),
)

STEP_OUTPUTS: tuple[StepTensor, ...] = (
    StepTensor("emitted_tokens", "int32", ("R", "K+1"), "accepted drafts, then the bonus; first num_accepted+1 valid"),
    StepTensor(
        "emitted_logprobs", "float32", ("R", "K+1"), "log p of emitted_tokens, unfiltered target; NaN: no token"
    ),
    StepTensor("num_accepted", "int32", ("R",), "drafts the target agreed with; never counts the bonus"),
    StepTensor("draft_tokens", "int32", ("R", "K"), "drafts for the next step, conditioned on the bonus"),
    StepTensor("next_context_lens", "int32", ("R",), "context_lens + tokens given - num_candidates + num_accepted"),
)

# Output of engines whose drafter has a head for it.
DRAFT_CONFIDENCE: Final = StepTensor(
    "draft_confidence", "float32", ("R", "K"), "the drafter's estimates that draft_tokens are accepted, one by one"
)

# Outputs of steps that draft, for the slots of the next step only: no host reads them.
DRAFT_OUTPUTS: tuple[StepTensor, ...] = (
    StepTensor("next_draft_topk_ids", "int32", ("R", "K*C"), "top-k candidates of each of draft_tokens"),
    StepTensor("next_draft_topk_probs", "float32", ("R", "K*C"), "their draft probabilities, as in draft_topk_probs"),
)
