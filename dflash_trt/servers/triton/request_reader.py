"""A request of Triton's, as arrays and parameters, made into what the engine takes.

Everything wrong with a request is named in one error. Knows no Triton API: the model hands it plain arrays.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_trt.core.array import Array
from dflash_trt.core.errors import RequestError, problem, raise_all
from dflash_trt.core.frozen import nearest_name
from dflash_trt.core.sampling import SAMPLING_FIELDS, SamplingParams
from dflash_trt.servers.triton.settings import ModelSettings
from dflash_trt.servers.triton.tensors import INPUTS_BY_NAME, InputTensor
from dflash_trt.serving.prompts import Prompt

# Parameters that Triton itself adds to a request.
_TRITON_REQUEST_PARAMETERS = {
    "id",
    "binary_data_output",
    "sequence_end",
    "sequence_id",
    "sequence_start",
    "triton_enable_empty_final_response",
    "triton_final_response",
}
_PROMPT_FIELDS = ("text_input", "messages", "input_ids")
_NUM_SHOWN = 80  # characters of a wrong value
_KINDS: dict[str, tuple[type, ...]] = {"STRING": (str,), "BOOL": (bool,), "FP32": (int, float)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """One request. `text` is the prompt if it is plain text; `asked` names the `return_` flags set.

    `messages` and `chat_template_kwargs` are JSON that has not been parsed, because it may be long.
    """

    prompt: Mapping[str, Any]
    text: str | None = None
    messages: str | None = None
    chat_template_kwargs: str | None = None
    sampling: SamplingParams
    streams: bool = False
    echoes_prompt: bool = False
    asked: frozenset[str] = frozenset()
    gives_finish_reason: bool = True
    priority: int = 0
    queue_timeout_s: float | None = None
    cache_salt: str = ""

    @property
    def is_conversation(self) -> bool:
        return self.messages is not None or "messages" in self.prompt

    @property
    def is_slow(self) -> bool:
        """True if a process of limited time has a part in reading it: a chat template, or a constraint."""
        return self.is_conversation or self.sampling.grammar_field is not None

    def parsed_prompt(self) -> Prompt:
        """Raises RequestError for invalid JSON."""
        prompt = dict(self.prompt)
        if self.messages is not None:
            prompt["messages"] = _json("messages", self.messages, "list")
        if self.chat_template_kwargs is not None:
            prompt["chat_template_kwargs"] = _json("chat_template_kwargs", self.chat_template_kwargs, "object")
        return prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelOrder:
    """End the request that runs under the same id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Given:
    """A field's value, and the name it came under."""

    name: str
    value: Any


def read_request(arrays: Mapping[str, Array], parameters: str, settings: ModelSettings) -> Order | CancelOrder:
    """`parameters` is the JSON object that Triton passes with the tensors.

    A scalar input may also come as a parameter of its name: Triton's generate endpoint turns JSON keys under
    `parameters` into parameters.

    Raises:
        RequestError: every problem of the request.
    """
    problems: list[str] = []
    given = _fields(arrays, _parameters(parameters, settings, problems), problems)
    problems += _unsupported(given)
    raise_all(RequestError, "request", problems)
    values = {field: entry.value for field, entry in given.items()}
    if values.get("cancel"):
        return CancelOrder()
    problems += _contradictions(given)
    raise_all(RequestError, "request", problems)
    return Order(
        prompt=_prompt(values, settings),
        text=None if settings.wraps_in_chat else values.get("text_input"),
        messages=values.get("messages"),
        chat_template_kwargs=values.get("chat_template_kwargs"),
        sampling=_sampling(values, settings),
        streams=values.get("stream", False),
        echoes_prompt=not values.get("exclude_input", True),
        asked=frozenset(field for field, value in values.items() if value is True and field.startswith("return_")),
        gives_finish_reason=values.get("return_finish_reason", True),
        priority=values.get("priority", 0),
        queue_timeout_s=_queue_timeout_s(values),
        cache_salt=values.get("cache_salt", ""),
    )


def _parameters(text: str, settings: ModelSettings, problems: list[str]) -> dict[str, Any]:
    """Those that name inputs; problems with the others are added."""
    found: dict[str, Any] = {}
    for name, value in (json.loads(text) if text else {}).items():
        tensor = INPUTS_BY_NAME.get(name)
        if name in _TRITON_REQUEST_PARAMETERS or name in settings.accepted_request_parameters:
            continue
        if tensor is None:
            nearest = nearest_name(name, INPUTS_BY_NAME)
            hint = f"Did you mean '{nearest}'?" if nearest else "See the inputs of the model, /v2/models/NAME."
            problems.append(problem(f"input '{name}'", expected="a known one", found="another", hint=hint))
        else:
            found[name] = value
    return found


