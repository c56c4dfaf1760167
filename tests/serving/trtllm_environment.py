"""An environment of its own for the stand-in of TensorRT-LLM."""

import sysconfig
import venv
from pathlib import Path

STAND_IN = Path(__file__).parent / "trtllm_stand_in"


def stand_in_python(directory: Path) -> str:
    """Make an environment with the stand-in, and transformers for it, but without dflash-trt; its interpreter."""
    venv.create(directory, symlinks=True)
    site = sysconfig.get_path("purelib", vars={"base": str(directory), "platbase": str(directory)})
    (Path(site) / "stand_in.pth").write_text(f"{STAND_IN}\n{sysconfig.get_path('purelib')}\n")
    return str(directory / "bin/python")
