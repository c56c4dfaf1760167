"""The front end's answers as clients get them.

Samples are joined into one answer, with speculation statistics at its root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from dflash_trt.servers.dynamo.api_fields import ENGINE_DATA

_SUMMED: Final = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
_LISTS: Final = ("per_step_accepted", "per_step_drafted")


def error_object(code: int, message: str) -> dict[str, Any]:
    """An error as OpenAI's API has it."""
    return {"error": {"message": message, "type": HTTPStatus(code).phrase, "param": None, "code": int(code)}}


def as_error_object(answer: Any, code: int) -> dict[str, Any]:
    """The same of an error as the front end has it: the fields at the root, or below `error`, or text."""
    found = answer.get("error") or answer if isinstance(answer, Mapping) else answer
    if not isinstance(found, Mapping):
        return error_object(code, str(found))
    number: Any = found.get("code")
    if number in {status.value for status in HTTPStatus}:
        code = number
    return error_object(code, str(found.get("message", found)))


def joined(answers: Sequence[dict[str, Any]], *, keeps_engine_data: bool) -> dict[str, Any]:
    """One answer with the choices of all samples, in order."""
    lifted = [with_metrics(answer, keeps_engine_data=keeps_engine_data) for answer in answers]
    first = lifted[0]
    if len(lifted) == 1:
        return first
    choices = [choice | {"index": index} for index, answer in enumerate(lifted) for choice in answer["choices"]]
    joint = first | {"choices": choices, "usage": joined_usage([answer["usage"] for answer in lifted])}
    if "metrics" in first:
        speculation = joined_speculation([answer["metrics"]["speculative_decoding"] for answer in lifted])
        joint["metrics"] = {"speculative_decoding": speculation}
    return joint


def with_metrics(answer: dict[str, Any], *, keeps_engine_data: bool) -> dict[str, Any]:
    """An answer, or the last chunk of a stream, with `metrics` and `prompt_logprobs` at its root.

    The front end leaves what a worker tells below `nvext`; benchmark clients read it at the root, as from vLLM.
    """
    nvext = answer.get("nvext") or {}
    engine_data: dict[str, Any] | None = nvext.get(ENGINE_DATA)
    if engine_data is None:
        return answer
    lifted = {name: value for name, value in answer.items() if name != "nvext"} | engine_data
    kept = nvext if keeps_engine_data else {name: value for name, value in nvext.items() if name != ENGINE_DATA}
    return lifted | ({"nvext": kept} if kept else {})


def joined_usage(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The prompt counts once, as in OpenAI's answers."""
    first = usages[0]
    num_new = sum(usage["completion_tokens"] for usage in usages)
    details = [usage.get("completion_tokens_details") or {} for usage in usages]
    return {
        **first,
        "completion_tokens": num_new,
        "total_tokens": first["prompt_tokens"] + num_new,
        "completion_tokens_details": {name: _total(details, name) for name in details[0]},
    }


def joined_speculation(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The counts of all samples; see `responses.speculation`."""
    totals = {name: sum(one[name] for one in found) for name in _SUMMED}
    steps, drafts, accepted = (totals[name] for name in _SUMMED)
    emitted = sum((one["mean_acceptance_length"] or 0.0) * one["num_spec_steps"] for one in found)
    histograms = zip(*(one["acceptance_histogram"] for one in found), strict=True)
    return {
        **found[0],
        **totals,
        **{name: [count for one in found for count in one[name]] for name in _LISTS},
        "acceptance_histogram": [sum(counts) for counts in histograms],
        "mean_acceptance_length": emitted / steps if steps else None,
        "draft_acceptance_rate": accepted / drafts if drafts else None,
    }


def _total(details: Sequence[Mapping[str, Any]], name: str) -> int | None:
    counts = [detail[name] for detail in details if detail.get(name) is not None]
    return sum(counts) if counts else None
