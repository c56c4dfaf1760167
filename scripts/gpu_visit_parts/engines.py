"""Whole engines of the demo pair: the GPU's tokens against the CPU's, and times and memory from opening to closing."""

import importlib.util
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from dflash_trt import LLM, SamplingParams
from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.demo import PROMPTS
from gpu_visit_parts.results import Row, Tables
from gpu_visit_parts.setting import SETTING, Case, LeftOutError

DEMO = PROMPTS.parent

_Build = dict[str, Any]
_BUILDS: dict[str, _Build] = {
    "float32": {},
    "float32, EAGLE-3": {"drafter": str(DEMO / "eagle3")},
    "float32, autoregressive": {"drafter": None},
    "bfloat16": {"dtype": "bfloat16"},
    "FP8 weights and pages": {
        "quantization": {"target": "fp8", "drafter": "fp8", "kv_cache": "fp8", "calibration": {"prompts": str(PROMPTS)}}
    },
    "FP8 blocks": {"quantization": "fp8_block"},
    "NVFP4 weights": {"quantization": "nvfp4_w4a16"},
    "INT4 weights": {"quantization": "int4"},
}
_SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 1}
_RULES = {"repetition_penalty": 1.2, "logit_bias": ((11, 2.0),), "logprobs": True, "top_logprobs": 3}
_REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": _SAMPLED,
    "rules": _RULES,
    "constrained": {"regex": "[a-z ]{20,40}"},
}


def cases() -> Iterator[Case]:
    for name in list(_BUILDS)[:1] if SETTING.is_dry_run else _BUILDS:
        yield Case(name=f"demo, {name}", run=partial(_compared, name))


def _compared(name: str) -> Tables:
    """Every kind of request, some in one batch; the same engine on the CPU and on the GPU."""
    if "calibration" in str(_BUILDS[name]) and importlib.util.find_spec("modelopt") is None:
        raise LeftOutError("calibration needs ModelOpt")
    with tempfile.TemporaryDirectory() as directory:
        engine = _built(name, Path(directory) / "engine")
        expected, _ = _served(engine, "cpu")
        found, row = _served(engine, SETTING.device.type)
    texts = [_agreement(name, kind, found[kind], expected[kind]) for kind in found]
    return {"engines": [{"engine": name} | row], "tokens on GPU and CPU": texts}


def _served(engine: Path, device: str) -> tuple[dict[str, list[Any]], Row]:
    is_small = SETTING.is_dry_run
    prompts = _prompts()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    started_s = time.perf_counter()
    llm = LLM(engine, device=device, kv_cache_bytes=1 << 28)
    opened_s = time.perf_counter()
    outputs = {}
    with llm:
        llm.generate(prompts[0], SamplingParams(max_new_tokens=4))
        generated_s = time.perf_counter()
        for kind, fields in _REQUESTS.items():
            sampling = SamplingParams(max_new_tokens=8 if is_small else 64, ignore_eos=kind != "constrained", **fields)
            outputs[kind] = llm.generate(prompts, sampling)
        mixed = [SamplingParams(max_new_tokens=8 if is_small else 64, **fields) for fields in _REQUESTS.values()]
        outputs["mixed in a batch"] = llm.generate(prompts[: len(mixed)], mixed)
        ended_s = time.perf_counter()
    closed_s = time.perf_counter()
    num_tokens = sum(len(output.token_ids) for batch in outputs.values() for output in batch)
    row: Row = {
        "open_s": opened_s - started_s,
        "first_request_s": generated_s - opened_s,
        "tok_per_s": num_tokens / (ended_s - generated_s),
        "close_s": closed_s - ended_s,
    }
    if device == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return outputs, row


def _agreement(name: str, kind: str, found: Sequence[Any], expected: Sequence[Any]) -> Row:
    """Texts that are equal, tokens before the first that differs, and log probabilities of those."""
    equal = [a.token_ids == b.token_ids for a, b in zip(found, expected, strict=True)]
    lens = [_num_equal(a.token_ids, b.token_ids) for a, b in zip(found, expected, strict=True)]
    row: Row = {
        "engine": name,
        "requests": kind,
        "texts": len(equal),
        "equal": sum(equal),
        "refused": "; ".join({output.error for output in (*found, *expected) if output.error}),
        "tokens": sum(len(output.token_ids) for output in expected),
        "equal_tokens": sum(lens),
        "acceptance": _mean(output.acceptance_length for output in found),
        "acceptance_cpu": _mean(output.acceptance_length for output in expected),
    }
    if found[0].logprobs is not None:
        pairs = [
            abs(a - b)
            for one, other, n in zip(found, expected, lens, strict=True)
            for a, b in zip(one.logprobs[:n], other.logprobs[:n], strict=True)
        ]
        row["largest_logprob_difference"] = max(pairs, default=math.nan)
    return row


def _num_equal(found: Sequence[int], expected: Sequence[int]) -> int:
    pairs = enumerate(zip(found, expected, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(found), len(expected)))


def _mean(values: Iterator[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


@cache
def _prompts() -> list[str]:
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    return [row["prompt"][-100:] for row in rows[:4]] if SETTING.is_dry_run else [row["prompt"] for row in rows]


def _built(name: str, output: Path) -> Path:
    fields = {"drafter": str(DEMO / "drafter"), "dtype": "float32"} | _BUILDS[name]
    sizes = {"max_batch_size": 2 if SETTING.is_dry_run else 16, "max_seq_len": 512}
    if SETTING.is_dry_run:
        sizes |= {"max_seq_len": 128, "max_num_tokens": 64}
    config = BuildConfig(target=str(DEMO / "target"), **(sizes | fields))
    build_engine(config, output, base_dir=DEMO, overwrite=True, command=("build",), progress=lambda _: None)
    return output
