"""The parameters of a deployed model: config.pbtxt's settings of engine and service, as typed values.

Written by the repository writer and read by the model, both through this one class.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self, get_type_hints

from dflash_trt.core.draft_lengths import lengths_text
from dflash_trt.core.errors import ConfigError, ErrorCollector, problem, raise_all
from dflash_trt.core.frozen import nearest_name
from dflash_trt.core.runtime_config import NODES, RuntimeConfig, reads_text, value_type, without_none

# Parameters that Triton's Python backend reads itself.
ENVIRONMENT_PARAMETER = "EXECUTION_ENV_PATH"
TRITON_PARAMETERS = (ENVIRONMENT_PARAMETER, "FORCE_CPU_ONLY_INPUT_TENSORS", "INFERENCE_TIMEOUT_SECONDS")

_TRUE, _FALSE = "true", "false"
_LEFT_OUT = {"device", *NODES}  # its group's; all ranks are on the server's machine
_RUNTIME_TYPES = {name: value_type(name) for name in RuntimeConfig.model_fields if name not in _LEFT_OUT}


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """`engine_dir` is absolute, or relative to the version directory of the model.

    In config.pbtxt the fields of `runtime` stand among the others, but for `device`, which the instance group says.
    """

    engine_dir: str
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    default_max_tokens: int = 128
    wraps_in_chat: bool = False
    system: str | None = None
    drain_timeout_s: float = 5.0  # for running requests when the server stops
    accepted_request_parameters: tuple[str, ...] = ()  # foreign ones, headers that the server forwards for example
    accepts_numpy_2: bool = False
    keeps_server: bool = False  # when the engine has failed for good
    gpu_device_ids: str | None = None  # for an engine of several ranks, per instance: "0,1;2,3"

    def __post_init__(self) -> None:
        limits = (("default_max_tokens", self.default_max_tokens, 1), ("drain_timeout_s", self.drain_timeout_s, 0))
        problems = [
            problem(name, expected=f"{min_value} or more", found=str(value))
            for name, value, min_value in limits
            if not value >= min_value
        ]
        if self.system is not None and not self.wraps_in_chat:
            problems.append(
                problem("system", expected="only with wraps_in_chat", found="it alone", hint="Deploy with --chat.")
            )
        try:
            _ = self.instance_gpus
        except ValueError:
            expected = "indices of GPUs such as 0,1;2,3, with a semicolon between two instances"
            problems.append(problem("gpu_device_ids", expected=expected, found=repr(self.gpu_device_ids)))
        raise_all(ConfigError, "model parameters", problems)

    @property
    def instance_gpus(self) -> tuple[tuple[int, ...], ...]:
        """The GPUs of each instance; empty where Triton gives them."""
        groups = self.gpu_device_ids.split(";") if self.gpu_device_ids is not None else []
        return tuple(tuple(map(int, group.split(","))) for group in groups)

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> Self:
        """Read the parameters of config.pbtxt, without Triton's own.

        Raises:
            ConfigError: unknown names and wrong values, all of them.
        """
        types = _RUNTIME_TYPES | {name: without_none(kind) for name, kind in get_type_hints(cls).items()}
        del types["runtime"]
        values: dict[str, Any] = {}
        problems = []
        for name, text in parameters.items():
            if name in TRITON_PARAMETERS:
                continue
            if name not in types:
                nearest = nearest_name(name, types)
                hint = f"Did you mean '{nearest}'?" if nearest else f"Known parameters: {', '.join(types)}."
                problems.append(problem(f"parameter '{name}'", expected="a known one", found="another", hint=hint))
                continue
            try:
                is_read_later = name in _RUNTIME_TYPES and reads_text(name)
                values[name] = text if is_read_later else _parsed(text, types[name])
            except ValueError as error:
                problems.append(problem(f"parameter '{name}'", expected=str(error), found=repr(text)))
        if "engine_dir" not in parameters:
            problems.append(
                problem("parameter 'engine_dir'", expected="the engine", found="none", hint="Deploy the model again.")
            )
        runtime_values = {name: values.pop(name) for name in _RUNTIME_TYPES if name in values}
        raise_all(ConfigError, "model parameters", problems)
        errors = ErrorCollector()
        runtime = errors.run(lambda: RuntimeConfig(**runtime_values))
        settings = errors.run(lambda: cls(**values, runtime=runtime or RuntimeConfig()))
        errors.raise_all("model parameters")
        assert settings is not None
        return settings

    def parameters(self) -> dict[str, str]:
        """Values other than the defaults, as `from_parameters` reads them."""
        own = {entry.name: (getattr(self, entry.name), entry.default) for entry in fields(self)}
        del own["runtime"]
        default = RuntimeConfig()
        runtime = {name: (getattr(self.runtime, name), getattr(default, name)) for name in _RUNTIME_TYPES}
        return {name: _text(value) for name, (value, default) in (own | runtime).items() if value != default}

    def engine_path(self, version_dir: Path) -> Path:
        return version_dir / self.engine_dir


def _parsed(text: str, expected: Any) -> Any:
    """Raises ValueError, with what was expected."""
    if expected is bool:
        if text not in (_TRUE, _FALSE):
            raise ValueError("true or false")
        return text == _TRUE
    if expected in (int, float):
        try:
            return expected(text)
        except ValueError:
            raise ValueError("an integer" if expected is int else "a number") from None
    if expected is str:
        return text
    names = json.loads(text) if text.startswith("[") else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("a JSON list of strings")
    return tuple(names)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return _TRUE if value else _FALSE
    if isinstance(value, dict):
        return lengths_text(value)
    return json.dumps(list(value)) if isinstance(value, tuple) else str(value)
