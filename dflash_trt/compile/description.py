"""The engine of a build configuration, before any tensor is read: models, formats, ranks and limits.

Limits are what the user asked for, within what the checkpoints allow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dflash_trt.checkpoint.sharding import mapping_problems
from dflash_trt.checkpoint.specs import PairSpecs
from dflash_trt.compile.quantized import plan_quantization
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import BuildError, ConfigError, ErrorCollector, problem, raise_all
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


def resolve_limits(config: BuildConfig, target: TargetSpec, draft: DraftSpec | None) -> tuple[EngineLimits, list[str]]:
    """Fill in what the config leaves open; the notes say where that took less than the target offers.

    Raises:
        ConfigError: a limit beyond what the checkpoints were trained for.
    """
    positions = {"target": target.max_position_embeddings}
    if draft is not None:
        positions["drafter"] = draft.max_position_embeddings
    owner, most_positions = min(positions.items(), key=lambda item: item[1])
    trained_drafts = draft.max_draft_len if draft else 0
    raise_all(ConfigError, "build limits", _problems(config, owner, most_positions, trained_drafts))
    notes = []
    if config.max_seq_len is None and most_positions < target.max_position_embeddings:
        notes.append(
            f"max_seq_len is {most_positions}, the drafter's max_position_embeddings; "
            f"the target alone allows {target.max_position_embeddings}"
        )
    max_seq_len = config.max_seq_len if config.max_seq_len is not None else most_positions
    max_draft_len = config.max_draft_len if config.max_draft_len is not None else trained_drafts
    if config.max_num_tokens < config.max_batch_size * (max_draft_len + 1):
        notes.append(
            f"max_num_tokens {config.max_num_tokens} is less than max_batch_size {config.max_batch_size} * "
            f"(max_draft_len {max_draft_len} + 1): a full batch verifies fewer drafts per request"
        )
    limits = EngineLimits(
        max_batch_size=config.max_batch_size,
        max_seq_len=max_seq_len,
        max_num_tokens=config.max_num_tokens,
        max_draft_len=max_draft_len,
        page_size=config.page_size,
    )
    return limits, notes


def _problems(config: BuildConfig, owner: str, most_positions: int, trained_drafts: int) -> list[str]:
    problems = []
    if config.max_seq_len is not None and config.max_seq_len > most_positions:
        problems.append(
            problem(
                "max_seq_len",
                expected=f"at most {most_positions} (the {owner}'s max_position_embeddings)",
                found=str(config.max_seq_len),
                hint="Lower it, or leave it out to take the most.",
            )
        )
    if config.max_draft_len is not None and config.max_draft_len > trained_drafts:
        reason = "the drafter's block size - 1" if config.drafter else "there is no drafter"
        problems.append(
            problem(
                "max_draft_len",
                expected=f"at most {trained_drafts} ({reason})",
                found=str(config.max_draft_len),
                hint="Lower it, or leave it out to take the most.",
            )
        )
    return problems
