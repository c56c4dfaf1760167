"""Atomic writing of an engine directory: a hidden sibling is renamed when it is complete.

One build at a time writes to a path; see `output_lock`.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any

from dflash_trt.core.chat_template_options import ChatTemplateOptions
from dflash_trt.core.config import Backend
from dflash_trt.core.errors import BuildError, problem
from dflash_trt.core.kernel_archive import Architecture, kernels_name
from dflash_trt.engine_dir.manifest import (
    ENGINE_VERSION,
    MANIFEST_NAME,
    TOKENIZER_DIR,
    EngineLimits,
    EngineManifest,
    PretrainedConfig,
    StepTables,
    tensor_headers,
    weights_name,
)
from dflash_trt.engine_dir.opening import is_engine_dir
from dflash_trt.engine_dir.output_lock import clear_leftovers, output_lock, sibling
from dflash_trt.engine_dir.provenance import (
    PLUGIN_LIBRARY_NAME,
    PROVENANCE_NAME,
    BuildRecord,
    EngineFile,
    Provenance,
    TensorRTLLMRecord,
    TensorRTRecord,
    plan_name,
)
from dflash_trt.engine_dir.tensor_file import ByteSink, TensorHeader, tensor_file_num_bytes, write_tensor_file

SLACK_BYTES = 2**20  # config.json, provenance.json, directory entries
_CHUNK_BYTES = 8 * 2**20
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class ReservedOutput:
    """An output path that only this process writes to. Made by `reserve_output`."""

    path: Path
    overwrite: bool


@contextmanager
def reserve_output(
    output: Path, *, overwrite: bool = False, warn: Callable[[str], None] = lambda message: None
) -> Iterator[ReservedOutput]:
    """Lock `output` for a whole build; `warn` gets a message for each leftover of a killed build.

    Raises:
        BuildError: another build holds it, it exists and may not be replaced, or it cannot be written.
    """
    output = Path(os.path.realpath(output))
    storage = _Storage(output)
    with _new_parents(storage), ExitStack() as stack:
        with storage.errors():
            stack.enter_context(output_lock(output))
            clear_leftovers(output, warn=warn)
            _check_output(output, overwrite=overwrite)
        yield ReservedOutput(output, overwrite)


@contextmanager
def write_engine_dir(output: ReservedOutput, *, needed_bytes: int) -> Iterator["EngineDirWriter"]:
    """Give a writer whose files become `output` when the block ends; it must call `finish`.

    Any exception inside, Ctrl-C included, leaves `output` unchanged and no file next to it. `needed_bytes` is the total
    size of the files, compared with the free space first.

    Raises:
        BuildError: the disk is full or fails, or the path has been taken meanwhile.
    """
    storage = _Storage(output.path)
    storage.check_free_space(needed_bytes)
    temporary = sibling(output.path, "tmp")
    try:
        with storage.errors():
            temporary.mkdir()
        writer = EngineDirWriter(temporary, storage)
        yield writer
        assert writer.is_finished, "finish() was never called"
        with storage.errors():
            _publish(temporary, output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


class EngineDirWriter:
    """Adds files, each hashed while it is written and synced when the call returns."""

    def __init__(self, path: Path, storage: "_Storage") -> None:
        self.is_finished = False
        self._path = path
        self._storage = storage
        self._files: dict[str, EngineFile] = {}

    def add_weights(self, rank: int, config: PretrainedConfig, tensors: Iterable[tuple[str, memoryview]]) -> None:
        """Stream rank{rank}.safetensors; `tensors` come in the order of `tensor_headers(config)`."""
        with self._new_file(weights_name(rank)) as sink:
            write_tensor_file(sink, tensor_headers(config), tensors)

    def add_tokenizer_file(self, name: str, content: bytes) -> None:
        self.add_file(f"{TOKENIZER_DIR}/{name}", content)

    def add_file(self, name: str, content: bytes) -> None:
        with self._new_file(name) as sink:
            sink.write(content)

    def add_kernels(self, architecture: Architecture, compile_for: Callable[[Path], bytes]) -> None:
        """Write the archive that `compile_for` makes in this directory, when all weights are in it."""
        self.add_file(kernels_name(architecture), compile_for(self._path))

    def add_tensors(
        self, name: str, headers: Mapping[str, TensorHeader], tensors: Iterable[tuple[str, memoryview]]
    ) -> None:
        """Stream a safetensors file; `tensors` come in the order of `headers`."""
        with self._new_file(name) as sink:
            write_tensor_file(sink, headers, tensors)

    @contextmanager
    def temporary_weights(
        self, rank: int, config: PretrainedConfig, tensors: Iterable[tuple[str, memoryview]]
    ) -> Iterator[Path]:
        """The file that `add_weights` writes, for a plan that is compiled from it, and not for the engine."""
        self.add_weights(rank, config, tensors)
        name = weights_name(rank)
        try:
            yield self._path / name
        finally:
            del self._files[name]
            (self._path / name).unlink()

    @contextmanager
    def add_plan(self, rank: int) -> Iterator[ByteSink]:
        """Write rank{rank}.engine, piece by piece."""
        with self._new_file(plan_name(rank)) as sink:
            yield sink

    def add_plugin_library(self, source: Path) -> None:
        """Copy a plugin library, under the name that engines know it by."""
        with self._new_file(PLUGIN_LIBRARY_NAME) as sink, source.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                sink.write(chunk)

    def finish(
        self,
        config: PretrainedConfig,
        limits: EngineLimits,
        record: BuildRecord,
        *,
        tensorrt: TensorRTRecord | None = None,
        tensorrt_llm: TensorRTLLMRecord | None = None,
        chat_template_options: ChatTemplateOptions | None = None,
    ) -> None:
        """Write config.json, and provenance.json with its hash.

        `tensorrt` describes the plans, `tensorrt_llm` the arguments of TensorRT-LLM, if there are any.
        """
        backend: Backend = "torch" if tensorrt is None else "tensorrt"
        manifest = EngineManifest(
            version=ENGINE_VERSION,
            backend=backend if tensorrt_llm is None else "tensorrt_llm",
            pretrained_config=config,
            build_config=limits,
            step=StepTables.current(),
            tensorrt=tensorrt,
            tensorrt_llm=tensorrt_llm,
            chat_template_options=dict(chat_template_options or {}),
            files=dict(self._files),
        )
        self._add_json(MANIFEST_NAME, manifest.model_dump(mode="json"))
        config_sha256 = self._files[MANIFEST_NAME].sha256
        provenance = Provenance(**dict(record), config_sha256=config_sha256)
        self._add_json(PROVENANCE_NAME, provenance.model_dump(mode="json"))
        with self._storage.errors():
            for directory in (*(path for path in self._path.rglob("*") if path.is_dir()), self._path):
                _sync_directory(directory)
        self.is_finished = True

    def _add_json(self, name: str, fields: Mapping[str, Any]) -> None:
        with self._new_file(name) as sink:
            sink.write(json_bytes(fields))

    @contextmanager
    def _new_file(self, name: str) -> Iterator["_HashedFile"]:
        """Open a file; OSErrors of writing become BuildErrors, while other errors of the block pass through."""
        path = self._path / name
        with self._storage.errors():
            path.parent.mkdir(exist_ok=True)
            stream = path.open("xb", buffering=0)
        with stream:
            sink = _HashedFile(stream, self._storage)
            yield sink
            with self._storage.errors():
                os.fsync(stream.fileno())
        self._files[name] = EngineFile(sha256=sink.sha256.hexdigest(), size_bytes=sink.size_bytes)


class _HashedFile:
    """Unbuffered, so that a full disk raises in `write` and not in `close`."""

    def __init__(self, stream: RawIOBase, storage: "_Storage") -> None:
        self.sha256 = hashlib.sha256()
        self.size_bytes = 0
        self._stream = stream
        self._storage = storage

    def write(self, chunk: bytes | memoryview) -> None:
        left = memoryview(chunk).cast("B")
        self.size_bytes += len(left)
        self.sha256.update(left)
        with self._storage.errors():
            while left:
                left = left[self._stream.write(left) :]


class _Storage:
    """The disk of `output`, and its errors."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self._needed_bytes = SLACK_BYTES

    def check_free_space(self, needed_bytes: int) -> None:
        self._needed_bytes = needed_bytes
        free_bytes = self._free_bytes()
        if free_bytes < needed_bytes:
            raise BuildError(self._full_problem(f"{free_bytes} bytes"))

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn an OSError into a BuildError."""
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                found = f"{self._free_bytes()} bytes ({error.strerror})"
                raise BuildError(self._full_problem(found)) from error
            raise BuildError.about(
                f"output {self.output}",
                expected="a path that can be written",
                found=f"{error.strerror or error} ({error.filename or 'while writing'})",
                hint="Check the path and its permissions, or choose another -o.",
            ) from error

    def _free_bytes(self) -> int:
        return shutil.disk_usage(next(path for path in self.output.parents if path.exists())).free

    def _full_problem(self, found: str) -> str:
        hint = "Free some space, raise the quota, or choose -o on another disk."
        expected = f"{self._needed_bytes} bytes of free disk space"
        return problem(f"output {self.output}", expected=expected, found=found, hint=hint)


def _check_output(output: Path, *, overwrite: bool) -> None:
    """Raises BuildError unless `output` is new, an empty directory, or an engine with `overwrite`."""
    subject = f"output {output}"
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not is_engine_dir(output):
        found = "a directory that is not an engine" if output.is_dir() else "a file"
        hint = "Choose another -o; --overwrite replaces engine directories only."
        raise BuildError.about(subject, expected="a new path", found=found, hint=hint)
    if not overwrite:
        raise BuildError.about(subject, expected="a new path", found="an engine", hint="Pass --overwrite.")


def json_bytes(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def needed_bytes_for(
    config: PretrainedConfig,
    tokenizer_files: Mapping[str, bytes],
    *,
    has_plans: bool = False,
    plugin_library: Path | None = None,
) -> int:
    """Bytes of the engine directory while it is written.

    A plan is about as large as the weights it is made from, which are there in addition for one rank at a time.
    """
    num_files = config.mapping.world_size + has_plans
    library_bytes = 0 if plugin_library is None else plugin_library.stat().st_size
    weights_bytes = tensor_file_num_bytes(tensor_headers(config)) * num_files
    return weights_bytes + library_bytes + sum(map(len, tokenizer_files.values())) + SLACK_BYTES


def _publish(temporary: Path, reserved: ReservedOutput) -> None:
    """Rename the new engine into place, then remove the old one."""
    output, aside = reserved.path, sibling(reserved.path, "old")
    _check_output(output, overwrite=reserved.overwrite)  # the lock keeps out builds, but not copies
    try:
        if is_engine_dir(output):
            output.rename(aside)
        temporary.rename(output)
        _sync_directory(output.parent)
    except BaseException:
        if aside.exists() and not output.exists():
            aside.rename(output)
        raise
    shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _new_parents(storage: _Storage) -> Iterator[None]:
    """Make the missing parent directories, and remove them again on failure."""
    missing = [parent for parent in storage.output.parents if not parent.exists()]
    try:
        with storage.errors():
            for parent in reversed(missing):
                parent.mkdir(exist_ok=True)
        yield
    except BaseException:
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()
        raise


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
