"""A program: attention with one barrier of its kernel removed at a time. Writes its line and what was found.

Its argument is the architecture; of SM100 waits, commits and fences of tcgen05 are removed, too. What the step does not
reach is left out.
"""

import re
import sys

import torch

from software_gpu.ptx.library import PtxError, PtxKernel
from software_gpu.triton_driver import install

ARCHITECTURE = int(sys.argv[1])
gpu = install(architecture=ARCHITECTURE, finds_races=True)

from dflash_trt.kernels.attention_launch import allocate_workspace, attend_pages  # noqa: E402
from tests.kernels.attention_steps import Heads, Step, make_tensors  # noqa: E402

TCGEN05 = (
    r"^\s*(bar\.sync|fence\.proxy|tcgen05\.wait|@%p\d+ tcgen05\.commit)[^\n]*\n",
    r"^\{\s*(@[^\n]*\n\s*)?\.reg \.pred complete;[^}]*\}",  # a wait for an mbarrier
)
BARRIERS = {90: r"^\s*bar\.sync[^\n]*\n", 100: "|".join(TCGEN05)}
# A verify block's tile is multiplied by mma.sync, a prompt's by tcgen05.
ROWS = {90: (4, 3), 100: (40, 3)}


def main() -> None:
    heads = Heads(num_heads=8, num_kv_heads=2, head_dim=128)
    step = Step(
        rows=ROWS[ARCHITECTURE],
        contexts=(600, 60) if ARCHITECTURE == 90 else (60, 60),
        heads=heads,
        page_size=32,
        dtype=torch.bfloat16,
    )
    tensors = make_tensors(step)

    def attend() -> torch.Tensor:
        workspace = allocate_workspace(kv_heads=2, head_dim=128, device=torch.device("cpu"))
        return attend_pages(
            tensors.q, tensors.pages, tensors.requests, step.options, workspace=workspace, num_verify_rows=4
        )

    expected = attend()
    kernels = [(key, kernel) for key, kernel in gpu.kernels.items() if kernel.entry == "attention_kernel"]
    key, whole = next((key, kernel) for key, kernel in kernels if ARCHITECTURE == 90 or "tcgen05.mma" in kernel.ptx)

    def found(replacement: str) -> str:
        gpu.kernels[key] = PtxKernel(
            whole.ptx[: barrier.start()] + replacement + whole.ptx[barrier.end() :], whole.entry
        )
        try:
            return "equal" if torch.equal(attend(), expected) else "other results"
        except PtxError as error:
            return str(error).splitlines()[0]

    for barrier in re.finditer(BARRIERS[ARCHITECTURE], whole.ptx, re.MULTILINE):
        if found("trap;\n") == "trap":  # it is executed
            sys.stdout.write(f"{whole.ptx.count(chr(10), 0, barrier.start()) + 1} {found('')}\n")


if __name__ == "__main__":
    main()
