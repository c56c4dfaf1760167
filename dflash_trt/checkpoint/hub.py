"""Checkpoints of the Hugging Face hub, through huggingface_hub: its cache, token and offline mode.

Downloads only the files that this package reads. huggingface_hub is imported when something is downloaded.
"""

import glob
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.checkpoint.drafter_card import CARD_NAME
from dflash_trt.checkpoint.pair import CONFIG_FILES
from dflash_trt.checkpoint.producers.base import description_files
from dflash_trt.checkpoint.tensors import INDEX_FILE, tensor_file_names
from dflash_trt.checkpoint.vocabulary import TOKENIZER_FILES
from dflash_trt.core.errors import CheckpointError, ConfigError, DFlashError
from dflash_trt.core.known_pairs import HubName, HubSource, listed_pairs


@dataclass(frozen=True, kw_only=True)
class HubCheckpoint:
    """A snapshot in the hub's cache."""

    path: Path
    source: HubSource


def download_description(name: HubName, *, role: str) -> HubCheckpoint:
    """Configs, tokenizer, card and index: everything but the tensors.

    Raises:
        ConfigError: there is no such repository or revision.
        CheckpointError: it cannot be read: no access, no connection and not in the cache, or no config.json in it.
    """
    files = (*CONFIG_FILES, *description_files(), *TOKENIZER_FILES, INDEX_FILE, CARD_NAME)
    path = _download(name, files, role=role)
    if not (path / "config.json").is_file():
        found, hint = f"none {_where()}", "Name a repository in the format of transformers."
        raise CheckpointError.about(f"{role} {name}", expected="a config.json", found=found, hint=hint)
    return HubCheckpoint(path=path, source=HubSource(name=str(name), commit=path.name))


def download_tensors(name: HubName, described: HubCheckpoint, *, role: str) -> None:
    """Complete what `download_description` gave, at the same commit.

    Raises:
        CheckpointError: see there; or files are missing.
    """
    files = tensor_file_names(described.path)
    pinned = HubName(repository=name.repository, revision=described.source.commit)

    def missing() -> list[str]:
        return [file for file in files if not (described.path / file).is_file()]

    if missing():
        _download(pinned, files, role=role, missing=missing)
    if missing():
        expected, found, hint = f"{', '.join(missing())}", f"none {_where()}", "Name a checkpoint in safetensors files."
        raise CheckpointError.about(f"{role} {name}", expected=expected, found=found, hint=hint)


def _download(name: HubName, files: Sequence[str], *, role: str, missing: Callable[[], list[str]] = list) -> Path:
    """`missing` files are named where the hub cannot be asked for them."""
    from huggingface_hub import snapshot_download

    patterns = [glob.escape(file) for file in files]
    try:
        path = snapshot_download(name.repository, revision=name.revision, allow_patterns=patterns)
    except Exception as error:  # httpx or requests raise their own, by the version of huggingface_hub
        raise _error(name, role, error, missing()) from error
    return Path(path)


def _error(name: HubName, role: str, error: Exception, missing: Sequence[str]) -> DFlashError:
    from huggingface_hub import errors, get_token

    subject, page = f"{role} {name}", f"https://huggingface.co/{name.repository}"
    has_token = get_token() is not None
    if isinstance(error, errors.GatedRepoError):
        found = "a gated repository, and " + ("a token without access" if has_token else "no token")
        hint = f"Ask for access at {page}, and log in with `hf auth login` or HF_TOKEN."
        return CheckpointError.about(subject, expected="access", found=found, hint=hint)
    is_unauthorized = getattr(getattr(error, "response", None), "status_code", None) == 401
    if is_unauthorized or isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        expected = "a local directory, or a repository of the Hugging Face hub"
        found = "neither" if has_token else "neither (private repositories need a token)"
        hint = f"Check the name. Known pairs: {listed_pairs()}."
        return ConfigError.about(subject, expected=expected, found=found, hint=hint)
    if isinstance(error, errors.RevisionNotFoundError):
        expected, found = f"a branch, tag or commit of {name.repository}", f"none named {name.revision}"
        return ConfigError.about(subject, expected=expected, found=found, hint=f"{page}/commits/main lists commits.")
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        why_not = "HF_HUB_OFFLINE is set" if _is_offline() else "the hub was not reached"
        found = f"{', '.join(missing) or 'no files of this revision'} {'not there' if missing else 'there'}; {why_not}"
        hint = "Unset HF_HUB_OFFLINE" if _is_offline() else "Check the connection and HF_ENDPOINT"
        expected, hint = f"files in the cache {_cache()}", f"{hint}, or pass a local directory."
        return CheckpointError.about(subject, expected=expected, found=found, hint=hint)
    found, hint = f"{type(error).__name__}: {error}", "Check the connection and run again; finished files are kept."
    return CheckpointError.about(subject, expected="a download", found=found, hint=hint)


def _where() -> str:
    return f"in {_cache()}, and HF_HUB_OFFLINE is set" if _is_offline() else "there"


def _cache() -> str:
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
