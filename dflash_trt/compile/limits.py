"""The limits of an engine: what the user asked for, within what the checkpoints allow."""

from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import ConfigError, problem, raise_all
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.engine_dir import EngineLimits


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
