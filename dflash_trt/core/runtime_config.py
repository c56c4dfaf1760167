"""Settings of a running engine: one table for LLM keywords, command options and server settings.

Values that depend on the engine (its max_draft_len, its device) are resolved when it is opened.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import (
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from dflash_trt.core.draft_lengths import draft_lengths, lengths_text
from dflash_trt.core.errors import ConfigError, problem, raise_all
from dflash_trt.core.frozen import MAX_INT32, Frozen
from dflash_trt.core.other_engines import hint_for

Device = Literal["auto", "cpu", "cuda"]

_BYTE_SIZE = TypeAdapter(ByteSize)


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A field's command-line option; `flag` defaults to --its-name.

    A boolean's flag negates its default;
    without one there are two, --flag and --no-flag.
    """

    help: str
    flag: str | None = None
    metavar: str | None = None


class SettingError(ConfigError):
    """A value that this engine or machine cannot have.

    `name` is the argument or the field of RuntimeConfig.
    """

    def __init__(self, name: str, *, expected: str, found: str, hint: str = "") -> None:
        self.name = name
        self._problem = partial(problem, expected=expected, found=found, hint=hint)
        super().__init__(self.message(name))

    def message(self, subject: str) -> str:
        """The error for a user who knows the setting as `subject`."""
        return self._problem(subject)


def _absolute_path(value: object) -> object:
    """A path that means the same to every process; raises ValueError, with what was expected."""
    if value == "":
        raise ValueError("a path")
    return str(Path(value).absolute()) if isinstance(value, str | PathLike) else value


def byte_size(value: object) -> object:
    """Bytes of a text with a unit: GB is 1000**3, GiB 1024**3; raises ValueError, with what was expected."""
    if not isinstance(value, str):
        return value
    try:
        return int(_BYTE_SIZE.validate_python(value))
    except ValidationError:
        raise ValueError("a number of bytes, such as 8000000000, 8GB or 7.5GiB") from None


