"""ModelOpt's own exports of tiny hybrids: `python -m tests.quantize.hybrid_export ROOT`, in a process of its own."""

import sys
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch

from tests.quantize.modelopt_export import export_target

EXPORTS: dict[str, tuple[str, Any]] = {  # of a target of this name
    "next-nvfp4": ("next", mtq.NVFP4_DEFAULT_CFG),
    "dense-nvfp4": ("dense", mtq.NVFP4_DEFAULT_CFG),
    "dense-fp8": ("dense", mtq.FP8_DEFAULT_CFG),
}


def main(root: Path) -> None:
    torch.set_num_threads(1)
    for name, (source, config) in EXPORTS.items():
        export_target(root / source, root / name, config)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
