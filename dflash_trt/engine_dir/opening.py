"""Opens an engine directory: checks version, files, sizes, hashes and tensor headers before loading."""

import hashlib
import json
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from dflash_trt.core.errors import EngineDirError, problem, raise_all
from dflash_trt.core.json_object import parse_json_object, read_json_object
from dflash_trt.core.kernel_archive import KernelArchive, kernels_architecture, kernels_name
from dflash_trt.core.known_pairs import HubName, build_command
from dflash_trt.engine_dir.manifest import (
    ENGINE_VERSION,
    MANIFEST_NAME,
    TOKENIZER_DIR,
    EngineManifest,
    StepTables,
    file_problems,
    tensor_headers,
    weights_name,
)
from dflash_trt.engine_dir.provenance import PROVENANCE_NAME, EngineFile, Provenance, plan_name
from dflash_trt.engine_dir.tensor_file import read_tensor_headers

MAX_ALWAYS_HASHED_BYTES = 256 * 2**20
_MAX_LISTED_TENSORS = 8


@dataclass(frozen=True)
class EngineDir:
    """A checked engine directory. Weight readers call `on_read` with the bytes read since the last call."""

    path: Path
    manifest: EngineManifest
    on_read: Callable[[int], None] = field(default=lambda num_bytes: None, compare=False, repr=False)

    @classmethod
    def open(cls, path: Path | str, *, verify_hashes: bool = False) -> Self:
        """Check the directory and return it.

        Sizes and tensor headers are always compared with the manifest, SHA-256 of every file below 256 MiB too;
        `verify_hashes` hashes the larger ones as well (about a second per GB).

        Raises:
            EngineDirError: every mismatch found, and the command that fixes them.
        """
        path = Path(path)
        fields, config_sha256 = _read_manifest(path)
        _check_version(path, fields)
        try:
            manifest = EngineManifest.model_validate_json(json.dumps(fields), strict=True)
        except ValidationError as error:
            raise_all(EngineDirError, _heading(path), file_problems(error, MANIFEST_NAME))
            raise AssertionError("pydantic raised without an error") from error
        hint = _hint(path)
        _check_step(path, manifest, hint)
        problems = list(_provenance_problems(path, config_sha256, hint))
        problems += _listed_problems(path, manifest, hint, verify_hashes=verify_hashes)
        if not problems:
            problems = list(_header_problems(path, manifest, hint))
        raise_all(EngineDirError, _heading(path), problems, hint=hint)
        return cls(path, manifest)

    @property
    def sha256(self) -> str:
        """Hash of the engine's contents, which do not depend on provenance.json."""
        fields = self.manifest.model_dump(mode="json")
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    @property
    def tokenizer_path(self) -> Path | None:
        """The tokenizer's directory; None for an engine of token ids only."""
        has_tokenizer = any(name.startswith(f"{TOKENIZER_DIR}/") for name in self.manifest.files)
        return self.path / TOKENIZER_DIR if has_tokenizer else None

    @property
    def kernel_architectures(self) -> tuple[str, ...]:
        """GPU architectures that the engine ships compiled kernels for, as "sm_90a"."""
        found = map(kernels_architecture, self.manifest.files)
        return tuple(architecture for architecture in found if architecture is not None)

    @property
    def file_names(self) -> tuple[str, ...]:
        """Names of all files of the engine."""
        return (MANIFEST_NAME, PROVENANCE_NAME, *self.manifest.files)

    def weights_path(self, rank: int) -> Path:
        """The weights of one rank of an engine of backend torch."""
        assert self.manifest.backend == "torch" and 0 <= rank < self.manifest.pretrained_config.mapping.world_size
        return self.path / weights_name(rank)

    def kernels(self, architecture: str) -> KernelArchive | None:
        """The compiled kernels for "sm_90a" and the like; None if the engine ships none.

        Raises:
            EngineDirError: the file is not the one that was built; its SHA-256 is compared here.
        """
        name = kernels_name(architecture)
        entry = self.manifest.files.get(name)
        if entry is None:
            return None
        try:
            content = (self.path / name).read_bytes()
        except OSError as error:
            raise EngineDirError.about(name, expected="a file", found=str(error.strerror)) from error
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 != entry.sha256:
            raise EngineDirError.about(name, expected=f"sha256 {entry.sha256}", found=sha256)
        try:
            return KernelArchive.from_bytes(content)
        except ValueError as error:
            raise EngineDirError(f"{name} is {error}.") from error

    def with_draft_window(self, window: int | None) -> Self:
        """A copy whose drafter sees at most `window` tokens of context; unchanged for None."""
        models = self.manifest.pretrained_config
        if window is None or models.draft is None:
            return self
        models = models.model_copy(update={"draft": models.draft.with_window(window)})
        return replace(self, manifest=self.manifest.model_copy(update={"pretrained_config": models}))

    def reporting(self, progress: Callable[[int, int], None]) -> Self:
        """A copy that tells `progress` how many bytes of a rank's weights are read, of how many.

        Nothing is counted while TensorRT reads its plan, or TensorRT-LLM its checkpoints.
        """
        if self.manifest.backend == "tensorrt_llm":
            return self
        name = weights_name(0) if self.manifest.tensorrt is None else plan_name(0)
        num_read, num_bytes = 0, self.manifest.files[name].size_bytes
        progress(0, num_bytes)

        def on_read(num_more: int) -> None:
            nonlocal num_read
            num_read = min(num_read + num_more, num_bytes)
            progress(num_read, num_bytes)

        return replace(self, on_read=on_read)

    def provenance(self) -> dict[str, Any]:
        """Origin of the engine as JSON types: command, versions, hashes of its inputs."""
        return _read_provenance(self.path).model_dump(mode="json")