class RuntimeConfig(Frozen):
    """Settings with which an engine is opened. None leaves a choice to the engine.

    Raises:
        ConfigError: lists every unknown name, value out of range and pair of mutually exclusive settings.
    """

    model_config = ConfigDict(strict=True)

    device: Annotated[
        Device, Option(help="Device of an engine of backend torch; auto takes the GPU if there is one.")
    ] = "auto"
    use_drafter: Annotated[bool, Option(flag="--no-drafter", help="Decode autoregressively, without the drafter.")] = (
        True
    )
    draft_length: Annotated[
        dict[int, int] | None,
        BeforeValidator(draft_lengths),
        Option(
            metavar="K|N:K,...",
            help="K, the drafts per request and step; by the number of decoding requests as in 1:7,16:5, 5 from 16 on; "
            "the maximum with --adaptive (default: what usually pays: for one request max_draft_len, on a CPU at most "
            "5, and fewer the more there are).",
        ),
    ] = None
    adaptive_draft_length: Annotated[
        bool, Option(flag="--adaptive", help="Choose K for each step, from measured speed and acceptance.")
    ] = False
    ngram: Annotated[
        bool,
        Option(
            flag="--ngram",
            help="Take drafts from a request's own text where its last tokens match earlier ones; without --overlap.",
        ),
    ] = False
    draft_window: Annotated[
        int | None,
        Field(ge=1, le=MAX_INT32),
        Option(
            metavar="N",
            help="Tokens of context that the drafter sees at most, and keeps pages of (default: the engine's).",
        ),
    ] = None
    enable_prefix_caching: Annotated[bool, Option(flag="--no-prefix-caching", help="Compute every prompt in full.")] = (
        True
    )
    num_state_snapshots: Annotated[
        int | None,
        Field(ge=0, le=MAX_INT32),
        Option(
            help="Snapshots of recurrent state for prefix caching, inside the K/V memory "
            "(default: as many as max_batch_size, in at most a quarter of it)."
        ),
    ] = None
    overlap_scheduling: Annotated[
        bool | None,
        Option(
            flag="--overlap",
            help="Submit each step before the results of the running one are read (default: on a GPU).",
        ),
    ] = None
    deterministic: Annotated[
        bool,
        Option(flag="--deterministic", help="Make a text depend on its request alone, bit for bit, in every dtype."),
    ] = False
    kv_cache_bytes: Annotated[
        int | None,
        Field(ge=1),
        BeforeValidator(byte_size),
        Option(metavar="SIZE", help="Memory for the K/V pages of target and drafter, per rank: bytes, 8GB or 7.5GiB."),
    ] = None
    kv_cache_free_memory_fraction: Annotated[
        float | None,
        Field(gt=0, le=1),
        Option(
            help="Memory for the K/V pages as a fraction of free memory (default: 0.5 on a CPU, 0.8 on a GPU, 0.9 with "
            "TensorRT)."
        ),
    ] = None
    host_cache_bytes: Annotated[
        int | None,
        Field(ge=1),
        BeforeValidator(byte_size),
        Option(
            metavar="SIZE",
            help="Host memory for cached prefixes that leave the K/V pages, per rank, page-locked on a GPU "
            "(default: none, they are computed again).",
        ),
    ] = None
    disk_cache_dir: Annotated[
        str | None,
        BeforeValidator(_absolute_path),
        Option(
            metavar="DIR",
            help="Directory for cached prefixes that leave the device or are shared, for later and for other processes "
            "with this engine (with --host-cache-bytes).",
        ),
    ] = None
    disk_cache_bytes: Annotated[
        int | None,
        Field(ge=1),
        BeforeValidator(byte_size),
        Option(metavar="SIZE", help="Maximum of that directory's files (default: half of what is free)."),
    ] = None
    publish_prompts: Annotated[
        bool,
        Option(
            flag="--publish-prompts",
            help="Write all blocks of a prompt to --disk-cache-dir once computed, for processes that wait for it.",
        ),
    ] = False
    num_threads: Annotated[
        int | None,
        Field(ge=1, le=MAX_INT32),
        Option(help="PyTorch's CPU threads per rank (default: the cores, divided among the ranks)."),
    ] = None
    nnodes: Annotated[
        int,
        Field(ge=1, le=MAX_INT32),
        Option(help="Machines that the ranks are on, an equal number each; the others run `dflash-trt ranks`."),
    ] = 1
    master_addr: Annotated[
        str | None,
        Option(metavar="HOST", help="Address of this machine for the others, which node 0 listens on (with --nnodes)."),
    ] = None
    master_port: Annotated[
        int, Field(ge=1, le=65535), Option(help="Port of --master-addr; connections of ranks have ports of their own.")
    ] = 29500
    plugin_library: Annotated[
        str | None,
        BeforeValidator(_absolute_path),
        Option(metavar="PATH", help="TensorRT plugin library to load instead of the engine's own."),
    ] = None
    max_queue_len: Annotated[
        int | None,
        Field(ge=1, le=MAX_INT32),
        Option(help="Maximum of waiting requests; more are refused (default: unlimited)."),
    ] = None
    seed: Annotated[
        int | None,
        Field(ge=0),
        Option(help="Makes the seeds of requests without one reproducible, in order of arrival."),
    ] = None

    @model_validator(mode="wrap")
    @classmethod
    def _collect_problems(cls, fields: Any, read: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """The validation context, if any, maps field names to the flags that the user typed."""
        written_as: Mapping[str, str] = info.context or {}
        problems: list[str] = []
        try:
            config = read({name: _plain(value) for name, value in dict(fields).items()})
            problems += config._conflicting_values(written_as)
        except ValidationError as error:
            problems = [_problem_of(details, written_as) for details in error.errors()]
        problems += _conflicts(dict(fields), written_as)
        raise_all(ConfigError, "options" if written_as else "settings", problems)
        return config

    @property
    def max_draft_tokens(self) -> int:
        """The maximum K of a resolved config."""
        return max((self.draft_length or {1: 0}).values())

    def _conflicting_values(self, written_as: Mapping[str, str]) -> Iterator[str]:
        if self.adaptive_draft_length and len(self.draft_length or {}) > 1:
            adaptive, length = (written_as.get(name, name) for name in ("adaptive_draft_length", "draft_length"))
            yield problem(
                length, expected=f"one K with {adaptive}, its maximum", found=lengths_text(self.draft_length or {})
            )
        if self.ngram and self.overlap_scheduling:
            ngram, overlap = (written_as.get(name, name) for name in ("ngram", "overlap_scheduling"))
            yield f"{ngram} and {overlap} are mutually exclusive."
        if self.ngram and self.draft_length is not None and not self.max_draft_tokens:
            ngram, length = (written_as.get(name, name) for name in ("ngram", "draft_length"))
            yield problem(length, expected=f"a K of 1 or more with {ngram}, whose drafts count", found="0")

    def without_drafter(self) -> "RuntimeConfig":
        """A copy that decodes autoregressively, without the settings that exclude it."""
        excluded = {name for pair in _EXCLUSIVE if "use_drafter" in pair for name in pair}
        fields = {name: type(self).model_fields[name].default for name in excluded}
        return self.replaced(**fields | {"use_drafter": False})

    def replaced(self, **fields: Any) -> "RuntimeConfig":
        """A copy with these fields instead; raises ConfigError."""
        return RuntimeConfig(**(dict(self) | fields)) if fields else self


KV_BUDGET = ("kv_cache_bytes", "kv_cache_free_memory_fraction")
PREFIX_TIERS = ("host_cache_bytes", "disk_cache_dir", "disk_cache_bytes", "publish_prompts")
NODES = ("nnodes", "master_addr", "master_port")
_EXCLUSIVE = (  # at most one of a pair may differ from its default
    KV_BUDGET,
    ("enable_prefix_caching", "num_state_snapshots"),
    ("enable_prefix_caching", "host_cache_bytes"),
    ("enable_prefix_caching", "disk_cache_dir"),
    ("use_drafter", "adaptive_draft_length"),
    ("use_drafter", "ngram"),
    ("use_drafter", "draft_length"),
    ("use_drafter", "draft_window"),
)


def option_of(name: str) -> Option:
    return next(item for item in RuntimeConfig.model_fields[name].metadata if isinstance(item, Option))


def value_type(name: str) -> Any:
    """The type of a field's values: bool, int, float, dict[int, int] or a Literal."""
    return without_none(RuntimeConfig.model_fields[name].annotation)


def reads_text(name: str) -> bool:
    """True if a field also reads its value from text, in a form of its own."""
    metadata = RuntimeConfig.model_fields[name].metadata
    return value_type(name) is str or any(isinstance(item, BeforeValidator) for item in metadata)


def without_none(annotation: Any) -> Any:
    """X, given X | None."""
    if isinstance(annotation, UnionType):
        (annotation,) = (kind for kind in get_args(annotation) if kind is not NoneType)
    return annotation


def bound(name: str, kind: Literal["ge", "gt", "le"]) -> float | None:
    """A bound of a field's values."""
    limits = (getattr(item, kind, None) for item in RuntimeConfig.model_fields[name].metadata)
    return next((limit for limit in limits if limit is not None), None)


def _plain(value: object) -> object:
    """Convert numbers of numpy to Python's."""
    if isinstance(value, bool | int | float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _expected(name: str) -> str:
    kind = value_type(name)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if kind is bool:
        return "True or False"
    if kind is str:
        return "a host name or an address" if name == "master_addr" else "a path"
    if kind is float:
        return f"a number in ({bound(name, 'gt'):g}, {bound(name, 'le'):g}]"
    return f"an integer of {bound(name, 'ge')} or more"


def _problem_of(details: Any, written_as: Mapping[str, str]) -> str:
    name = str(details["loc"][0])
    if details["type"] == "extra_forbidden":
        return f"'{name}' is not a setting of the engine. {hint_for(name, RuntimeConfig.model_fields)}"
    found = f"{details['input']!r:.80}"
    is_explained = details["type"] == "value_error"  # by the field's own reader
    expected = details["msg"].removeprefix("Value error, ") if is_explained else _expected(name)
    return problem(written_as.get(name, name), expected=expected, found=found)


def _conflicts(fields: Mapping[str, Any], written_as: Mapping[str, str]) -> Iterator[str]:
    defaults = RuntimeConfig.model_fields
    for names in _EXCLUSIVE:
        if all(name in fields and fields[name] != defaults[name].default for name in names):
            first, second = (written_as.get(name, f"{name}=False" if fields[name] is False else name) for name in names)
            yield f"{first} and {second} are mutually exclusive."
