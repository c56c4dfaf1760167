"""The table of sampling parameters: everything that is made of one follows from its field in `SamplingParams`.

Checks, step inputs, command-line options, fields of input rows and inputs of servers are generated from
`SAMPLING_FIELDS`. A new parameter is a field here (also in StepSampling and SamplingColumns where the device reads it)
and what the samplers of the back ends do with it.
"""

from collections.abc import Callable
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
    text,
    tuple_of,
)
from dflash_trt.core.checked_values import optional as optional_of
from dflash_trt.core.dtype import DType
from dflash_trt.core.errors import RequestError, problem, raise_all

T = TypeVar("T")

MAX_SEED: Final = 2**63 - 1
MAX_STOP_STRINGS: Final = 64
MAX_STOP_LEN: Final = 256  # characters of one stop string
# At this one the tokens are as good as equally likely; far beyond, probabilities are one float32 and top_k sees ties.
MAX_TEMPERATURE: Final = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingField:
    """One parameter. `read` makes a caller's value plain, or raises ValueError with what was expected.

    `dtype` is that of its step input, one value per request, and `off` the value that asks for nothing; both are None
    for what the host alone reads. A filter is also idle at the other values of `idle`. `trtllm_names` are those in
    the Triton models of TensorRT-LLM: tensorrt_llm_bls, then llmapi.
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
    trtllm_names: tuple[str, str] | None

    def is_filter(self, value: float) -> bool:
        """Whether `value` takes tokens out of a distribution and leaves a choice."""
        return bool(self.idle) and value not in self.idle


def _parameter(
    default: Any,
    read: Reader[Any],
    help: str,
    *,
    dtype: DType | None = None,
    off: float | None = None,
    idle: tuple[float, ...] = (),
    trtllm_names: tuple[str, str] | None = None,
) -> Any:
    """A field of SamplingParams with its row of the table."""
    row = {"read": read, "help": help, "dtype": dtype, "off": off, "idle": idle, "trtllm_names": trtllm_names}
    return field(default=default, metadata=row)


def _clamped(read: Reader[Any], clamp: Callable[[Any], Any]) -> Reader[Any]:
    """To what the device can hold, without loss of meaning."""
    return lambda value: clamp(read(value))


_FLAG: Final = instance("true or false", bool)
_STRINGS: Final = tuple_of("a string or a list of strings", text("non-empty strings", min_len=1))


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 and `min_p` 0 switch their filter off.

    Filters apply in the order temperature, top_k, top_p, min_p, on the target's distribution of every row. A `seed`
    fixes the random numbers of every position; without one the engine draws a seed for each request. K, batch
    mates and prompt chunks change how the sums of a step are rounded, never the distribution: in float32 on a CPU by so
    little that greedy texts are equal and a sampled one changes only at a draw within a rounding of two tokens' border;
    in bfloat16, FP8 and FP4 near-ties are common, and so are changed texts.
    `stop` takes at most MAX_STOP_STRINGS strings of at most MAX_STOP_LEN characters.

    Values are kept as the device will hold them, float32 and int32: a temperature below 1.2e-38 becomes 0 and a top_p
    below it 1.2e-38 (the most likely token alone), a top_k from 2**31 on becomes 2**31 - 1. Numbers of numpy are
    accepted, and so are a single string for `stop`, and lists.

    Raises:
        RequestError: values of a wrong type or out of range, all of them.
    """

    max_new_tokens: int = _parameter(
        128,
        integer("an integer of 1 or more", 1),
        "New tokens at most.",
        trtllm_names=("max_tokens", "sampling_param_max_tokens"),
    )
    temperature: float = _parameter(
        0.0,
        _clamped(
            number(f"0 (greedy) to {MAX_TEMPERATURE}", lambda x: 0.0 <= x <= MAX_TEMPERATURE),
            lambda x: x if x >= FLOAT32_TINY else 0.0,
        ),
        f"0 is greedy, and so is anything below 1.2e-38; at most {MAX_TEMPERATURE}.",
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
        idle=(0, 1),  # of one token there is nothing to choose
        trtllm_names=("top_k", "sampling_param_top_k"),
    )
    top_p: float = _parameter(
        1.0,
        _clamped(number("a number in (0, 1]", lambda x: 0.0 < x <= 1.0), lambda x: max(x, FLOAT32_TINY)),
        "Keep the likeliest tokens up to this sum of probabilities; 1 is off.",
        dtype="float32",
        off=1.0,
        idle=(1.0,),
        trtllm_names=("top_p", "sampling_param_top_p"),
    )
    min_p: float = _parameter(
        0.0,
        number("a number in [0, 1]", lambda x: 0.0 <= x <= 1.0),
        "Keep tokens at least this likely, relative to the likeliest; 0 is off.",
        dtype="float32",
        off=0.0,
        idle=(0.0,),
    )
    seed: int | None = _parameter(
        None,
        optional_of(integer(f"an integer from 0 to {MAX_SEED}", 0, MAX_SEED)),
        "Below 2^63; drawn for each request where unset. Fixes the random numbers. K and batch mates change roundings: "
        "practically no text in float32 on a CPU, many in bfloat16, FP8 and FP4.",
        dtype="int64",
        off=0,
        trtllm_names=("seed", "sampling_param_seed"),
    )
    stop: tuple[str, ...] = _parameter(
        (),
        lambda value: _STRINGS([value] if isinstance(value, str) else value),
        "Stop before any of these strings.",
        trtllm_names=("stop_words", "sampling_param_stop"),
    )
    stop_token_ids: tuple[int, ...] = _parameter(
        (),
        tuple_of("a list of token ids", integer("a list of token ids, integers of 0 or more", 0)),
        "Stop after any of these tokens.",
    )
    ignore_eos: bool = _parameter(False, _FLAG, "Go on after the model's end-of-sequence ids.")
    logprobs: bool = _parameter(False, _FLAG, "Give the log-probability of every token of the output.")

    def __post_init__(self) -> None:
        readers = {row.name: row.read for row in SAMPLING_FIELDS}
        check_fields(self, readers, prefix="sampling ", heading="sampling parameters")
        raise_all(RequestError, "sampling parameters", _stop_problems(self.stop))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _table() -> tuple[SamplingField, ...]:
    hints = get_type_hints(SamplingParams)
    return tuple(
        SamplingField(
            name=item.name,
            kind=next(iter(get_args(hints[item.name])), hints[item.name]),  # int of `int | None`, str of a tuple
            is_list=get_origin(hints[item.name]) is tuple,
            default=item.default,
            **item.metadata,
        )
        for item in fields(SamplingParams)
    )


SAMPLING_FIELDS: Final = _table()
STEP_SAMPLING_FIELDS: Final = tuple(row for row in SAMPLING_FIELDS if row.dtype is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSampling:
    """What the device reads of one request's parameters, by default all off. The seed is resolved."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    @classmethod
    def of(cls, params: SamplingParams, *, seed: int) -> Self:
        return cls(**{row.name: getattr(params, row.name) for row in STEP_SAMPLING_FIELDS} | {"seed": seed})


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingColumns(Generic[T]):
    """The step inputs of sampling, [R] each, in the order of the table."""

    temperature: T
    top_k: T
    top_p: T
    min_p: T
    seed: T


def _stop_problems(stop: tuple[str, ...]) -> list[str]:
    """Their number and length are bounded, for the engine's thread reads all text through them."""
    longest = max(map(len, stop), default=0)
    facts = ((len(stop), MAX_STOP_STRINGS, "stop strings"), (longest, MAX_STOP_LEN, "characters in a stop string"))
    return [
        problem("sampling stop", expected=f"at most {most} {what}", found=str(number), hint="Pass fewer.")
        for number, most, what in facts
        if number > most
    ]
