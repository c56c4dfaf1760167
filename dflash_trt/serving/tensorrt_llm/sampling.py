"""A request's sampling parameters as TensorRT-LLM takes them; unsupported ones are refused by name.

Sources: `tensorrt_llm/sampling_params.py`, `docs/source/features/sampling.md` and, for what it does not do while it
drafts, `SpecSampler.validate_request` in `_torch/speculative/spec_sampler_base.py`; `tests/data/` has their commits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dflash_trt.core.errors import RequestError, problem, raise_all
from dflash_trt.core.request import Request
from dflash_trt.core.sampling import GRAMMAR_FIELDS, SAMPLING_FIELDS

_OF_OUTPUT: Final = ("presence_penalty", "frequency_penalty")  # theirs count the prompt, too, unless told otherwise
_PENALTIES: Final = ("repetition_penalty", *_OF_OUTPUT)
# Names that are also theirs, in tensorrt_llm.SamplingParams and in trtllm-serve's completions.
_SAME_NAMES: Final = ("temperature", "top_k", "top_p", "min_p", *_PENALTIES, "min_tokens")
_OF_PROMPT: Final = "prompt_logprobs"
_NOT_WHILE_DRAFTING: Final = ("min_p", "min_tokens", "logit_bias", "bad_words", "logprobs", "top_logprobs", _OF_PROMPT)
_INSTEAD = "Leave it out, or serve an engine of backend torch or tensorrt."
_DEFAULTS: Final = {row.name: row.default for row in SAMPLING_FIELDS}


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What an opened engine can do for a request.

    `has_guides` and `has_penalties` say whether its arguments have `guided_decoding_backend` and `enable_penalty`.
    `refused` are sampling parameters that its link cannot carry, with what is expected instead.
    """

    vocab_size: int
    has_drafter: bool
    has_guides: bool = True
    has_penalties: bool = True
    refused: Mapping[str, str] = field(default_factory=dict)


def trtllm_params(request: Request, abilities: Abilities, *, max_seq_len: int) -> dict[str, Any]:
    """TensorRT-LLM SamplingParams fields for `request`, of JSON values.

    `guided_decoding` has fields of GuidedDecodingParams, `embedding_bias` the vocabulary and the tokens that it is not
    0 for. Tokens become text here, so TensorRT-LLM does not detokenize, and the stop ids are explicit, end-of-sequence
    ids included.

    Raises:
        RequestError: lists everything that TensorRT-LLM cannot do with this engine.
    """
    sampling = request.sampling
    raise_all(RequestError, "backend tensorrt_llm", list(_problems(request, abilities)))
    given = {name: getattr(sampling, name) for name in _SAME_NAMES if _is_given(request, name)}
    if any(name in given for name in _OF_OUTPUT):
        given["prompt_ignore_length"] = len(request.prompt_token_ids)
    if sampling.min_tokens:
        (given["end_id"],) = request.stop_token_ids  # the token that min_tokens holds back
    if sampling.logit_bias:
        biases = {str(token_id): bias for token_id, bias in sampling.logit_bias}
        given["embedding_bias"] = {"vocab_size": abilities.vocab_size, "biases": biases}
    if sampling.bad_words:
        stems = [word.lstrip(" ") or word for word in sampling.bad_words]
        given["bad"] = [text for stem in stems for text in (stem, f" {stem}")]  # as `TextCodec.spellings`
    if sampling.logprobs:
        given["logprobs"] = sampling.top_logprobs
    if sampling.prompt_logprobs is not None:
        given[_OF_PROMPT] = sampling.prompt_logprobs
    if sampling.grammar_field is not None:
        given["guided_decoding"] = _guide(sampling.grammar_field, getattr(sampling, sampling.grammar_field))
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


def _is_given(request: Request, name: str) -> bool:
    return bool(getattr(request.sampling, name) != _DEFAULTS[name])


def _guide(name: str, value: Any) -> dict[str, str]:
    """The field of GuidedDecodingParams for one of ours; its `grammar` is Lark's with the backend llguidance."""
    from dflash_trt.serving.grammar_trial import choice_grammar, schema_with_options

    if name == "json_schema":
        return {"json": json.dumps(schema_with_options(json.loads(value)), ensure_ascii=False)}
    if name == "choice":
        return {"grammar": choice_grammar(value)}
    return {name: value}


def _problems(request: Request, abilities: Abilities) -> Iterator[str]:
    for name in filter(lambda name: _is_given(request, name), _DEFAULTS):
        value = getattr(request.sampling, name)
        expected, hint = _expected(name, request, abilities)
        if expected is not None:
            yield problem(f"sampling {name}", expected=expected, found=f"{value!r:.80}", hint=hint)
    if request.priority:
        yield problem("priority", expected="0", found=str(request.priority), hint=_INSTEAD)
    if request.queue_timeout_s is not None:
        yield problem("queue_timeout_s", expected="None", found=f"{request.queue_timeout_s:g}", hint=_INSTEAD)
    if request.reports_drafts:
        yield problem("reports_drafts", expected="False", found="True", hint=_INSTEAD)


def _expected(name: str, request: Request, abilities: Abilities) -> tuple[str | None, str]:
    """What a given parameter should be instead, None if it is fine, and the hint."""
    sampling = request.sampling
    if name in _NOT_WHILE_DRAFTING and abilities.has_drafter:
        return f"{_DEFAULTS[name]!r} while TensorRT-LLM drafts", "Pass --no-drafter."
    if name in _PENALTIES and abilities.has_drafter and not abilities.has_penalties:
        return (
            f"{_DEFAULTS[name]} with drafts of an engine without enable_penalty",
            "Build it again, or pass --no-drafter.",
        )
    expected = abilities.refused.get(name)
    if expected is not None:
        return expected, _INSTEAD
    if name == "min_tokens" and len(request.stop_token_ids) != 1:
        return f"0 with {len(request.stop_token_ids)} tokens that stop, of which TensorRT-LLM holds back one", _INSTEAD
    if name == "ignore_eos" and sampling.grammar_field is not None:
        return f"False with {sampling.grammar_field}, whose text TensorRT-LLM ends with that token", "Leave it out."
    if name in GRAMMAR_FIELDS and not abilities.has_guides:
        return "none, for this engine has no guided_decoding_backend", "Build it again, with a tokenizer."
    if name in GRAMMAR_FIELDS and request.constraint is None:
        return "its compiled constraint", "Submit it through LLM or Generator, which compile it."
    return None, ""
