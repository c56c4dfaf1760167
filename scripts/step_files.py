"""The files that a reader of one decode step opens: those whose functions run between two chunks of a stream.

    python -m scripts.step_files build/demo
    python -m scripts.step_files build/demo --kernels

With --kernels the step is the one of a GPU, in Triton's interpreter; what Triton does with a kernel counts for nothing.
"""

import os
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import click

PACKAGE = Path(__file__).resolve().parents[1] / "dflash_trt"
PROMPT = "def parse(text):\n    "


class Recorder:
    """Counts functions by file while it is on, in every thread that starts after it."""

    def __init__(self) -> None:
        self.is_on = False
        self.begins_at: str | None = None  # the function whose next call turns it on
        self.functions: dict[Path, set[str]] = defaultdict(set)
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_qualname == self.begins_at:
            self.is_on = True
        if self.is_on and event == "call":
            self.functions[Path(frame.f_code.co_filename)].add(frame.f_code.co_qualname)

    def stop(self) -> dict[Path, set[str]]:
        """The files of the package."""
        self.is_on, self.begins_at = False, None
        sys.setprofile(None)
        return {path: names for path, names in sorted(self.functions.items()) if path.is_relative_to(PACKAGE)}


@click.command()
@click.argument("engine_dir", type=click.Path(path_type=Path))
@click.option("--kernels", is_flag=True, help="The ops and kernels of a GPU.")
def main(engine_dir: Path, kernels: bool) -> None:
    """Lines, functions run and name of each file; their sums."""
    if kernels:
        os.environ["TRITON_INTERPRET"] = "1"
        _open_on_kernels()
    from dflash_trt import LLM, SamplingParams

    recorder = Recorder()
    with LLM(engine_dir, device="cpu", num_threads=1, kv_cache_bytes=1 << 25) as llm:
        # So few tokens that no step repeats the one before: each is planned and committed in full.
        chunks = llm.stream(PROMPT, SamplingParams(max_new_tokens=16, ignore_eos=True))
        next(chunks)  # of the prompt
        recorder.begins_at = "EngineLoop.step"
        while not recorder.is_on or not next(chunks).num_draft_tokens:
            pass
        next(chunks)  # of a step that was recorded from its beginning
        found = recorder.stop()  # before the request ends and the engine closes
    sizes = {path: len(path.read_text().splitlines()) for path in found}
    for path, names in found.items():
        click.echo(f"{sizes[path]:5} {len(names):4}  {path.relative_to(PACKAGE)}")
    num_functions = sum(map(len, found.values()))
    click.echo(f"{len(found)} files of {sum(sizes.values())} lines, {num_functions} functions")


def _open_on_kernels() -> None:
    import torch

    from dflash_trt.backends.cuda.executor import TorchGpuExecutor
    from dflash_trt.backends.torch.backend import TorchBackend

    def open_on_kernels(backend: TorchBackend, engine: Any, config: Any, **given: Any) -> TorchGpuExecutor:
        return TorchGpuExecutor.open(engine, config, device=torch.device("cpu"), draft_lens=given["draft_lens"])

    TorchBackend.open = open_on_kernels  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    main()
