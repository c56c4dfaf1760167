"""Engines of one pair for one rank and for two, opened on the CPU."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.executor.opening import EngineExecutor, open_executor
from tests.factories import make_speculators_drafter, make_target, make_zlab_drafter

KV_CACHE_BYTES = 1 << 20

# Every linear in a format of two ranks; 96 of the drafter's columns are 48 for each, whole blocks.
PACKED = {
    "target": "nvfp4_w4a16",
    "drafter": "fp8",
    "lm_head": "fp8",
    "kv_cache": "fp8",
    "calibration": {"prompts": "prompts.jsonl"},
}


def make_zlab_pair(root: Path, *, draft: Mapping[str, Any] = MappingProxyType({}), **target: Any) -> None:
    """A drafter with biases and the target's head; keys of both configs."""
    path = make_target(root / "target", vocab_size=12, tokenizer=False, **target)
    make_zlab_drafter(root / "drafter", target_dir=path, attention_bias=True, intermediate_size=96, **draft)


def make_speculators_pair(root: Path) -> None:
    """A target with biases everywhere and tied embeddings; a drafter with a head and a vocabulary of its own."""
    biases = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    path = make_target(root / "target", vocab_size=12, tokenizer=False, family="llama", **biases)
    make_speculators_drafter(root / "drafter", target_dir=path, draft_vocab_size=8)


def write_calibration_prompts(root: Path) -> None:
    rows = [{"prompt_token_ids": [(i * k) % 12 for i in range(40)]} for k in (1, 5, 7, 11)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def build(root: Path, *, tp_size: int, overwrite: bool = False, **fields: Any) -> EngineDir:
    """`root` holds target and drafter."""
    names = {"target": "target", "drafter": "drafter", "dtype": "float32"}
    sizes = {"tp_size": tp_size, "max_seq_len": 64, "page_size": 4, "max_batch_size": 8}
    config = BuildConfig(**(names | sizes | fields))
    return build_engine(
        config, root / f"tp{tp_size}", base_dir=root, overwrite=overwrite, command=("build",), progress=lambda _: None
    )


@contextmanager
def opened(engine: EngineDir, **options: Any) -> Iterator[Any]:
    fields = {"device": "cpu", "num_threads": 1, "kv_cache_bytes": KV_CACHE_BYTES} | options
    executor: EngineExecutor = open_executor(engine, RuntimeConfig(**fields))
    try:
        yield executor
    finally:
        executor.close()


@contextmanager
def skipping(local: Any, skipped: int) -> Iterator[None]:
    """A rank's executor takes part in all exchanges, but ignores what comes of number `skipped`."""
    ranks = local._ranks
    local._ranks = _Skips(ranks, skipped)
    yield
    local._ranks = ranks


class _Skips:
    """A RankGroup that gives back its own part of exchange number `skipped`."""

    def __init__(self, ranks: Any, skipped: int) -> None:
        self._ranks, self._skipped, self._num_calls = ranks, skipped, 0
        self.num_ranks = ranks.num_ranks

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        own = x.clone()
        return self._own_or(own, self._ranks.all_reduce(x))

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        return self._own_or(torch.cat([x, x], dim=-1), self._ranks.all_gather_columns(x))

    def all_gather_rows(self, x: torch.Tensor, num_rows: Sequence[int]) -> torch.Tensor:
        return self._own_or(torch.cat([x, x]), self._ranks.all_gather_rows(x, num_rows))

    def all_to_all_by_counts(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        return self._own_or(x, self._ranks.all_to_all_by_counts(x, sent, received))

    def _own_or(self, own: torch.Tensor, exchanged: torch.Tensor) -> torch.Tensor:
        self._num_calls += 1
        return own if self._num_calls == self._skipped + 1 else exchanged
