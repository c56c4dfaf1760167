"""The table of sampling parameters.

Checks, step inputs, command-line options, fields of input rows and inputs of servers are generated from
`SAMPLING_FIELDS`. A new parameter is a field here (also in StepSampling and SamplingColumns if the device reads it) and
code in the samplers of the backends.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Generic, Self, TypeVar, get_args, get_origin, get_type_hints

from dflash_trt.core.checked_values import (
    FLOAT32_TINY,
    INT32_MAX,
    Reader,
    check_fields,
    instance,
    integer,
    number,
    number_by_id,
    text,
    tuple_of,
)
from dflash_trt.core.checked_values import optional as optional_of
from dflash_trt.core.dtype import DType
from dflash_trt.core.errors import RequestError, problem, raise_all
from dflash_trt.core.other_engines import checks_keywords, hint_for

# Limits that bound what a request costs.
MAX_STOP_STRINGS: Final = 64
MAX_STOP_LEN: Final = 256  # characters of one stop string
MAX_BAD_WORDS: Final = 64
MAX_LOGIT_BIASES: Final = 512
MAX_GRAMMAR_LEN: Final = 2**20  # characters of a schema, an expression, a grammar or all choices
GRAMMAR_FIELDS: Final = ("json_schema", "regex", "choice", "grammar")
T = TypeVar("T")

MAX_SEED: Final = 2**63 - 1
MAX_TOP_LOGPROBS: Final = 20  # alternatives of one token
MAX_SAMPLES: Final = 128  # per prompt
# Tokens are practically equally likely here; far beyond, probabilities round to one float32 and top_k sees ties.
MAX_TEMPERATURE: Final = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingField:
    """One parameter. `read` checks and converts a caller's value; its ValueError says what was expected.

    `dtype` is the type of its step input, one value per request, and `off` the value that disables it; both are None
    for parameters that only the host reads. `idle` are all values at which a filter does nothing. `trtllm_names` are
    its names in the Triton models of TensorRT-LLM: tensorrt_llm_bls, then llmapi, None if that has none. A parameter
    that `reads_file` may be given as @FILE on the command line.
    """

    name: str
    kind: type  # int, float, str or bool; of one item of a list
    is_list: bool
    default: Any
    read: Reader[Any]
    help: str
    dtype: DType | None
    off: float | None
    idle: tuple[float, ...]
    trtllm_names: tuple[str, str | None] | None
    reads_file: bool

    def is_filter(self, value: float) -> bool:
        """True if `value` removes tokens from a distribution and leaves a choice."""
        return bool(self.idle) and value not in self.idle


def _parameter(
    default: Any,
    read: Reader[Any],
    help: str,
    *,
    dtype: DType | None = None,
    off: float | None = None,
    idle: tuple[float, ...] = (),
    trtllm_names: tuple[str, str | None] | None = None,
    kind: type | None = None,
    reads_file: bool = False,
) -> Any:
    """Declare a field of SamplingParams with its row of the table. `kind` defaults to the annotation."""
    row = {"read": read, "help": help, "dtype": dtype, "off": off, "idle": idle, "trtllm_names": trtllm_names}
    row |= {"reads_file": reads_file} | ({} if kind is None else {"kind": kind})
    return field(default=default, metadata=row)


def _clamped(read: Reader[Any], clamp: Callable[[Any], Any]) -> Reader[Any]:
    """Clamp values to the range of the device's dtype, without loss of meaning."""
    return lambda value: clamp(read(value))


def _schema_text(value: object) -> str:
    """A JSON schema as text, from an object, a class of pydantic, or JSON text, which is checked."""
    expected = "a JSON schema: an object, its JSON text, or a class of pydantic"
    make_schema = getattr(value, "model_json_schema", None)
    try:
        if make_schema is not None:
            value = make_schema()
        if isinstance(value, Mapping):
            return json.dumps(value, ensure_ascii=False)
        if isinstance(value, str) and isinstance(json.loads(value), dict):
            return value
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{expected} ({error})") from error
    raise ValueError(expected)


_FLAG: Final = instance("true or false", bool)
_STRINGS: Final = tuple_of("a string or a list of strings", text("non-empty strings", min_len=1))
_PENALTY: Final = number("a number from -2 to 2", lambda x: -2.0 <= x <= 2.0)


def _strings(value: object) -> tuple[str, ...]:
    return _STRINGS([value] if isinstance(value, str) else value)


def _check_names(args: Sequence[object], fields: Mapping[str, object]) -> None:
    problems = [f"'{name}' is no sampling parameter. {hint_for(name, _NAMES)}" for name in fields.keys() - _NAMES]
    raise_all(RequestError, "sampling parameters", sorted(problems))


