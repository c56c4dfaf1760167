"""Resources and instructions of the compiled GPU kernels, from their SASS. No GPU is needed.

    python -m scripts.kernel_report [--arch 90a] [--page-size 32] [--only NAME] [--cache DIR]

Kernels are those that PyTorch's launcher runs for a bfloat16 model with head_dim 128, over pages in bfloat16 and FP8,
and those of the gated delta nets of Qwen3.5-27B in blocks of 16.
The inner loop is the one that copies ahead into shared memory: over blocks of keys, or over splits. The prologue is
what stands before the first such copy. Counts are of instructions in the code, not of those executed.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_trt.core.dtype import dtype_name
from dflash_trt.core.state_spec import Recurrent
from dflash_trt.kernels.attention_plan import key_block
from plugins.aot.attention_variants import attention_plan_variant, attention_variants
from plugins.aot.compile import ARCHITECTURES, CompiledKernel, compile_variant, prepare_compiler
from plugins.aot.gated_delta_variants import gated_delta_variants
from plugins.aot.library import default_cache
from plugins.aot.page_variants import draft_context_variant, rotate_and_store_variant
from plugins.aot.variant import KernelVariant, unique_variants

DTYPE, HEAD_DIM = torch.bfloat16, 128
DELTA_NET = Recurrent(
    name="state",
    num_key_heads=16,
    num_value_heads=48,
    key_head_dim=128,
    value_head_dim=128,
    conv_size=4,
    num_records=16,
    dtype=dtype_name(DTYPE),
)
COPIES = ("LDGSTS", "UBLKCP")  # from global to shared memory, without waiting
TITLES = ("kernel", "registers", "stack", "shared KiB", "blocks per SM", "instructions")
LOOP_TITLES = ("prologue", "in the loop", "barriers in it")


@dataclass(frozen=True, kw_only=True)
class InnerLoop:
    """`num_prologue` instructions before the first copy; the others are of one iteration."""

    num_prologue: int
    num_instructions: int
    num_barriers: int


@dataclass(frozen=True, kw_only=True)
class Sass:
    """Instructions in the order of the code, and the index of each label."""

    instructions: tuple[str, ...]
    labels: dict[str, int]

    @classmethod
    def parse(cls, text: str) -> "Sass":
        """Of `nvdisasm -c`."""
        instructions: list[str] = []
        labels: dict[str, int] = {}
        for line in text.splitlines():
            if label := re.match(r"(\.L_x_\d+):", line.strip()):
                labels[label[1]] = len(instructions)
            elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
                instructions.append(instruction[1])
        return cls(instructions=tuple(instructions), labels=labels)

    def loops(self) -> Iterator[tuple[str, ...]]:
        """What each branch backwards repeats, in the order of the code."""
        for index, instruction in enumerate(self.instructions):
            branch = re.search(r"\bBRA\b.*?(\.L_x_\d+)", instruction)
            if branch and self.labels[branch[1]] < index:
                yield self.instructions[self.labels[branch[1]] : index + 1]

    def inner_loop(self) -> InnerLoop | None:
        """None: nothing is copied ahead."""
        first = next((i for i, x in enumerate(self.instructions) if is_copy(x)), None)
        loop = next((loop for loop in self.loops() if any(map(is_copy, loop))), None)
        if first is None or loop is None:
            return None
        num_barriers = sum("BAR.SYNC" in instruction for instruction in loop)
        return InnerLoop(num_prologue=first, num_instructions=len(loop), num_barriers=num_barriers)


def is_copy(instruction: str) -> bool:
    return any(name in instruction for name in COPIES)


def disassemble(cubin: bytes) -> Sass:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        return Sass.parse(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def reported_variants(page_size: int) -> Iterator[KernelVariant]:
    for page_dtype in (DTYPE, torch.float8_e4m3fn):
        for has_block in (False, True):
            yield from attention_variants(
                dtype=DTYPE, page_dtype=page_dtype, head_dim=HEAD_DIM, has_block=has_block, page_size=page_size
            )
        sizes: dict[str, Any] = {"dtype": DTYPE, "page_dtype": page_dtype, "head_dim": HEAD_DIM}
        yield rotate_and_store_variant(**sizes, has_norm=True, has_rope=True, stores_pages=True, has_limits=False)
        yield draft_context_variant(**sizes, has_norm=True)
    keys = key_block(head_dim=HEAD_DIM, dtype=DTYPE)
    for has_block in (False, True):
        yield attention_plan_variant(tile=32, key_block=keys, has_block=has_block)
    yield from gated_delta_variants(DELTA_NET, DTYPE, num_requests=64, is_pooled=False)


def row(kernel: CompiledKernel) -> tuple[str, ...]:
    sass = disassemble(kernel.cubin)
    numbers = (
        kernel.num_registers,
        kernel.stack_bytes,
        f"{kernel.shared_bytes / 1024:.0f}",
        kernel.blocks_per_multiprocessor,
        len(sass.instructions),
    )
    loop = sass.inner_loop()
    of_loop = (loop.num_prologue, loop.num_instructions, loop.num_barriers) if loop else ("", "", "")
    return (kernel.variant, *map(str, (*numbers, *of_loop)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="90a", choices=ARCHITECTURES)
    parser.add_argument("--page-size", type=int, default=32)
    parser.add_argument("--only", default="", metavar="NAME", help="report the kernels whose name contains NAME")
    parser.add_argument("--cache", type=Path, default=default_cache(), metavar="DIR")
    arguments = parser.parse_args()
    prepare_compiler(str(arguments.cache.resolve()))
    titles = (*TITLES, *LOOP_TITLES)
    print(f"| {' | '.join(titles)} |\n|---|{'---:|' * (len(titles) - 1)}")
    for variant in unique_variants(reported_variants(arguments.page_size)):
        if arguments.only not in variant.name:
            continue
        print(f"| {' | '.join(row(compile_variant(variant, arguments.arch)))} |", flush=True)


if __name__ == "__main__":
    main()
