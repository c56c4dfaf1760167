"""Peak host memory of building a TensorRT engine, through TensorRT-RTX and without a GPU.

    python -m scripts.build_memory

Builds an engine of random bfloat16 weights (a Qwen3 of 4 layers) in a process of its own and prints its peak of
resident memory, the part of it that is not files, and the size of the plan. Stubs of plugin nodes, for SM120: the
builder of `tensorrt` needs a GPU, and its own memory is not in these numbers. Takes a minute and 4.5 GB of disk.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread
from unittest.mock import patch

CONFIG = {
    "vocab_size": 131072,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
_SAMPLE_S = 0.02


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        for step in (make_checkpoint, build):
            process = get_context("spawn").Process(target=step, args=(Path(root),))
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(1)


def make_checkpoint(root: Path) -> None:
    """A model with random weights, as transformers saves it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_default_dtype(torch.bfloat16)
    Qwen3ForCausalLM(Qwen3Config(**CONFIG)).save_pretrained(root / "target")


def build(root: Path) -> None:
    """Build and print, in this process, whose peak is that of the build."""
    from dflash_trt.backends.tensorrt import build_rank
    from dflash_trt.backends.tensorrt.builder import PlanOptions
    from dflash_trt.compile.build import build_engine
    from dflash_trt.compile.tensorrt_check import CHECK_CAPABILITY
    from dflash_trt.core.config import BuildConfig

    # no option of a build chooses TensorRT-RTX: its engines serve nobody, and the library in them is empty
    library = root / "library.so"
    library.touch()
    options = PlanOptions(flavor="tensorrt_rtx", plugin_library=library, compute_capability=CHECK_CAPABILITY)
    config = BuildConfig(target="target", backend="tensorrt", max_seq_len=2048)
    started_s = time.monotonic()
    with patch.object(build_rank, "plan_options", lambda config, base_dir: options), _peak_of("RssAnon") as anonymous:
        build_engine(
            config, root / "engine", base_dir=root, overwrite=False, command=(), progress=lambda progress: None
        )
    elapsed_s = time.monotonic() - started_s
    weights, plan = root / "target" / "model.safetensors", root / "engine" / "rank0.engine"
    print(f"weights {_gib(weights.stat().st_size)}, plan {_gib(plan.stat().st_size)}, built in {elapsed_s:.0f} s")
    print(f"peak memory {_gib(_status('VmHWM'))}, of it not files {_gib(max(anonymous))}")


@contextmanager
def _peak_of(field: str) -> Iterator[list[int]]:
    """Samples of a size of this process, in bytes: only VmHWM has a peak that the kernel keeps."""
    is_done, samples = Event(), [_status(field)]

    def sample() -> None:
        while not is_done.wait(_SAMPLE_S):
            samples.append(_status(field))

    thread = Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        is_done.set()
        thread.join()


def _status(field: str) -> int:
    """A size of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


if __name__ == "__main__":
    main()
