"""Check an engine of backend tensorrt_llm where TensorRT-LLM is. See scripts/trtllm_check."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import DFlashError, EngineDirError
from dflash_trt.core.request import GenerationOutput, SamplingParams
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.serving.llm import LLM
from dflash_trt.serving.tensorrt_llm.engine import PYTHON, checked_trtllm_config
from dflash_trt.serving.tensorrt_llm.settings import llm_args

PROMPTS = (
    "def fibonacci(n):",
    "The capital of France is",
    "import numpy as np\n\n",
    "Q: What is 17 * 23? A: Let us think step by step.",
)
_VALIDATE = (
    "import json, sys; from tensorrt_llm.llmapi.llm_args import TorchLlmArgs; import tensorrt_llm; "
    "TorchLlmArgs(**json.load(sys.stdin)); print(tensorrt_llm.__version__)"
)


@dataclass(frozen=True, kw_only=True)
class Side:
    """What one runtime made of the prompts."""

    outputs: list[GenerationOutput]
    wall_time_s: float

    @property
    def acceptance_length(self) -> float | None:
        """Of all requests together."""
        num_steps = sum(output.num_verify_steps for output in self.outputs)
        return sum(output.num_emitted_by_verify for output in self.outputs) / num_steps if num_steps else None

    @property
    def output_tok_per_s(self) -> float:
        return sum(len(output.token_ids) for output in self.outputs) / self.wall_time_s


def validated_version(engine: EngineDir, interpreter: str) -> str:
    """The version of TensorRT-LLM, whose own classes take the engine's arguments.

    Raises:
        EngineDirError: they do not.
    """
    args = llm_args(engine, checked_trtllm_config(engine, RuntimeConfig(), {}))
    done = subprocess.run(
        [interpreter, "-c", _VALIDATE], input=json.dumps(args), capture_output=True, text=True, check=False
    )
    if done.returncode:
        found = done.stderr.strip().rpartition("\n")[2]
        raise EngineDirError.about(f"arguments of {engine.path}", expected="those of TorchLlmArgs", found=found)
    return done.stdout.strip().rpartition("\n")[2]


def torch_engine(engine: EngineDir, output: Path) -> EngineDir:
    """An engine of backend torch from the exported checkpoints."""
    manifest = engine.manifest
    limits = manifest.build_config
    config = BuildConfig(
        target="target",
        drafter="drafter" if manifest.draft is not None else None,
        dtype=manifest.pretrained_config.dtype,
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        max_num_tokens=limits.max_num_tokens,
        max_draft_len=limits.max_draft_len,
    )
    return build_engine(
        config, output, base_dir=engine.path, overwrite=False, command=sys.argv, progress=lambda report: None
    )


def run(path: Path, max_new_tokens: int) -> Side:
    with LLM(path) as llm:
        llm.generate(PROMPTS[0], SamplingParams(max_new_tokens=8))  # warm-up
        started_s = time.perf_counter()
        outputs = llm.generate(list(PROMPTS), SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True))
        return Side(outputs=outputs, wall_time_s=time.perf_counter() - started_s)


def common_prefix_fraction(ours: Sequence[int], theirs: Sequence[int]) -> float:
    """Of the longer text, up to the first different token; 1 for equal ones."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    num_equal = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    return num_equal / max(len(ours), len(theirs), 1)


def report(engine: EngineDir, version: str, theirs: Side, ours: Side) -> dict[str, Any]:
    pairs = [(a.token_ids, b.token_ids) for a, b in zip(theirs.outputs, ours.outputs, strict=True)]
    errors = [output.error for side in (theirs, ours) for output in side.outputs if output.error is not None]
    return {
        "engine": engine.path.name,
        "family": engine.manifest.target.family,
        "tensorrt_llm_version": version,
        "num_prompts": len(pairs),
        "num_equal_texts": sum(a == b for a, b in pairs),
        "common_prefix_fraction": sum(common_prefix_fraction(a, b) for a, b in pairs) / len(pairs),
        "acceptance_length": theirs.acceptance_length,
        "torch_acceptance_length": ours.acceptance_length,
        "output_tok_per_s": theirs.output_tok_per_s,
        "errors": errors,
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--min-common-prefix", type=float, default=0.5, help="of texts; below 1, for dtypes have ties")
    told = parser.parse_args(words)
    try:
        engine = EngineDir.open(told.engine)
        version = validated_version(engine, os.environ.get(PYTHON) or sys.executable)
        theirs = run(engine.path, told.max_new_tokens)
        with tempfile.TemporaryDirectory() as directory:
            ours = run(torch_engine(engine, Path(directory) / "engine").path, told.max_new_tokens)
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    found = report(engine, version, theirs, ours)
    print(json.dumps(found))
    return 0 if not found["errors"] and found["common_prefix_fraction"] >= told.min_common_prefix else 1


if __name__ == "__main__":
    sys.exit(main())
