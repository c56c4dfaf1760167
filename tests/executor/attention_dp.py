"""Requests over an engine of any ranks, through its loop."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dflash_trt.core.request import GenerationOutput, Request, SamplingParams
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.serving.local_engine import LocalEngine, checked_config, open_local_engine
from tests.executor.rank_engines import KV_CACHE_BYTES
from tests.traces import PROMPTS

K = 3
SHARED = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


@contextmanager
def engine_loop(engine: EngineDir, **options: Any) -> Iterator[LocalEngine]:
    fields = {"device": "cpu", "num_threads": 1, "kv_cache_bytes": KV_CACHE_BYTES, "draft_length": K} | options
    loop = open_local_engine(engine, checked_config(engine, RuntimeConfig(**fields)))
    try:
        yield loop
    finally:
        loop.close()


def requests(temperature: float = 0.0, **fields: Any) -> list[Request]:
    """Of different lengths, some of which share a beginning."""
    prompts = [*PROMPTS, *([*SHARED, i, i + 1] for i in range(4)), [2, 4, 6], [11] * 9]
    return [
        Request(
            request_id=str(i),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_new_tokens=6 + i, temperature=temperature, top_k=8),
            seed=i,
            **fields,
        )
        for i, prompt in enumerate(prompts)
    ]


def run(loop: LocalEngine, wanted: list[Request], *, at_once: int = 100) -> list[GenerationOutput]:
    """Submit the first `at_once`, then one more a step."""
    streams, waiting = [], list(wanted)
    while waiting:
        now, waiting = waiting[:at_once], waiting[at_once:]
        at_once = 1
        streams += [loop.submit(request) for request in now]
        loop.step()
    while loop.step():
        loop.check_integrity()
    return [stream.result(timeout_s=1) for stream in streams]
