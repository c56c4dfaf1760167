"""A request as Dynamo's front end hands it over, made into prompt and sampling parameters.

`FIELDS` is the only place that knows its fields. What neither we nor the front end implement is refused by name.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dflash_trt.core.errors import RequestError, problem, raise_all
from dflash_trt.core.sampling import SAMPLING_FIELDS, SamplingParams
from dflash_trt.servers.dynamo.api_fields import ANNOTATION, REPORTS_DRAFTS

_NAMES: Final = frozenset(row.name for row in SAMPLING_FIELDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """A request field at `path`; `api_name` is the clients' name for it if not the last part of the path.

    `sampling` names the SamplingParams field that takes its value. A row whose name SamplingParams does not have
    refuses every value except the neutral ones, which ask for nothing. Without `sampling` the field belongs to the
    front end (`is_frontends`), or is not implemented.
    """

    path: str
    sampling: str | None = None
    neutral: tuple[Any, ...] = (None,)
    convert: Callable[[Any], Any] = lambda value: value
    api_name: str | None = None
    is_frontends: bool = False

    @property
    def name(self) -> str:
        return self.api_name or self.path.rpartition(".")[2]

    @property
    def is_served(self) -> bool:
        return self.is_frontends or (self.sampling is not None and self.sampling in _NAMES)


def _schema(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _field(path: str, *neutral: Any, to: str | None = None, **options: Any) -> Field:
    """A row that goes to the parameter of its own name, or to another."""
    return Field(path=path, sampling=to or path.rpartition(".")[2], neutral=(None, *neutral), **options)


def _refused(path: str, *neutral: Any, api_name: str | None = None) -> Field:
    return Field(path=path, neutral=(None, *neutral), api_name=api_name)


def _frontends(path: str) -> Field:
    return Field(path=path, is_frontends=True)


_GUIDED = "sampling_options.guided_decoding"

FIELDS: Final = (
    _field("sampling_options.temperature"),
    _field("sampling_options.top_k", convert=lambda value: 0 if value == -1 else value),
    _field("sampling_options.top_p"),
    _field("sampling_options.min_p"),
    _field("sampling_options.seed"),
    _refused("sampling_options.n", 1),  # the gateway sends a request for each sample: api_fields.py
    _field("sampling_options.repetition_penalty", 1.0),
    _field("sampling_options.presence_penalty", 0.0),
    _field("sampling_options.frequency_penalty", 0.0),
    _field("sampling_options.logit_bias", {}),
    _refused("sampling_options.best_of", 1),
    _refused("sampling_options.use_beam_search", False),
    _refused("sampling_options.length_penalty", 1.0),
    _refused("sampling_options.include_stop_str_in_output", False),
    _field(f"{_GUIDED}.json", to="json_schema", convert=_schema, api_name="response_format"),
    _field(f"{_GUIDED}.regex", api_name="guided_regex"),
    _field(f"{_GUIDED}.choice", api_name="guided_choice"),
    _field(f"{_GUIDED}.grammar", api_name="guided_grammar"),
    _refused(f"{_GUIDED}.structural_tag", api_name="tool_choice"),
    _refused(f"{_GUIDED}.backend", api_name="guided_decoding_backend"),
    _refused(f"{_GUIDED}.whitespace_pattern", api_name="guided_whitespace_pattern"),
    _field("stop_conditions.max_tokens", to="max_new_tokens"),
    _field("stop_conditions.min_tokens", 0),
    _field("stop_conditions.stop"),
    _field("stop_conditions.stop_token_ids"),
    _field("stop_conditions.stop_token_ids_visible", to="stop_token_ids"),
    _frontends("stop_conditions.stop_token_ids_hidden"),  # end-of-sequence ids, which the engine knows
    _field("stop_conditions.ignore_eos"),
    _refused("stop_conditions.max_thinking_tokens"),
    _field("output_options.logprobs", to="logprobs", convert=lambda value: value is not None),
    _field("output_options.prompt_logprobs"),
    _frontends("output_options.skip_special_tokens"),
    _frontends("output_options.formatted_prompt"),
    _frontends("output_options.return_tokens_as_token_ids"),
    _refused("extra_args.sampling_options.allowed_token_ids", []),
    _refused("extra_args.sampling_options.bad_words_token_ids", []),
    _refused("extra_args.sampling_options.logprob_token_ids", []),
    _refused("extra_args.sampling_options.detokenize", True),
)
_BY_PATH: Final = {field.path: field for field in FIELDS}
# Groups whose fields must all be known; others carry what the front end and its router tell each other.
_GROUPS: Final = ("sampling_options", "stop_conditions", "output_options", _GUIDED, "extra_args.sampling_options")
# Inputs of other kinds of workers.
_FOREIGN: Final = ("multi_modal_data", "prompt_embeds", "encoder_result", "prefill_result", "bootstrap_info")


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """One request, for the engine."""

    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    reports_drafts: bool = False


def read_request(request: Mapping[str, Any], *, defaults: Mapping[str, Any], max_seq_len: int) -> Order:
    """`defaults` fill in sampling parameters; without max_tokens the context length is the limit.

    Raises:
        RequestError: every field that is not implemented, or every value out of range.
    """
    problems = [
        problem(name, expected="nothing, for this server does not implement it", found=_shown(value))
        for name, value in _unserved(request)
    ]
    raise_all(RequestError, "request", problems)
    token_ids = request["token_ids"]
    most = {"max_new_tokens": max(1, max_seq_len - len(token_ids))}
    routing = request.get("routing") or {}
    annotated = _annotated(request)
    reports_drafts = annotated.pop(REPORTS_DRAFTS, False)
    if not isinstance(reports_drafts, bool):
        raise RequestError.about(REPORTS_DRAFTS, expected="true or false", found=_shown(reports_drafts))
    known = {name: value for name, value in defaults.items() if name in _NAMES}
    return Order(
        prompt_token_ids=token_ids,
        sampling=SamplingParams(**(most | known | _sampling(request) | annotated)),
        cache_salt=routing.get("cache_salt") or "",
        priority=int(routing.get("priority") or 0),
        reports_drafts=reports_drafts,
    )


def _unserved(request: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and value of each field that asks for something not implemented."""
    for group in _GROUPS:
        for key, value in _group(request, group).items():
            path = f"{group}.{key}"
            if path in _GROUPS:
                continue
            field = _BY_PATH.get(path, _refused(path))
            if not field.is_served and value not in field.neutral:
                yield field.name, value
    for name in _FOREIGN:
        if request.get(name):
            yield name, request[name]


