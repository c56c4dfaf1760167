"""The step contract: every tensor that enters and leaves one engine call.

    T tokens in the step   R requests   K draft tokens per request   P pages per request (max)

K is chosen per step, down to 0. A request verifies `num_candidates` <= K drafts and always leaves with K new ones.

A row of logits gives a token only if the sum of its exponentials is finite and not 0: no NaN, no +inf, not all -inf.
The log probability of any other row is NaN, which is how the device reports it without a wait of the host; its token
is in the vocabulary and means nothing. `executor/step_inputs.step_result` is the one place that reads the NaN.
"""

from dataclasses import dataclass
from typing import Literal

TensorDType = Literal["int32", "int64", "float32"]
Axis = Literal["T", "R", "R+1", "K", "K+1", "P"]


@dataclass(frozen=True, slots=True)
class StepTensor:
    """A name, a dtype and symbolic axes."""

    name: str
    dtype: TensorDType
    axes: tuple[Axis, ...]
    meaning: str


STEP_INPUTS: tuple[StepTensor, ...] = (
    StepTensor("token_ids", "int32", ("T",), "prompt chunk, or [anchor, draft_1 .. draft_n]"),
    StepTensor("positions", "int32", ("T",), "absolute positions"),
    StepTensor("token_offsets", "int32", ("R+1",), "cumulative token counts per request"),
    StepTensor("context_lens", "int32", ("R",), "tokens whose K/V are committed == position of the anchor"),
    StepTensor("page_table", "int32", ("R", "P"), "page ids, one table for target and draft K/V"),
    StepTensor("logit_rows", "int32", ("R", "K+1"), "rows that need logits; the last one repeated to fill"),
    StepTensor("num_candidates", "int32", ("R",), "drafts to verify; 0 for a prefill chunk"),
    StepTensor("temperature", "float32", ("R",), "0 is greedy"),
    StepTensor("top_k", "int32", ("R",), "0 is off"),
    StepTensor("top_p", "float32", ("R",), "1 is off"),
    StepTensor("min_p", "float32", ("R",), "0 is off"),
    StepTensor("seed", "int64", ("R",), "key of the counter-based generator"),
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
