"""Compiled kernels of one GPU architecture in one file, as an engine directory ships them. Knows no compiler."""

import json
import re
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import Final, Literal, Self
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

Architecture = Literal["sm_90a", "sm_100a", "sm_103a"]

_DIRECTORY: Final = "kernels"
_INDEX: Final = "index.json"
_FILE: Final = re.compile(r"[A-Z2-7]+/(?!__grp__)\w+\.(json|ptx|cubin)")  # __grp__ files have absolute paths


@dataclass(frozen=True, kw_only=True)
class KernelIndex:
    """The origin of the kernels. Only the same compiler finds kernels of the same sources under the same names."""

    triton_version: str
    compiler_sha256: str
    sources_sha256: str
    num_kernels: int


@dataclass(frozen=True)
class KernelArchive:
    """`files` by their names in a cache of Triton: a directory for each kernel, with its cubin, PTX and metadata."""

    index: KernelIndex
    files: dict[str, bytes]

    def to_bytes(self) -> bytes:
        """A zip file; equal archives have equal bytes."""
        content = BytesIO()
        with ZipFile(content, "w", ZIP_DEFLATED) as archive:
            for name, data in {_INDEX: json.dumps(asdict(self.index)).encode(), **self.files}.items():
                archive.writestr(ZipInfo(name), data, ZIP_DEFLATED)
        return content.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Raises ValueError if it is no archive of kernels."""
        try:
            with ZipFile(BytesIO(content)) as archive:
                files = {name: archive.read(name) for name in archive.namelist()}
            index = KernelIndex(**json.loads(files.pop(_INDEX)))
        except (BadZipFile, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no archive of kernels: {error}") from error
        for name in files:
            if not is_kernel_file(name):
                raise ValueError(f"no archive of kernels: it has a file {name!r}")
        return cls(index, files)


def is_kernel_file(name: str) -> bool:
    """True for a file of a Triton cache that a launch takes, relative to the cache."""
    return _FILE.fullmatch(name) is not None


def kernels_name(architecture: str) -> str:
    """The archive's name in an engine directory."""
    return f"{_DIRECTORY}/{architecture}.zip"


def kernels_architecture(name: str) -> str | None:
    """The architecture of a file of an engine directory; None if it has no kernels."""
    found = re.fullmatch(rf"{_DIRECTORY}/(\w+)\.zip", name)
    return None if found is None else found[1]
