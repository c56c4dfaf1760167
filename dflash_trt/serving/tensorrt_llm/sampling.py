"""A request's sampling parameters as TensorRT-LLM takes them; unsupported ones are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from dflash_trt.core.errors import RequestError, problem, raise_all
from dflash_trt.core.request import Request
from dflash_trt.core.sampling import SAMPLING_FIELDS

# Our names and theirs, in tensorrt_llm.SamplingParams and in trtllm-serve's completions.
_NAMES: Final = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "min_tokens": "min_tokens",
}
_OURS: Final = ("max_new_tokens", "seed", "stop", "stop_token_ids", "ignore_eos", "n")  # done here, or always said
_PENALTIES: Final = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_INSTEAD = "Leave it out, or serve an engine of backend torch or tensorrt."


def trtllm_params(request: Request, *, max_seq_len: int, has_drafter: bool) -> dict[str, Any]:
    """TensorRT-LLM SamplingParams fields for `request`.

    Tokens become text here, so TensorRT-LLM does not detokenize, and the stop ids are explicit, end-of-sequence ids
    included.

    Raises:
        RequestError: lists everything that TensorRT-LLM cannot do with this engine.
    """
    sampling = request.sampling
    raise_all(RequestError, "backend tensorrt_llm", list(_problems(request, has_drafter=has_drafter)))
    values = {ours: getattr(sampling, ours) for ours in _NAMES}
    defaults = {row.name: row.default for row in SAMPLING_FIELDS}
    given = {_NAMES[name]: value for name, value in values.items() if value != defaults[name]}
    return {
        "max_tokens": min(sampling.max_new_tokens, max_seq_len - len(request.prompt_token_ids)),
        "temperature": sampling.temperature,
        "seed": request.seed,
        "stop_token_ids": sorted(request.stop_token_ids),
        "include_stop_str_in_output": True,  # the id that stops is a token of the output
        "ignore_eos": True,
        "detokenize": False,
        "add_special_tokens": False,
        **given,
    }


def _problems(request: Request, *, has_drafter: bool) -> Iterator[str]:
    for row in SAMPLING_FIELDS:
        value = getattr(request.sampling, row.name)
        if value == row.default:
            continue
        if row.name not in _NAMES and row.name not in _OURS:
            yield problem(f"sampling {row.name}", expected="nothing", found=f"{value!r:.80}", hint=_INSTEAD)
        elif row.name in _PENALTIES and has_drafter:
            expected = f"{row.default} while TensorRT-LLM drafts"
            yield problem(f"sampling {row.name}", expected=expected, found=str(value), hint="Pass --no-drafter.")
    if request.priority:
        yield problem("priority", expected="0", found=str(request.priority), hint=_INSTEAD)
    if request.queue_timeout_s is not None:
        yield problem("queue_timeout_s", expected="None", found=f"{request.queue_timeout_s:g}", hint=_INSTEAD)
    if request.reports_drafts:
        yield problem("reports_drafts", expected="False", found="True", hint=_INSTEAD)
