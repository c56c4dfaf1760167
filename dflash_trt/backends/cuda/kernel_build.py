"""Compiles an engine's kernels on a machine without a GPU, in a process of its own.

    python -m dflash_trt.backends.cuda.kernel_build DIRECTORY ARCHITECTURE OUTPUT < config.json

The executor takes the steps of its warm-up over tensors of device meta, whose launches compile: rank 0's, which
compiles on a GPU as well (`TorchGpuExecutor.compile_kernels`).
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_trt.backends.cuda.backend import gpu_problems
from dflash_trt.backends.padding import warm_shapes
from dflash_trt.backends.page_budget import plan_engine_pages
from dflash_trt.backends.torch.loading import load_network
from dflash_trt.core.dtype import stored_dtype, torch_dtype
from dflash_trt.core.errors import BuildError
from dflash_trt.core.kernel_archive import Architecture
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir, EngineManifest, tensor_headers
from dflash_trt.engine_dir.tensor_file import tensor_offsets

_ATEN = torch.ops.aten
_PAGE_BYTES = 1 << 50  # all pages that max_batch_size sequences need, and all snapshots


def kernel_problems(
    architectures: Iterable[Architecture],
    target: TargetSpec,
    draft: DraftSpec | None,
    quantization: QuantizationSpec | None,
) -> list[str]:
    """What keeps this machine from compiling an engine's kernels, or these GPUs from running them."""
    problems: dict[str, None] = {}
    for architecture in architectures:
        if find_spec("triton") is None:
            hint = "Install the Triton of the machines that run the engine, or leave --compile-for out."
            return [f"expected Triton, found none. {hint}"]
        capability = divmod(int(architecture.removeprefix("sm_").removesuffix("a")), 10)
        problems |= dict.fromkeys(gpu_problems(target, draft, quantization, capability))
    return list(problems)


def compile_kernels(directory: Path, manifest: EngineManifest, architecture: Architecture) -> bytes:
    """The archive of an engine whose weights are in `directory`; some 20 s to some minutes on all cores.

    Raises:
        BuildError: a kernel does not compile.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_CACHE_MANAGER"}
    with TemporaryDirectory(prefix="dflash-trt-kernels-") as temporary:
        output = Path(temporary) / "kernels.zip"
        words = [sys.executable, "-P", "-m", "dflash_trt.backends.cuda.kernel_build"]
        ran = subprocess.run(
            [*words, str(directory), architecture, str(output)],
            input=manifest.model_dump_json(),
            env=environment | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(Path(temporary) / "cache")},
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            found = ran.stderr.strip().rpartition("\n")[2] or f"a process that ended with {ran.returncode}"
            hint = "Build without --compile-for: the engine then compiles its kernels when it is opened."
            raise BuildError.about(f"kernels for {architecture}", expected="code", found=found, hint=hint)
        return output.read_bytes()


class _OneOfRanks:
    """Implements RankGroup for rank 0 without the others."""

    rank = 0

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather_columns(self, x: Tensor) -> Tensor:
        return x.new_empty(len(x), x.shape[1] * self.num_ranks)

    def all_gather_rows(self, x: Tensor, num_rows: Sequence[int]) -> Tensor:
        return x.new_empty(sum(num_rows), x.shape[1])

    def reduce_scatter_rows(self, x: Tensor, num_rows: Sequence[int]) -> Tensor:
        return x[: num_rows[0]]

    def all_to_all_rows(self, x: Tensor, num_rows: Sequence[int]) -> Tensor:
        return x.new_empty(num_rows[0], x.shape[1] * self.num_ranks)

    def all_to_all_by_counts(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return x.new_empty(sum(received), x.shape[1])

    def smallest(self, number: int) -> int:
        return number

    def shared_bytes(self, make: Callable[[], bytes], num_bytes: int) -> bytes:
        return make()


class _HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rank 0's tensors on device meta. Inside, what a load reads back to the host of them comes from the file."""

    def __init__(self, engine: EngineDir) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._path = engine.weights_path(0)
        self.tensors: dict[str, Tensor] = {}
        self._places: dict[int, tuple[int, int]] = {}
        headers = tensor_headers(engine.manifest.pretrained_config)
        for name, start in tensor_offsets(self._path).items():
            dtype = torch_dtype(stored_dtype(headers[name].dtype) or "")
            self.tensors[name] = torch.empty(headers[name].shape, dtype=dtype, device="meta")
            self._places[self.tensors[name].untyped_storage()._cdata] = start, headers[name].num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATEN._to_copy.default and args[0].is_meta and kwargs.get("device") == torch.device("cpu"):
            return func(self._value(args[0]), **kwargs)
        if func is _ATEN._local_scalar_dense.default and args[0].is_meta:
            return func(self._value(args[0]))
        return func(*args, **(kwargs or {}))

    def _value(self, tensor: Tensor) -> Tensor:
        start, num_bytes = self._places[tensor.untyped_storage()._cdata]
        with self._path.open("rb") as file:
            file.seek(start)
            stored = torch.frombuffer(bytearray(file.read(num_bytes)), dtype=tensor.dtype)
        return stored.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@torch.no_grad()  # not inference_mode, under which a mode sees `tolist` and its kind whole
def take_steps(engine: EngineDir) -> None:
    """Those of the default settings: K is the engine's, or 0."""
    from dflash_trt.backends.cuda.executor import TorchGpuExecutor

    manifest = engine.manifest
    limits, models = manifest.build_config, manifest.pretrained_config
    with _HostReads(engine) as weights:
        executor = TorchGpuExecutor(
            load_network(engine, tensors=weights.tensors),
            page_plan=plan_engine_pages(manifest, RuntimeConfig(kv_cache_bytes=_PAGE_BYTES)),
            max_batch_size=limits.max_batch_size,
            max_num_tokens=limits.max_num_tokens,
            max_draft_len=limits.max_draft_len,
            device=torch.device("meta"),
            quantization=models.quantization,
            ranks=_OneOfRanks(models.mapping.world_size),
        )
    lens = (executor.limits.max_draft_len,)
    executor.compile_kernels(warm_shapes(executor.limits, lens, tile_edges=executor.tile_edges))


def main() -> None:
    directory, architecture, output = sys.argv[1:]
    from dflash_trt.kernels.shipped_kernels import compile_only, pack_kernels

    compile_only(architecture)
    take_steps(EngineDir(Path(directory), EngineManifest.model_validate_json(sys.stdin.read(), strict=True)))
    Path(output).write_bytes(pack_kernels(Path(os.environ["TRITON_CACHE_DIR"])).to_bytes())


if __name__ == "__main__":
    main()