@checks_keywords(_check_names)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. `temperature` 0 is greedy.

    `top_k` 0, `top_p` 1 and `min_p` 0 disable their filters. Filters apply in the order temperature, top_k, top_p,
    min_p, to the target's distribution of every row. A `seed` fixes the random numbers of every position, which drafts
    share with the target: a text is a function of its seed. Without one (and without one of the engine's) a seed is
    drawn for each request, drafts get random numbers of their own and are accepted by rejection sampling, which accepts
    more of them: a text then also depends on its drafts. K, the batch and prompt chunks change how sums are rounded,
    never the distribution. In float32 on a CPU greedy texts are equal, and texts of a seed practically always; in
    bfloat16, FP8 and FP4 near-ties, and so changed texts, are common. `stop` takes at most MAX_STOP_STRINGS strings of
    at most MAX_STOP_LEN characters.

    Before the filters, the logits get `logit_bias`, `repetition_penalty`, `frequency_penalty` and `presence_penalty`,
    in this order, and `bad_words` and `min_tokens` remove tokens: `core/logit_rules.py` defines them.

    At most one of `json_schema`, `regex`, `choice` and `grammar` may be given: the text follows it from its first token
    on, and the request ends with "stop" as soon as nothing more may follow. `max_new_tokens` may end it before.

    Log probabilities are of the target's raw distribution, before all of this. `top_logprobs` requires `logprobs`. A
    request with `prompt_logprobs` computes its whole prompt, whatever the prefix cache has. Each of `n` samples has a
    seed of its own (`sample_seed`), and sample 0 equals the request with n = 1.

    Values are clamped to the device's float32 and int32: a temperature below 1.2e-38 becomes 0, a top_p below it
    1.2e-38 (only the most likely token), a top_k of 2**31 or more 2**31 - 1. Numbers of numpy, lists, and a single
    string for `stop` are accepted.

    Raises:
        RequestError: lists every value of a wrong type or out of range, or every name that is unknown.
    """

    max_new_tokens: int = _parameter(
        128,
        integer("an integer of 1 or more", 1),
        "Maximum number of new tokens.",
        trtllm_names=("max_tokens", "sampling_param_max_tokens"),
    )
    temperature: float = _parameter(
        0.0,
        _clamped(
            number(f"0 (greedy) to {MAX_TEMPERATURE}", lambda x: 0.0 <= x <= MAX_TEMPERATURE),
            lambda x: x if x >= FLOAT32_TINY else 0.0,
        ),
        f"0 (and anything below 1.2e-38) is greedy; at most {MAX_TEMPERATURE}.",
        dtype="float32",
        off=0.0,
        trtllm_names=("temperature", "sampling_param_temperature"),
    )
    top_k: int = _parameter(
        0,
        _clamped(integer("an integer of 0 (off) or more", 0), lambda k: min(k, INT32_MAX)),
        "Keep the k most likely tokens; 0 is off.",
        dtype="int32",
        off=0,
        idle=(0, 1),  # one token leaves no choice
        trtllm_names=("top_k", "sampling_param_top_k"),
    )
    top_p: float = _parameter(
        1.0,
        _clamped(number("a number in (0, 1]", lambda x: 0.0 < x <= 1.0), lambda x: max(x, FLOAT32_TINY)),
        "Keep the most likely tokens up to this cumulative probability; 1 is off.",
        dtype="float32",
        off=1.0,
        idle=(1.0,),
        trtllm_names=("top_p", "sampling_param_top_p"),
    )
    min_p: float = _parameter(
        0.0,
        number("a number in [0, 1]", lambda x: 0.0 <= x <= 1.0),
        "Keep tokens at least this likely, relative to the most likely one; 0 is off.",
        dtype="float32",
        off=0.0,
        idle=(0.0,),
    )
    repetition_penalty: float = _parameter(
        1.0,
        number("a number from 0.01 to 100", lambda x: 0.01 <= x <= 100.0),
        "Divides positive logits of tokens in prompt or output by this, and multiplies negative ones; 1 is off.",
        trtllm_names=("repetition_penalty", None),
    )
    presence_penalty: float = _parameter(
        0.0,
        _PENALTY,
        "Subtracted from the logits of tokens in the output, -2 to 2; 0 is off.",
        trtllm_names=("presence_penalty", "sampling_param_presence_penalty"),
    )
    frequency_penalty: float = _parameter(
        0.0,
        _PENALTY,
        "Subtracted for every time that a token is in the output, -2 to 2; 0 is off.",
        trtllm_names=("frequency_penalty", "sampling_param_frequency_penalty"),
    )
    logit_bias: tuple[tuple[int, float], ...] = _parameter(
        (),
        number_by_id(
            "biases from -100 to 100 by token id: an object, or a list of TOKEN=BIAS",
            lambda x: -100.0 <= x <= 100.0,
            max_num=MAX_LOGIT_BIASES,
        ),
        "TOKEN=BIAS adds a number from -100 to 100 to the logit of a token id.",
        kind=str,
    )
    bad_words: tuple[str, ...] = _parameter(
        (),
        _strings,
        "Never generate any of these strings, as the tokenizer writes them with or without a space before them.",
        trtllm_names=("bad_words", None),
    )
    min_tokens: int = _parameter(
        0,
        integer("an integer of 0 or more", 0),
        "Generate this many tokens before one that stops (end-of-sequence or stop_token_ids); stop strings still stop.",
        trtllm_names=("min_tokens", None),
    )
    seed: int | None = _parameter(
        None,
        optional_of(integer(f"an integer from 0 to {MAX_SEED}", 0, MAX_SEED)),
        "Fixes the random numbers; below 2^63, by default drawn for each request. K and the batch change roundings and "
        "so texts: practically none in float32 or bfloat16 on a CPU, many on a GPU, in FP8 and in FP4. Without a seed "
        "more drafts are accepted, and a text depends on them.",
        dtype="int64",
        off=0,
        trtllm_names=("seed", "sampling_param_seed"),
    )
    stop: tuple[str, ...] = _parameter(
        (), _strings, "Stop before any of these strings.", trtllm_names=("stop_words", "sampling_param_stop")
    )
    stop_token_ids: tuple[int, ...] = _parameter(
        (),
        tuple_of("a list of token ids", integer("a list of token ids, integers of 0 or more", 0)),
        "Stop after any of these tokens.",
    )
    ignore_eos: bool = _parameter(False, _FLAG, "Do not stop at the model's end-of-sequence tokens.")
    logprobs: bool = _parameter(False, _FLAG, "Return the log-probability of every output token.")
    top_logprobs: int = _parameter(
        0,
        integer(f"an integer from 0 (none) to {MAX_TOP_LOGPROBS}", 0, MAX_TOP_LOGPROBS),
        f"With logprobs: also return this many most likely tokens at every output token; at most {MAX_TOP_LOGPROBS}.",
    )
    prompt_logprobs: int | None = _parameter(
        None,
        optional_of(integer(f"None, or an integer from 0 to {MAX_TOP_LOGPROBS}", 0, MAX_TOP_LOGPROBS)),
        "Return the log-probability of every prompt token but the first, and this many most likely tokens at each "
        f"(0 to {MAX_TOP_LOGPROBS}). Such a prompt is computed without the prefix cache.",
    )
    n: int = _parameter(
        1,
        integer(f"an integer from 1 to {MAX_SAMPLES}", 1, MAX_SAMPLES),
        f"Number of samples of each prompt, at most {MAX_SAMPLES}; each has a seed of its own.",
    )
    json_schema: str | Mapping[str, Any] | None = _parameter(
        None,
        optional_of(_schema_text),
        "Generate JSON that is valid under this JSON schema, which is stored as text.",
        reads_file=True,
    )
    regex: str | None = _parameter(
        None,
        optional_of(text("a non-empty regular expression", min_len=1)),
        "Generate a text that this regular expression matches as a whole (Rust's syntax, without look-around).",
    )
    choice: tuple[str, ...] = _parameter(
        (), tuple_of("a list of strings", text("non-empty strings", min_len=1)), "Generate one of these texts."
    )
    grammar: str | None = _parameter(
        None,
        optional_of(text("a non-empty grammar", min_len=1)),
        "Generate a text of this context-free grammar (Lark's syntax, as llguidance reads it).",
        reads_file=True,
    )

    def __post_init__(self) -> None:
        readers = {row.name: row.read for row in SAMPLING_FIELDS}
        check_fields(self, readers, prefix="sampling ", heading="sampling parameters")
        raise_all(RequestError, "sampling parameters", list(sampling_problems(self)))

    @property
    def grammar_field(self) -> str | None:
        """The name of the field that says what the text must be."""
        return next(iter(given_grammars(self)), None)


def _table() -> tuple[SamplingField, ...]:
    hints = get_type_hints(SamplingParams)
    return tuple(
        SamplingField(
            **{
                "name": item.name,
                "kind": next(iter(get_args(hints[item.name])), hints[item.name]),  # int of `int | None`, str of a tuple
                "is_list": get_origin(hints[item.name]) is tuple,
                "default": item.default,
                **item.metadata,
            }
        )
        for item in fields(SamplingParams)
    )


SAMPLING_FIELDS: Final = _table()
_NAMES: Final = {row.name: row for row in SAMPLING_FIELDS}.keys()
# No parameter of a request: it follows from the seed.
_DRAFT_STREAM: Final = SamplingField(
    name="draft_stream",
    kind=int,
    is_list=False,
    default=0,
    read=integer("0 or 1", 0, 1),
    help="Random numbers of drafts: 0 are those that sample the target, 1 are others, and a draft is accepted by "
    "rejection sampling.",
    dtype="int32",
    off=0,
    idle=(),
    trtllm_names=None,
    reads_file=False,
)
STEP_SAMPLING_FIELDS: Final = (*(row for row in SAMPLING_FIELDS if row.dtype is not None), _DRAFT_STREAM)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSampling:
    """The parameters of one request that the device reads, by default all off. The seed is resolved.

    `draft_stream` is 1 for drafts with random numbers of their own: see `backends/torch/philox.py`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    draft_stream: int = 0

    @classmethod
    def of(cls, params: SamplingParams, *, seed: int, shares_noise: bool = True) -> Self:
        """The step's sampling. Filters that leave one token make the request greedy, its drafts included.

        `shares_noise`: drafts share the target's random numbers, so that a text depends on its seed alone.
        """
        values = {row.name: getattr(params, row.name) for row in SAMPLING_FIELDS if row.dtype is not None}
        values["seed"] = seed
        if params.top_k == 1 or params.min_p == 1.0:
            values["temperature"] = 0.0
        return cls(**values, draft_stream=int(not shares_noise and values["temperature"] > 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingColumns(Generic[T]):
    """The step inputs of sampling, [R] each, in the order of the table."""

    temperature: T
    top_k: T
    top_p: T
    min_p: T
    seed: T
    draft_stream: T


def sample_seed(seed: int, sample_index: int) -> int:
    """The seed of one of a prompt's samples.

    Sample 0 has `seed` itself, so it equals a request with n = 1. For others the first 63 bits of the SHA-256 of
    "SEED/INDEX", so that samples of neighbouring seeds are independent.
    """
    if sample_index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{sample_index}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


def sampling_problems(params: SamplingParams) -> Iterator[str]:
    """Problems of values that are right one by one."""
    yield from _size_problems(params)
    yield from _logprobs_problems(params)
    yield from _grammar_problems(params)


def _logprobs_problems(params: SamplingParams) -> list[str]:
    if not params.top_logprobs or params.logprobs:
        return []
    found, hint = f"{params.top_logprobs}", "Set logprobs as well."
    return [problem("sampling top_logprobs", expected="0 without logprobs", found=found, hint=hint)]


def _size_problems(params: SamplingParams) -> Iterator[str]:
    """Size limits: an engine thread scans all text for stop strings, a device all rules at every row."""
    for name, texts, max_num in (
        ("stop", params.stop, MAX_STOP_STRINGS),
        ("bad_words", params.bad_words, MAX_BAD_WORDS),
    ):
        longest = max(map(len, texts), default=0)
        yield from _too_many(name, len(texts), max_num, "strings")
        yield from _too_many(name, longest, MAX_STOP_LEN, "characters in a string")
    if params.min_tokens > params.max_new_tokens:
        yield problem(
            "sampling min_tokens",
            expected=f"at most max_new_tokens {params.max_new_tokens}",
            found=str(params.min_tokens),
            hint="Raise max_new_tokens, or lower min_tokens.",
        )


def _too_many(name: str, found: int, limit: int, what: str) -> Iterator[str]:
    if found > limit:
        yield problem(f"sampling {name}", expected=f"at most {limit} {what}", found=str(found))


def given_grammars(params: SamplingParams) -> list[str]:
    return [name for name in GRAMMAR_FIELDS if getattr(params, name)]


def _grammar_problems(params: SamplingParams) -> list[str]:
    given = given_grammars(params)
    if len(given) > 1:
        expected, hint = f"at most one of {', '.join(GRAMMAR_FIELDS)}", "Leave out all but one."
        return [problem("sampling", expected=expected, found=" and ".join(given), hint=hint)]
    sizes = {name: sum(map(len, getattr(params, name))) for name in given}
    return [
        problem(f"sampling {name}", expected=f"at most {MAX_GRAMMAR_LEN} characters", found=str(size))
        for name, size in sizes.items()
        if size > MAX_GRAMMAR_LEN
    ]
