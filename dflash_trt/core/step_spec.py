"""The step contract: every tensor that enters and leaves one engine call.

    T tokens in the step   R requests   K draft tokens per request   P pages per request (max)

K is chosen per step, down to 0. A request verifies `num_candidates` <= K drafts and always leaves with K new ones.

A row of logits gives a token only if the sum of its exponentials is finite and not 0: no NaN, no +inf, not all -inf.
The log probability of any other row is NaN, so that the device can report it without a synchronization; its token is
in the vocabulary and means nothing. Only `backends/step_inputs.step_result` reads the NaN.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from dflash_trt.core.dtype import DType
from dflash_trt.core.sampling import STEP_SAMPLING_FIELDS

Axis = Literal["T", "R", "R+1", "K", "K+1", "P"]


@dataclass(frozen=True, slots=True)
class StepTensor:
    """A name, a dtype and symbolic axes.

    `source` is the attribute of ScheduledRequest that an input comes from: one value per request, per token (T) or per
    page (P). None: it follows from the order and lengths of the requests. `padding` is the value of a padding row.
    """

    name: str
    dtype: DType
    axes: tuple[Axis, ...]
    meaning: str
    source: str | None = None
    padding: float = 0

    def extents(self, sizes: Mapping[Axis, int]) -> list[int]:
        return [sizes[axis] for axis in self.axes]

    def num_elements(self, sizes: Mapping[Axis, int]) -> int:
        return prod(self.extents(sizes))


STEP_INPUTS: tuple[StepTensor, ...] = (
    StepTensor("token_ids", "int32", ("T",), "prompt chunk, or [anchor, draft_1 .. draft_n]", source="token_ids"),
    StepTensor("positions", "int32", ("T",), "absolute positions"),
    StepTensor("token_offsets", "int32", ("R+1",), "cumulative token counts per request"),
    StepTensor(
        "context_lens", "int32", ("R",), "tokens whose K/V are committed == position of the anchor", "context_len"
    ),
    StepTensor("page_table", "int32", ("R", "P"), "page ids, one table for target and draft K/V", source="page_ids"),
    StepTensor("logit_rows", "int32", ("R", "K+1"), "rows that need logits; the last one repeated to fill"),
    StepTensor("num_candidates", "int32", ("R",), "drafts to verify; 0 for a prefill chunk", source="num_candidates"),
    *(
        StepTensor(row.name, row.dtype, ("R",), row.help, source=f"sampling.{row.name}", padding=row.off or 0)
        for row in STEP_SAMPLING_FIELDS
        if row.dtype is not None
    ),
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
