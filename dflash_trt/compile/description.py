"""The engine of a build configuration, before any tensor is read: models, formats, ranks and limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dflash_trt.checkpoint.sharding import mapping_problems
from dflash_trt.checkpoint.specs import PairSpecs
from dflash_trt.compile.limits import resolve_limits
from dflash_trt.compile.quantized import plan_quantization
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import BuildError, ConfigError, ErrorCollector, raise_all
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.engine_dir import EngineLimits, PretrainedConfig

Unsupported = Callable[[TargetSpec, DraftSpec | None, QuantizationSpec | None, Mapping], list[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineDescription:
    """Fields of the engine directory that a build would write; K/V scales are 1. `notes` are about limits."""

    pretrained_config: PretrainedConfig
    build_config: EngineLimits
    notes: tuple[str, ...]


def describe_engine(
    config: BuildConfig, pair: PairSpecs, *, unsupported: Unsupported, subject: str, capability: tuple[int, int] | None
) -> EngineDescription:
    """Check everything that `config` says about a pair, and raise all problems in one error.

    `unsupported` lists what the back end, `subject` in the error, cannot run. `capability` is the GPU's, if known.

    Raises:
        ConfigError: a limit, a format or the number of ranks is wrong.
        BuildError: the back end cannot run it.
    """
    errors = ErrorCollector()
    mapping = config.mapping
    errors.run(lambda: raise_all(ConfigError, "tensor parallelism", mapping_problems(pair.target, pair.draft, mapping)))
    resolved = errors.run(lambda: resolve_limits(config, pair.target, pair.draft))
    plan = errors.run(lambda: plan_quantization(config, pair, capability=capability))
    quantization = None if plan is None else plan.spec()
    problems = unsupported(pair.target, pair.draft, quantization, mapping)
    errors.run(lambda: raise_all(BuildError, subject, problems))
    errors.raise_all("check")
    assert resolved is not None and quantization is not None
    limits, notes = resolved
    pretrained = PretrainedConfig(
        target=pair.target,
        draft=pair.draft,
        dtype=config.dtype,
        mapping=mapping,
        quantization=None if quantization.is_empty else quantization,
    )
    return EngineDescription(pretrained_config=pretrained, build_config=limits, notes=tuple(notes))
