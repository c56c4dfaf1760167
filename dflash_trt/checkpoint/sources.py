"""Checkpoints of a build configuration: local directories, or downloads from the Hugging Face hub.

A local directory wins over a repository of its name. The target's known drafter is the default for a repository.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dflash_trt.checkpoint.hub import HubCheckpoint, download_description, download_tensors
from dflash_trt.checkpoint.specs import read_specs
from dflash_trt.core.config import MTP, BuildConfig
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.known_pairs import HubName, HubSource, listed_pairs, pair_of_drafter, pairs_of_target

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class CheckpointSources:
    """`config` names the drafter that was chosen. `paths`, `hub` (only of downloads) are by role.

    The path of the drafter `mtp` is the target's.
    """

    config: BuildConfig
    paths: Mapping[str, Path]
    hub: Mapping[str, HubSource] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def find_checkpoints(
    config: BuildConfig, base_dir: Path, *, needs_tensors: bool, say: Say = lambda message: None
) -> CheckpointSources:
    """Find the checkpoints of `config` relative to `base_dir`, and download those given by hub name.

    Tensors are downloaded last, when the configs have shown that the two fit. `say` gets a message per download.

    Raises:
        ConfigError: there is no such repository or revision, or the two do not fit.
        CheckpointError: a repository cannot be read.
    """
    notes: list[str] = []
    config = _with_known_drafter(config, base_dir, notes)
    named = {"target": config.target, "drafter": None if config.drafter == MTP else config.drafter}
    roles = {role: name for role, name in named.items() if name is not None}
    names = {role: found for role, name in roles.items() if (found := hub_name(name, base_dir)) is not None}
    _check_known_pair(names, notes)
    downloads: dict[str, HubCheckpoint] = {}
    for role, repository in names.items():
        say(f"{role}: {repository} from the Hugging Face hub")
        downloads[role] = download_description(repository, role=role)
    paths = {role: downloads[role].path if role in downloads else base_dir / name for role, name in roles.items()}
    if config.drafter == MTP:
        paths["drafter"] = paths["target"]
    for role, name in roles.items():
        if role not in names and HubName.parse(name) is not None and paths[role].is_dir():
            notes.append(f"{role}: the directory {paths[role].resolve()}, not the repository of that name on the hub")
    if downloads and needs_tensors:
        read_specs(paths["target"], paths.get("drafter"), drafter_overrides=config.drafter_overrides)
        for role, repository in names.items():
            download_tensors(repository, downloads[role], role=role)
    return CheckpointSources(
        config=config, paths=paths, hub={role: found.source for role, found in downloads.items()}, notes=tuple(notes)
    )


def hub_name(name: str, base_dir: Path) -> HubName | None:
    """None for a local path."""
    return None if (base_dir / name).exists() else HubName.parse(name)


def _with_known_drafter(config: BuildConfig, base_dir: Path, notes: list[str]) -> BuildConfig:
    """Choose the drafter of a repository, unless the configuration names one, or says that there is none."""
    target = hub_name(config.target, base_dir)
    if "drafter" in config.model_fields_set or target is None:
        return config
    known = pairs_of_target(target.repository)
    usable = [pair for pair in known if pair.needs is None and pair.is_default]
    if len(usable) == 1:
        others = [pair.drafter for pair in known if pair.needs is None and not pair.is_default]
        also = f"; --drafter takes {', '.join(others)}, too" if others else ""
        notes.append(f"drafter: {usable[0].drafter}, the known one of {target.repository}{also}")
        return config.model_copy(update={"drafter": usable[0].drafter})
    found = "; ".join(f"{pair.drafter}, which needs {pair.needs}" for pair in known if pair.needs is not None)
    found = f"several: {', '.join(pair.drafter for pair in usable)}" if usable else found or "none"
    choices = "--drafter NAME, --drafter mtp for the checkpoint's own MTP head, or --drafter none for none"
    hint = f"Pass {choices}. Known pairs: {listed_pairs()}."
    expected = "one known drafter that this version reads"
    raise ConfigError.about(f"target {target.repository}", expected=expected, found=found, hint=hint)


def _check_known_pair(names: Mapping[str, HubName], notes: list[str]) -> None:
    """Compare what the table of known pairs says with two names on the hub."""
    if len(names) < 2:
        return
    target, drafter = names["target"].repository, names["drafter"].repository
    pair, others = pair_of_drafter(drafter), pairs_of_target(target)
    if pair is None or pair in others:
        return
    if others:
        hint = f"Pass --drafter {others[0].drafter}. Known pairs: {listed_pairs()}."
        raise ConfigError.about(f"drafter {drafter}", expected=f"target {pair.target}", found=target, hint=hint)
    notes.append(f"drafter: {drafter} is known for {' and '.join(pair.targets)}, not for {target}")
