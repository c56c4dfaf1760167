"""K/V tokens of Kimi-K2.6 on eight H200, by plan and by the page budget of engines that are opened.

PYTHONPATH=. python scripts/attention_dp_pages.py [MAX_BATCH_SIZE ...]

In the environment of scripts/cuda_environment. Engines at their published size, whose weights are holes, are opened on
a GPU made of software (software_gpu/README.md): one rank, whose pages are planned from the memory that is free after
its weights. No graphs are captured. `--tp-size 8 --ep-size 8` has places for 64 requests, each rank of `--attention-dp`
for as many as are named (default: 8 and 16).
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest.mock import patch

from dflash_trt.checkpoint.specs import read_specs, with_draft_window
from dflash_trt.cli.yaml_file import read_yaml
from dflash_trt.core.config import build_config_from
from dflash_trt.plan.gpus import gpu_of
from dflash_trt.plan.planning import plan_engine
from dflash_trt.recipes import recipes
from scripts.published_shapes import write_shape
from scripts.recipe_engine import write_engine

_RECIPE: Final = "kimi-k2.6-int4-h200"
_RANKS: Final = 8
_WINDOW: Final = {"draft_window": 4096}
_IS_INSIDE: Final = "ATTENTION_DP_PAGES"


def _fields(max_batch_size: int) -> dict[str, Any]:
    """Of ranks with requests of their own."""
    return _WINDOW | {"attention_dp": True, "max_batch_size": max_batch_size, "max_num_tokens": 1024}


def _opened(fields: dict[str, Any]) -> int:
    """K/V tokens of all ranks, by the page plan of the one that is opened."""
    from dflash_trt.backends.cuda.executor import TorchGpuExecutor
    from dflash_trt.serving.llm import LLM
    from software_gpu.serving.run import alone

    [recipe] = [recipe for recipe in recipes() if recipe.name == _RECIPE]
    with TemporaryDirectory() as directory, alone(0), patch.object(TorchGpuExecutor, "warm_up", lambda *_: None):
        write_engine(recipe, Path(directory), capability=(9, 0), changes=fields)
        with LLM(Path(directory) / "engine", device="cuda") as llm:
            return llm.page_plan.num_tokens * (_RANKS if "attention_dp" in fields else 1)


def _planned(fields: dict[str, Any]) -> int:
    [recipe] = [recipe for recipe in recipes() if recipe.name == _RECIPE]
    config = build_config_from(read_yaml(recipe.path) | fields, source=_RECIPE)
    with TemporaryDirectory() as directory:
        names = [name for name in (config.target, config.drafter) if name is not None]
        pair = read_specs(*(write_shape(Path(directory), name) for name in names))
    return plan_engine(config, with_draft_window(pair, config.draft_window), gpu_of("h200")).num_kv_tokens


def main(sizes: list[int]) -> None:
    print("| each of 8 ranks | by plan | opened |\n|---|---|---|")
    whole = [tokens_of(_WINDOW) for tokens_of in (_planned, _opened)]
    print(f"| `--tp-size 8 --ep-size 8`, 64 requests together | {whole[0]:,} | {whole[1]:,} |")
    for size in sizes:
        own = [tokens_of(_fields(size)) for tokens_of in (_planned, _opened)]
        cells = (f"{tokens:,} ({tokens / of_all:.2f} times)" for tokens, of_all in zip(own, whole, strict=True))
        print(f"| `--attention-dp`, {size} requests | {' | '.join(cells)} |")


if __name__ == "__main__":
    if _IS_INSIDE in os.environ:
        main([int(size) for size in sys.argv[1:]] or [8, 16])
    else:
        from software_gpu.runtime.library import environment

        inside = os.environ | environment("h200", num_devices=_RANKS) | {_IS_INSIDE: "1"}
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=inside, check=False).returncode)
