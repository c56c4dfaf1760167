"""The table of sampling parameters.

Checks, step inputs, command-line options, fields of input rows and inputs of servers are generated from
`SAMPLING_FIELDS`. A new parameter is a field here (also in StepSampling and SamplingColumns if the device reads it) and
code in the samplers of the backends.
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
# Tokens are practically equally likely here; far beyond, probabilities round to one float32 and top_k sees ties.
MAX_TEMPERATURE: Final = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingField:
    """One parameter. `read` checks and converts a caller's value; its ValueError says what was expected.

    `dtype` is that of its step input, one value per request, and `off` the value that disables it; both are None for
    parameters that only the host reads. `idle` are all values at which a filter does nothing. `trtllm_names` are those
    of the Triton models of TensorRT-LLM: tensorrt_llm_bls, then llmapi.
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
    trtllm_names: tuple[str, str] | None = None,
) -> Any:
    """Declare a field of SamplingParams with its row of the table."""
    row = {"read": read, "help": help, "dtype": dtype, "off": off, "idle": idle, "trtllm_names": trtllm_names}
    return field(default=default, metadata=row)


def _clamped(read: Reader[Any], clamp: Callable[[Any], Any]) -> Reader[Any]:
    """Clamp values to the range of the device's dtype, without loss of meaning."""
    return lambda value: clamp(read(value))


_FLAG: Final = instance("true or false", bool)
_STRINGS: Final = tuple_of("a string or a list of strings", text("non-empty strings", min_len=1))


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 and `min_p` 0 switch their filter off.

    Filters apply in the order temperature, top_k, top_p, min_p, to the target's distribution of every row. A `seed`
    fixes the random numbers of every position; without one the engine draws a seed for each request. K, the batch and
    prompt chunks change how sums are rounded, never the distribution. In float32 on a CPU greedy texts are equal, and
    sampled ones practically always; in bfloat16, FP8 and FP4 near-ties, and so changed texts, are common.
    `stop` takes at most MAX_STOP_STRINGS strings of at most MAX_STOP_LEN characters.

    Values are clamped to the device's float32 and int32: a temperature below 1.2e-38 becomes 0, a top_p below it
    1.2e-38 (the most likely token alone), a top_k of 2**31 or more 2**31 - 1. Numbers of numpy, lists, and a single
    string for `stop` are accepted.

    Raises:
        RequestError: lists every value of a wrong type or out of range.
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
    seed: int | None = _parameter(
        None,
        optional_of(integer(f"an integer from 0 to {MAX_SEED}", 0, MAX_SEED)),
        "Fixes the random numbers; below 2^63, by default drawn for each request. K and the batch change roundings and "
        "so texts: practically none in float32 on a CPU, many in bfloat16, FP8 and FP4.",
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
    ignore_eos: bool = _parameter(False, _FLAG, "Do not stop at the model's end-of-sequence tokens.")
    logprobs: bool = _parameter(False, _FLAG, "Return the log-probability of every output token.")

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
    """The parameters of one request that the device reads, by default all off. The seed is resolved."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    @classmethod
    def of(cls, params: SamplingParams, *, seed: int) -> Self:
        """Filters that leave one token make the request greedy: they do not reach drafts, which become greedy too."""
        values = {row.name: getattr(params, row.name) for row in STEP_SAMPLING_FIELDS} | {"seed": seed}
        if params.top_k == 1 or params.min_p == 1.0:
            values["temperature"] = 0.0
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingColumns(Generic[T]):
    """The step inputs of sampling, [R] each, in the order of the table."""

    temperature: T
    top_k: T
    top_p: T
    min_p: T
    seed: T


def _stop_problems(stop: tuple[str, ...]) -> list[str]:
    """Check their number and length, which are bounded because the engine's thread scans all text for them."""
    longest = max(map(len, stop), default=0)
    facts = ((len(stop), MAX_STOP_STRINGS, "stop strings"), (longest, MAX_STOP_LEN, "characters in a stop string"))
    return [
        problem("sampling stop", expected=f"at most {limit} {what}", found=str(number))
        for number, limit, what in facts
        if number > limit
    ]
