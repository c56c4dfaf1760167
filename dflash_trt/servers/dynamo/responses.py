"""Chunks of an answer in Dynamo's form. The last one has the usage and the speculation statistics."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from dflash_trt.core.logprobs import PromptLogprob, TokenLogprob
from dflash_trt.core.request import GenerationOutput
from dflash_trt.serving.marked_texts import DraftMarker
from dflash_trt.serving.output_processor import StreamChunk

# The reasons that the front end knows; a queue timeout is an error like any other.
_FINISH_REASONS: Final[Mapping[str, str]] = {"stop": "stop", "length": "length", "cancelled": "cancelled"}


def response(
    chunk: StreamChunk, *, max_draft_len: int, has_logprobs: bool, marker: DraftMarker | None = None
) -> dict[str, Any]:
    """One chunk of one step of one sample; `marker` is for a request that reports its drafts.

    Raises:
        RuntimeError: the request failed.
    """
    fields: dict[str, Any] = {"token_ids": list(chunk.token_ids), "index": chunk.sample_index}
    if has_logprobs:
        fields["log_probs"] = list(chunk.logprobs)
        if chunk.top_logprobs:
            fields["top_logprobs"] = [_ranked(tokens) for tokens in chunk.top_logprobs]
    output = chunk.output
    engine_data: dict[str, Any] = {}
    if marker is not None:
        engine_data["drafts"] = _drafts(chunk, marker)
        fields["engine_data"] = engine_data
    if output is None:
        return fields
    if output.finish_reason not in _FINISH_REASONS:
        raise RuntimeError(output.error or f"the request ended with {output.finish_reason}")
    fields["finish_reason"] = _FINISH_REASONS[output.finish_reason]
    fields["completion_usage"] = _usage(output)
    if max_draft_len:
        engine_data["metrics"] = {"speculative_decoding": speculation(output, max_draft_len)}
    prompt = output.prompt_logprobs
    if prompt is not None:
        engine_data["prompt_logprobs"] = [None if token is None else _by_token(token) for token in prompt]
    if engine_data:
        fields["engine_data"] = engine_data
    return fields


def _drafts(chunk: StreamChunk, marker: DraftMarker) -> dict[str, Any]:
    """The texts of a chunk by where their tokens come from, and the step's counts."""
    texts = [*marker.push(chunk.steps), *(marker.flush() if chunk.finish_reason is not None else ())]
    return {
        "num_draft_tokens": chunk.num_draft_tokens,
        "num_accepted_tokens": chunk.num_accepted_tokens,
        "num_tokens": len(chunk.token_ids),
        "texts": [{"origin": text.origin, "text": text.text} for text in texts],
    }


def speculation(output: GenerationOutput, max_draft_len: int) -> dict[str, Any]:
    """Per-request numbers, in the words of benchmark clients (vLLM, aiperf)."""
    verified = [step for step in output.steps if step.num_candidates]
    counts = Counter(step.num_accepted for step in verified)
    num_drafts = output.num_draft_tokens
    return {
        "num_spec_tokens": max_draft_len,
        "num_spec_steps": output.num_verify_steps,
        "num_draft_tokens": num_drafts,
        "num_accepted_draft_tokens": output.num_accepted_tokens,
        "mean_acceptance_length": output.acceptance_length,
        "draft_acceptance_rate": output.num_accepted_tokens / num_drafts if num_drafts else None,
        "acceptance_histogram": [counts[length] for length in range(max_draft_len + 1)],
        "per_step_accepted": [step.num_accepted for step in verified],
        "per_step_drafted": [step.num_candidates for step in verified],
    }


def _ranked(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """The most likely tokens at one place, the most likely first; the front end adds their text."""
    return [
        {"rank": rank, "token_id": token.token_id, "token": None, "logprob": token.logprob}
        for rank, token in enumerate(tokens, start=1)
    ]


def _by_token(token: PromptLogprob) -> dict[str, Any]:
    """Log probabilities of a prompt token and of its top alternatives, by token id as text."""
    ranks = {str(other["token_id"]): other for other in _ranked(token.top_logprobs)}
    found = {name: {"logprob": other["logprob"], "rank": other["rank"]} for name, other in ranks.items()}
    return {str(token.token_id): {"logprob": token.logprob}} | found


def _usage(output: GenerationOutput) -> dict[str, Any]:
    num_prompt, num_new = output.num_prompt_tokens, len(output.token_ids)
    rejected = output.num_draft_tokens - output.num_accepted_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": output.statistics.num_prefix_hit_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": output.num_accepted_tokens,
            "rejected_prediction_tokens": rejected,
        },
    }
