"""A program: attention with one barrier of its kernel removed at a time. Writes its line and what was found."""

import re
import sys

import torch

from software_gpu.ptx.library import PtxError, PtxKernel
from software_gpu.triton_driver import install

gpu = install(finds_races=True)

from dflash_trt.kernels.attention_launch import allocate_workspace, attend_pages  # noqa: E402
from tests.kernels.attention_steps import Heads, Step, make_tensors  # noqa: E402


def main() -> None:
    heads = Heads(num_heads=8, num_kv_heads=2, head_dim=128)
    step = Step(rows=(4, 3), contexts=(600, 60), heads=heads, page_size=32, dtype=torch.bfloat16)
    tensors = make_tensors(step)

    def attend() -> torch.Tensor:
        workspace = allocate_workspace(kv_heads=2, head_dim=128, device=torch.device("cpu"))
        return attend_pages(
            tensors.q, tensors.pages, tensors.requests, step.options, workspace=workspace, num_verify_rows=4
        )

    expected = attend()
    key, whole = next((key, kernel) for key, kernel in gpu.kernels.items() if kernel.entry == "attention_kernel")
    for barrier in re.finditer(r"^\s*bar\.sync[^\n]*\n", whole.ptx, re.MULTILINE):
        gpu.kernels[key] = PtxKernel(whole.ptx[: barrier.start()] + whole.ptx[barrier.end() :], whole.entry)
        try:
            found = "equal" if torch.equal(attend(), expected) else "other results"
        except PtxError as error:
            found = str(error).splitlines()[0]
        sys.stdout.write(f"{whole.ptx.count(chr(10), 0, barrier.start()) + 1} {found}\n")


if __name__ == "__main__":
    main()
