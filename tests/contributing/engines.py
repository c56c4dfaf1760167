"""Engines of the public build, and what they generate."""

from pathlib import Path
from typing import Any

import torch

from dflash_trt import LLM, SamplingParams
from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.engine_dir import EngineDir


def build(target: Path, output: Path, **fields: Any) -> EngineDir:
    """float32, short sequences."""
    config = BuildConfig(target=str(target), **{"dtype": "float32", "max_seq_len": 64} | fields)
    return build_engine(config, output, base_dir=output, overwrite=False, command=(), progress=lambda progress: None)


def generate(engine: EngineDir, prompt: list[int], num_new_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and their log probabilities, with drafts where the engine has a drafter."""
    params = SamplingParams(max_new_tokens=num_new_tokens, logprobs=True, ignore_eos=True)
    with LLM(engine.path, num_threads=1) as llm:
        (result,) = llm.generate([prompt], params)
    assert result.logprobs is not None
    return list(result.token_ids), torch.tensor(result.logprobs)