def _sampling(request: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters that a request sets."""
    values: dict[str, Any] = {}
    for group in _GROUPS:
        for key, value in _group(request, group).items():
            field = _BY_PATH.get(f"{group}.{key}")
            if field is not None and field.sampling in _NAMES and value is not None:
                value = field.convert(value)
                name = str(field.sampling)
                values[name] = [*values[name], *value] if name == "stop_token_ids" and name in values else value
    num_top = _group(request, "output_options").get("logprobs")
    if num_top:
        values["top_logprobs"] = num_top
    return values


def _annotated(request: Mapping[str, Any]) -> dict[str, Any]:
    """SamplingParams fields, and `reports_drafts`, in `nvext.annotations`: `dflash-trt:{"logit_bias": {"5": -100}}`."""
    values: dict[str, Any] = {}
    for text in request.get("annotations") or ():
        if not text.startswith(ANNOTATION):
            continue
        try:
            fields = json.loads(text.removeprefix(ANNOTATION))
            unknown = set(fields) - _NAMES - {REPORTS_DRAFTS}
        except (ValueError, TypeError):
            raise RequestError.about("nvext.annotations", expected="a JSON object", found=_shown(text)) from None
        if unknown:
            expected = f"sampling parameters: {', '.join(sorted(_NAMES))}; or {REPORTS_DRAFTS}"
            raise RequestError.about("nvext.annotations", expected=expected, found=", ".join(sorted(unknown)))
        values |= fields
    return values


def _group(request: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    found: Any = request
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _shown(value: Any) -> str:
    return f"{value!r:.80}"