def is_hashed(entry: EngineFile) -> bool:
    """True if `open` hashes a file even without `verify_hashes`."""
    return entry.size_bytes < MAX_ALWAYS_HASHED_BYTES


def is_engine_dir(path: Path) -> bool:
    """True if dflash-trt wrote `path`, in any version and any state."""
    try:
        return {"version", "backend", "build_config"} <= read_json_object(path / MANIFEST_NAME).keys()
    except (OSError, ValueError):
        return False


def _read_provenance(path: Path) -> Provenance:
    """Raises OSError or ValueError (pydantic's included)."""
    return Provenance.model_validate_json(json.dumps(read_json_object(path / PROVENANCE_NAME)), strict=True)


def _read_manifest(path: Path) -> tuple[dict[str, Any], str]:
    """Read config.json; return its fields and its hash."""
    build = _build_hint(path)
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing at that path"
        raise EngineDirError.about(_heading(path), expected="an engine directory", found=found, hint=build)
    try:
        content = (path / MANIFEST_NAME).read_bytes()
        fields = parse_json_object(content)
    except FileNotFoundError:
        found = f"no {MANIFEST_NAME} in it"
        raise EngineDirError.about(_heading(path), expected="an engine directory", found=found, hint=build) from None
    except (OSError, ValueError) as error:
        subject = f"{_heading(path)}: {MANIFEST_NAME}"
        raise EngineDirError.about(subject, expected="a JSON object", found=str(error), hint=_hint(path)) from error
    if "architectures" in fields or "model_type" in fields:
        hint = f"Build an engine from it: {build_command(str(path))}"
        raise EngineDirError.about(
            _heading(path), expected="an engine directory", found="a model checkpoint", hint=hint
        )
    return fields, hashlib.sha256(content).hexdigest()


def _check_version(path: Path, fields: dict[str, Any]) -> None:
    version = fields.get("version")
    if version == ENGINE_VERSION:
        return
    found = f"version {version!r}" if "version" in fields else "no version"
    raise EngineDirError.about(
        _heading(path), expected=f"engine version {ENGINE_VERSION}", found=found, hint=_hint(path)
    )


def _check_step(path: Path, manifest: EngineManifest, hint: str) -> None:
    current = StepTables.current()
    if manifest.step == current:
        return
    theirs = {row.name for row in (*manifest.step.inputs, *manifest.step.outputs)}
    ours = {row.name for row in (*current.inputs, *current.outputs)}
    different = sorted(theirs ^ ours) or ["the same names with other dtypes or axes"]
    raise EngineDirError.about(
        f"{_heading(path)}: step tensors",
        expected="the ones of this version of dflash-trt",
        found=f"a difference in {', '.join(different)}",
        hint=hint,
    )


def _provenance_problems(path: Path, config_sha256: str, hint: str) -> Iterator[str]:
    """Check that provenance.json is valid and has the hash of config.json."""
    for name in (MANIFEST_NAME, PROVENANCE_NAME):
        yield from _link_problems(path, name)
    try:
        recorded = _read_provenance(path).config_sha256
    except FileNotFoundError:
        yield problem(PROVENANCE_NAME, expected="a file", found="none", hint=hint)
    except ValidationError as error:
        yield from file_problems(error, PROVENANCE_NAME)
    except (OSError, ValueError) as error:
        yield problem(PROVENANCE_NAME, expected="a JSON object", found=str(error), hint=hint)
    else:
        if recorded != config_sha256:
            yield problem(MANIFEST_NAME, expected=f"sha256 {recorded}", found=config_sha256, hint=hint)


