"""The directory that ahead-of-time compilation writes: cubins, the manifest that describes them, and C++ that embeds
them.

Knows the files; compiles nothing. Every file appears whole or not at all, and the manifest last, so that two writers
of one directory cannot leave a mixture.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from dflash_trt.kernels.programs import PROGRAMS
from plugins.aot.compile import NUM_SCRATCH_POINTERS, CompiledKernel
from plugins.aot.embed import CUBIN_ALIGNMENT, assembly_source, table_source
from plugins.aot.programs import programs_source
from plugins.aot.rules import rules_header, shared_facts

MANIFEST: Final = "manifest.json"
IMAGE: Final = "cubins.bin"
PTX_DIR: Final = "ptx"  # what the cubins were assembled from, by their sha256; nothing embeds it
TABLE: Final = "embedded_kernels.cpp"
ASSEMBLY: Final = "embedded_cubins.S"
RULES: Final = "launch_rules.h"
PROGRAMS_SOURCE: Final = "programs.cpp"
FORMAT_VERSION: Final = 3


def write_kernels(out: Path, kernels: Sequence[CompiledKernel], *, origin: dict[str, Any]) -> Path:
    """Write everything and return the manifest's path. `origin` says with what the kernels were compiled."""
    fitting = [kernel for kernel in kernels if kernel.fits]
    image, offsets = _image(fitting)
    manifest = {
        "format_version": FORMAT_VERSION,
        "origin": origin,
        "num_scratch_pointers": NUM_SCRATCH_POINTERS,
        "launch": shared_facts(),
        "programs": [asdict(program) for program in PROGRAMS],
        "image": {"file": IMAGE, "num_bytes": len(image), "sha256": hashlib.sha256(image).hexdigest()},
        "kernels": [_entry(kernel, offsets[kernel.sha256]) for kernel in fitting],
        # Triton's choice of shared memory is larger than the GPU's; another variant of the kernel is used there.
        "left_out": [
            {"variant": k.variant, "architecture": k.architecture, "shared_bytes": k.shared_bytes}
            for k in kernels
            if not k.fits
        ],
    }
    text = json.dumps(manifest, indent=1) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    (out / PTX_DIR).mkdir(exist_ok=True)
    for kernel in fitting:
        _write(out / PTX_DIR / f"{kernel.sha256}.ptx", kernel.ptx.encode())
    _write(out / IMAGE, image)
    _write(out / ASSEMBLY, assembly_source(IMAGE).encode())
    _write(out / RULES, rules_header().encode())
    _write(out / PROGRAMS_SOURCE, programs_source().encode())
    _write(out / TABLE, table_source(fitting, offsets, manifest_sha256=digest).encode())
    _write(out / MANIFEST, text.encode())
    return out / MANIFEST


def _image(kernels: Sequence[CompiledKernel]) -> tuple[bytes, dict[str, int]]:
    """All cubins, each once and aligned, and where each begins, by sha256."""
    image = bytearray()
    offsets: dict[str, int] = {}
    for kernel in kernels:
        if kernel.sha256 not in offsets:
            image += bytes(-len(image) % CUBIN_ALIGNMENT)
            offsets[kernel.sha256] = len(image)
            image += kernel.cubin
    return bytes(image), offsets


def _entry(kernel: CompiledKernel, offset: int) -> dict[str, Any]:
    return {
        "variant": kernel.variant,
        "kernel": kernel.kernel,
        "architecture": kernel.architecture,
        "entry": kernel.entry,
        "num_warps": kernel.num_warps,
        "num_stages": kernel.num_stages,
        "shared_bytes": kernel.shared_bytes,
        "num_registers": kernel.num_registers,
        "stack_bytes": kernel.stack_bytes,
        "blocks_per_multiprocessor": kernel.blocks_per_multiprocessor,
        "arguments": [
            {"name": name, "type": type_, "is_multiple_of_16": is_multiple}
            for name, type_, is_multiple in kernel.arguments
        ],
        "constants": dict(kernel.constants),
        "grid": list(kernel.grid),
        "offset": offset,
        "num_bytes": len(kernel.cubin),
        "sha256": kernel.sha256,
    }


def _write(path: Path, content: bytes) -> None:
    """Replace the file at once; leave it alone, and its time too, when it is the same already."""
    if path.is_file() and path.read_bytes() == content:
        return
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(content)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
