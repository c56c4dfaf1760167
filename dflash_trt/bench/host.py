"""Host cost per step with a free executor: planning, packing, reading, committing, delivering."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dflash_trt.core.request import Request
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.core.sampling import SamplingParams
from dflash_trt.core.step_plan import ExecutorLimits
from dflash_trt.executor.idle import IdleExecutor
from dflash_trt.executor.ranks.executor import RankedExecutor, start_ranks
from dflash_trt.executor.ranks.messages import OpenShard
from dflash_trt.executor.ranks.shard import ShardExecutor, ShardOptions
from dflash_trt.executor.threads import default_num_threads
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop

if TYPE_CHECKING:
    from dflash_trt.backends.torch.process_group import ProcessRanks, StoreAddress

_NUM_WARM_STEPS = 20
_PAGE_SIZE = 32
_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """Medians over steps of verify blocks, of CPU time of the engine's thread.

    `between_ms` is the part between two dependent submissions: from the moment that a step's result is there to the
    end of the next submission. In the chained loop a device waits for it only if the step in its queue is shorter.
    """

    num_requests: int
    num_ranks: int
    is_chained: bool
    num_steps: int
    step_ms: float
    between_ms: float


def measure_host(
    num_requests: int,
    *,
    num_steps: int = 200,
    num_draft_tokens: int = 7,
    num_prompt_tokens: int = 1000,
    is_chained: bool = True,
    num_ranks: int = 1,
) -> HostReport:
    """Run `num_steps` steps of `num_requests` decoding requests, after their prompts and warm-up steps.

    With several ranks this process is rank 0; the others are its workers, on devices of the same kind.
    """
    num_rounds = _NUM_WARM_STEPS + num_steps + 4
    max_new_tokens = num_rounds * (num_draft_tokens + 1)
    limits = _limits(num_requests, num_draft_tokens, num_prompt_tokens + max_new_tokens)
    executor = IdleExecutor(limits)
    ranked = _ranked(executor, num_ranks) if num_ranks > 1 else None
    loop = EngineLoop(ranked or executor, Scheduler(limits), overlaps=is_chained)
    streams = [
        loop.submit(
            Request(
                request_id=f"request-{number}",
                prompt_token_ids=tuple(range(number, number + num_prompt_tokens)),
                sampling=SamplingParams(max_new_tokens=max_new_tokens),
                stop_token_ids=frozenset({1}),
            )
        )
        for number in range(num_requests)
    ]
    num_prefill_steps = -(-num_requests * num_prompt_tokens // limits.max_num_tokens)
    for _ in range(num_prefill_steps + _NUM_WARM_STEPS):
        loop.step()
    executor.between_s.clear()
    costs = [_step_cost_s(loop, executor) for _ in range(num_steps)]
    assert not any(stream.is_done for stream in streams), "all requests decode while steps are measured"
    report = HostReport(
        num_requests=num_requests,
        num_ranks=num_ranks,
        is_chained=is_chained,
        num_steps=num_steps,
        step_ms=1e3 * statistics.median(costs),
        between_ms=1e3 * statistics.median(executor.between_s),
    )
    for stream in streams:
        stream.cancel()
    loop.close()
    if ranked is not None:
        ranked.close()
    return report


@dataclass(frozen=True, kw_only=True, slots=True)
class _OpenIdle(OpenShard):
    """Every rank has a copy of the executor, and with it the same results."""

    executor: IdleExecutor

    def open(self, ranks: ProcessRanks) -> ShardExecutor:
        return cast(ShardExecutor, self.executor)


def _ranked(executor: IdleExecutor, num_ranks: int) -> RankedExecutor:
    def order(rendezvous: Path | StoreAddress) -> OpenShard:
        options = ShardOptions(
            num_ranks=num_ranks,
            rendezvous=rendezvous,
            config=RuntimeConfig(device="cpu", num_threads=default_num_threads(num_ranks)),
            timeout_s=_TIMEOUT_S,
            load_timeout_s=_TIMEOUT_S,
            draft_lens=None,
        )
        return _OpenIdle(engine_dir="", rank=1, options=options, executor=executor)

    return start_ranks(order, lambda ranks, options: cast(ShardExecutor, executor))


def _step_cost_s(loop: EngineLoop, executor: IdleExecutor) -> float:
    started_s, own_s = time.thread_time(), executor.own_s
    loop.step()
    return time.thread_time() - started_s - (executor.own_s - own_s)


def _limits(num_requests: int, num_draft_tokens: int, max_seq_len: int) -> ExecutorLimits:
    return ExecutorLimits(
        max_batch_size=num_requests,
        max_seq_len=max_seq_len,
        max_num_tokens=max(8192, num_requests * (num_draft_tokens + 1)),
        max_draft_len=num_draft_tokens,
        page_size=_PAGE_SIZE,
        num_pages=num_requests * (-(-max_seq_len // _PAGE_SIZE) + 1),
    )