def _listed_problems(path: Path, manifest: EngineManifest, hint: str, *, verify_hashes: bool) -> Iterator[str]:
    """Check the files that config.json lists, and that tokenizer/ has no others."""
    for name in manifest.required_files:
        if name not in manifest.files:
            yield f"{MANIFEST_NAME} key 'files' does not list '{name}'. {hint}"
    library = manifest.tensorrt and manifest.tensorrt.plugin_library  # code that will run in this process
    for name, entry in manifest.files.items():
        yield from _link_problems(path, name)
        if kernels_architecture(name) is not None and not verify_hashes:
            continue  # `EngineDir.kernels` compares; without them the engine runs as well
        verifies_hash = verify_hashes or is_hashed(entry) or name == library
        yield from _one_file_problems(path / name, name, entry, hint, verifies_hash=verifies_hash)
    for extra in sorted((path / TOKENIZER_DIR).rglob("*")):
        name = extra.relative_to(path).as_posix()
        is_directory = extra.is_dir() and not extra.is_symlink()
        if not is_directory and name not in manifest.files:
            yield f"{name} is not listed in {MANIFEST_NAME}. Remove it."


def _link_problems(path: Path, name: str) -> Iterator[str]:
    """Refuse links: their targets may change, and they break when the engine moves."""
    where = Path(os.path.realpath(path)) / name
    real = Path(os.path.realpath(where))
    if real != where:
        hint = "Replace the link by a copy of the file."
        yield problem(name, expected="a file of this directory", found=f"a symbolic link to {real}", hint=hint)


def _one_file_problems(file: Path, name: str, entry: EngineFile, hint: str, *, verifies_hash: bool) -> Iterator[str]:
    if not file.is_file():
        yield problem(name, expected="a file", found="none", hint=hint)
        return
    size_bytes = file.stat().st_size
    if size_bytes != entry.size_bytes:
        yield problem(name, expected=f"{entry.size_bytes} bytes", found=f"{size_bytes}", hint=hint)
    elif verifies_hash:
        with file.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        if sha256 != entry.sha256:
            yield problem(name, expected=f"sha256 {entry.sha256}", found=sha256, hint=hint)


def _header_problems(path: Path, manifest: EngineManifest, hint: str) -> Iterator[str]:
    if manifest.backend != "torch":
        return  # plans hold the weights, without headers; loaders of checkpoints read theirs
    expected = tensor_headers(manifest.pretrained_config)
    for rank in range(manifest.pretrained_config.mapping.world_size):
        name = weights_name(rank)
        try:
            found = read_tensor_headers(path / name)
        except ValueError as error:
            yield problem(name, expected="a safetensors file", found=str(error), hint=hint)
            continue
        different = [tensor for tensor in expected | found if expected.get(tensor) != found.get(tensor)]
        for tensor in different[:_MAX_LISTED_TENSORS]:
            want, have = (str(headers.get(tensor, "no such tensor")) for headers in (expected, found))
            yield problem(f"{name} tensor '{tensor}'", expected=want, found=have, hint=hint)
        if len(different) > _MAX_LISTED_TENSORS:
            yield f"{name}: {len(different) - _MAX_LISTED_TENSORS} more tensors differ"


def _heading(path: Path) -> str:
    return f"engine directory {path}"


def _build_hint(path: Path) -> str:
    """The command that makes the engine directory, or an engine of the hub model that the path may name."""
    command = f"dflash-trt build CONFIG.yaml -o {shlex.quote(str(path))}"
    if path.parent.exists() or HubName.parse(str(path)) is None:
        return f"Build one: {command}"
    return f"Build one of this model on the Hugging Face hub: {build_command(str(path))}, or at that path: {command}"


def _hint(path: Path) -> str:
    """The command that builds the directory again, from its provenance.json if that is readable."""
    output = shlex.quote(str(path))
    fallback = f"Build it again: dflash-trt build CONFIG.yaml -o {output} --overwrite"
    try:
        provenance = read_json_object(path / PROVENANCE_NAME)
        words = [str(word) for word in provenance["command"]]
        built_in = Path(provenance["working_dir"])
    except (OSError, ValueError, KeyError, TypeError):
        return fallback
    if "--overwrite" not in words:
        words.append("--overwrite")
    for option, directory in pairwise(words):
        if option in ("-o", "--output") and os.path.realpath(built_in / directory) != os.path.realpath(path):
            words[words.index(option) + 1] = str(path.absolute())  # it was moved, or copied
    where = "" if built_in == Path.cwd() else f" in {built_in}"
    return f"Build it again{where}: {shlex.join(words)}"