def _fields(arrays: Mapping[str, Array], parameters: Mapping[str, Any], problems: list[str]) -> dict[str, _Given]:
    """The value of each field; adds contradicting inputs and values of a wrong form to `problems`."""
    given: dict[str, _Given] = {}
    sources = [*((name, array, True) for name, array in arrays.items())]
    sources += [(name, value, False) for name, value in parameters.items()]
    for name, source, is_array in sources:
        tensor = INPUTS_BY_NAME[name]
        try:
            value = _of_array(source, tensor) if is_array else _of_json(source, tensor)
        except ValueError as error:
            problems.append(problem(f"input '{name}'", expected=str(error), found=_shown(source)))
            continue
        earlier = given.get(tensor.field)
        if earlier is not None and earlier.value != value:
            names = f"inputs '{earlier.name}' and '{name}'" if earlier.name != name else f"input '{name}', given twice"
            found = f"{_shown(earlier.value)} and {_shown(value)}"
            problems.append(problem(names, expected="equal values", found=found, hint="Pass one of them."))
        given[tensor.field] = _Given(name=name, value=value)
    return given


def _of_array(array: Array, tensor: InputTensor) -> Any:
    """Raises ValueError, with what was expected."""
    values = [_item(item) for item in array.reshape(-1)]
    if tensor.is_list:
        return tuple(values)
    if len(values) != 1:
        raise ValueError("exactly one value")
    return values[0]


def _item(item: Any) -> Any:
    if isinstance(item, bytes):
        try:
            return item.decode()
        except UnicodeDecodeError:
            raise ValueError("UTF-8 text") from None
    return item.item() if isinstance(item, np.generic) else item


def _of_json(value: Any, tensor: InputTensor) -> Any:
    kinds = _KINDS.get(tensor.type, (int,))
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"{tensor.type} as its JSON type")
    return (value,) if tensor.is_list else value


def _unsupported(given: Mapping[str, _Given]) -> Iterator[str]:
    """Inputs that ask for what the engine does not do."""
    for entry in given.values():
        neutral = INPUTS_BY_NAME[entry.name].neutral
        if neutral is not None and entry.value not in neutral:
            yield problem(
                f"input '{entry.name}'",
                expected="nothing, for this engine does not implement it",
                found=_shown(entry.value),
                hint="Leave it out.",
            )


def _contradictions(given: Mapping[str, _Given]) -> Iterator[str]:
    prompts = [given[field].name for field in _PROMPT_FIELDS if field in given]
    if len(prompts) != 1:
        yield problem(
            "prompt",
            expected=f"exactly one of the inputs {', '.join(_PROMPT_FIELDS)}",
            found=" and ".join(prompts) or "none",
            hint="Pass one of them.",
        )
    end_id = given.get("end_id")
    ignore_eos = given.get("ignore_eos")
    if end_id is not None and ignore_eos is not None and (end_id.value, ignore_eos.value) != (-1, True):
        yield problem(
            "inputs 'end_id' and 'ignore_eos'",
            expected="the same meaning",
            found=f"{end_id.value} and {ignore_eos.value}",
            hint="Pass one of them.",
        )


def _prompt(values: Mapping[str, Any], settings: ModelSettings) -> Mapping[str, Any]:
    """Empty for `messages`."""
    if "input_ids" in values:
        return {"prompt_token_ids": values["input_ids"]}
    if "messages" in values:
        return {}
    text = values["text_input"]
    if not settings.wraps_in_chat:
        return {"prompt": text}
    system = [] if settings.system is None else [{"role": "system", "content": settings.system}]
    return {"messages": [*system, {"role": "user", "content": text}]}


def _json(name: str, text: str, kind: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = f"Pass the {kind} as JSON text."
        raise RequestError.about(f"input '{name}'", expected=f"a JSON {kind}", found=str(error), hint=hint) from error


def _sampling(values: Mapping[str, Any], settings: ModelSettings) -> SamplingParams:
    """Raises RequestError for values out of range."""
    given = {row.name: values[row.name] for row in SAMPLING_FIELDS if row.name in values}
    has_filter = any(row.is_filter(given[row.name]) for row in SAMPLING_FIELDS if row.name in given)
    end_id = values.get("end_id")
    end_ids = () if end_id is None or end_id == -1 else (end_id,)
    defaults = {"max_new_tokens": settings.default_max_tokens, "temperature": float(has_filter)}
    composed = {
        "stop": tuple(text for text in values.get("stop", ()) if text),
        "bad_words": tuple(text for text in values.get("bad_words", ()) if text),
        "stop_token_ids": (*values.get("stop_token_ids", ()), *end_ids),
        "ignore_eos": values.get("ignore_eos", False) or end_id is not None,
        "logprobs": any(map(values.get, ("return_log_probs", "return_cumulative_logprob", "top_logprobs"))),
    }
    return SamplingParams(**(defaults | given | composed))


def _queue_timeout_s(values: Mapping[str, Any]) -> float | None:
    timeout_s: float | None = values.get("queue_timeout_s")
    if timeout_s is not None and not timeout_s >= 0:
        raise RequestError.about("input 'queue_timeout_s'", expected="0 or more", found=str(timeout_s))
    return timeout_s


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    text = repr(value[0] if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1 else value)
    return text if len(text) <= _NUM_SHOWN else text[:_NUM_SHOWN] + "..."
