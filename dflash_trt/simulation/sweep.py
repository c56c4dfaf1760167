"""Configurations of an engine under loads in simulated time: who gets how many tokens per second."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dflash_trt.core.errors import CapacityError, ConfigError
from dflash_trt.core.expert_exchange import exchange_costs
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.request import Request
from dflash_trt.core.step_plan import ExecutorLimits
from dflash_trt.engine_dir import EngineLimits, PretrainedConfig
from dflash_trt.plan.step_costs import StepClock
from dflash_trt.plan.step_work import EngineWork
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.data_parallel import make_scheduler
from dflash_trt.scheduler.draft_length import FixedDraftLength
from dflash_trt.serving.engine_loop import EngineLoop
from dflash_trt.simulation.acceptance import AcceptanceByPosition
from dflash_trt.simulation.executor import SimulatedExecutor, SimulatedTime
from dflash_trt.simulation.load import Lengths, LoadResult, RequestLoad, drive, result_of

if TYPE_CHECKING:
    from dflash_trt.bench.pareto import Point

_SEED = 20


def layout_name(mapping: Mapping, num_replicas: int) -> str:
    """As `--layout` takes it."""
    return f"{ranks_name(mapping)}x{num_replicas}"


def ranks_name(mapping: Mapping) -> str:
    ranks = f"tp{mapping.tp_size}" if mapping.dp_size == 1 else f"dp{mapping.dp_size}"
    experts = f"ep{mapping.ep_size}" if mapping.ep_size > 1 else ""
    positions = f"dcp{mapping.dcp_size}" if mapping.dcp_size > 1 else ""
    return f"{ranks}{experts}{positions}"


@dataclass(frozen=True, kw_only=True)
class SimulatedEngine:
    """Replicas of one engine. With `num_draft_tokens` 0 the drafter is not used and takes no memory.

    `num_pages` counts one replica, or one of its ranks with requests of their own. `drafter` names the algorithm.
    With `pads_ranks`, all of them compute as many tokens in every step, as those of a TensorRT engine do.
    """

    pretrained_config: PretrainedConfig
    limits: EngineLimits
    num_pages: int
    clock: StepClock
    drafter: str
    num_draft_tokens: int
    acceptance: AcceptanceByPosition | None
    num_replicas: int = 1
    pads_ranks: bool = False

    @property
    def num_gpus(self) -> int:
        return self.pretrained_config.mapping.world_size * self.num_replicas

    @property
    def layout(self) -> str:
        return layout_name(self.pretrained_config.mapping, self.num_replicas)

    @property
    def name(self) -> str:
        drafts = f", K = {self.num_draft_tokens}" if self.num_draft_tokens else ""
        return f"{self.drafter}{drafts}, {self.layout}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Closed loops of N clients, or arrivals per second, over all replicas together.

    Lengths are uniform within `spread_fraction` of the middle, the same requests for every configuration. All prompts
    begin with the same `num_shared_tokens`.
    """

    concurrencies: tuple[int, ...]
    request_rates_per_s: tuple[float, ...]
    lengths: Lengths
    spread_fraction: float
    requests_per_client: int
    duration_s: float  # how long requests arrive
    num_shared_tokens: int = 0

    def loads(self, num_replicas: int) -> list[RequestLoad]:
        """Loads of one replica: an even share of the clients, at least one, or of the arrivals."""
        load = partial(RequestLoad, reuses_prefixes=self.num_shared_tokens > 0, seed=_SEED)
        closed = [count // num_replicas for count in self.concurrencies if count >= num_replicas]
        loads = [load(requests=self._requests(count * self.requests_per_client), concurrency=count) for count in closed]
        for rate in self.request_rates_per_s:
            share = rate / num_replicas
            count = max(1, round(share * self.duration_s))
            loads.append(load(requests=self._requests(count), request_rate_per_s=share))
        return loads

    def _requests(self, count: int) -> list[Request]:
        dice, spread = random.Random(_SEED), self.spread_fraction

        def drawn(middle: int) -> int:
            return max(1, round(middle * dice.uniform(1 - spread, 1 + spread)))

        prompt, output = self.lengths.num_prompt_tokens, self.lengths.num_output_tokens
        lengths = [Lengths(num_prompt_tokens=drawn(prompt), num_output_tokens=drawn(output)) for _ in range(count)]
        return [item.request(index, num_shared_tokens=self.num_shared_tokens) for index, item in enumerate(lengths)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedPoint:
    """One configuration under one load. Loads and speeds are sums over replicas.

    `floor_fraction` is the fraction of the device's time that floors of the same steps would take, and
    `device_s_by_source` says where the times of its kernels come from.
    """

    configuration: str
    drafter: str
    layout: str
    num_draft_tokens: int
    num_gpus: int
    concurrency: int | None
    request_rate_per_s: float | None
    output_tok_per_s: float
    output_tok_per_s_per_gpu: float
    tok_per_s_per_user: float | None
    time_to_first_token_p50_s: float
    time_to_first_token_p99_s: float
    time_per_output_token_p50_s: float | None
    time_per_output_token_p99_s: float | None
    acceptance_length: float | None
    mean_step_s: float
    floor_fraction: float
    device_s_by_source: dict[str, float]

    @property
    def load(self) -> str:
        return str(self.concurrency) if self.concurrency else f"{self.request_rate_per_s:g}/s"

    @property
    def load_in_words(self) -> str:
        return f"{self.concurrency} clients" if self.concurrency else f"{self.request_rate_per_s:g} requests/s"


def sweep(
    engines: Sequence[SimulatedEngine], workload: Workload, *, progress: Callable[[int, int, str], None]
) -> list[SimulatedPoint]:
    """Every configuration under every load that its replicas can share.

    `progress` is told each point's number, how many there are, and which it is.
    """
    loads = [workload.loads(engine.num_replicas) for engine in engines]
    points = []
    for engine, of_engine in zip(engines, loads, strict=True):
        work = EngineWork(
            engine.pretrained_config,
            has_drafter=engine.num_draft_tokens > 0,
            exchange_costs=None if engine.pads_ranks else exchange_costs(engine.clock.gpu.capability),
        )
        for load in of_engine:
            points.append(_point(engine, work, load))
            progress(len(points), sum(map(len, loads)), f"{engine.name}, {points[-1].load_in_words}")
    return points


def simulate(engine: SimulatedEngine, load: RequestLoad, work: EngineWork) -> tuple[LoadResult, SimulatedExecutor]:
    """One replica under a load, and the executor that counted its steps."""
    time = SimulatedTime()
    limits = executor_limits(engine, load)
    executor = SimulatedExecutor(
        limits, work, engine.clock, time, acceptance=engine.acceptance, pads_ranks=engine.pads_ranks
    )
    config = SchedulerConfig(enable_prefix_caching=load.reuses_prefixes)
    scheduler = make_scheduler(
        limits, config, FixedDraftLength(engine.num_draft_tokens), num_ranks=engine.pretrained_config.mapping.dp_size
    )
    loop = EngineLoop(executor, scheduler, overlaps=engine.clock.costs.is_host_hidden, clock=time, records_steps=False)
    try:
        return result_of(*drive(loop, load, clock=time, skip_to=time.reach)), executor
    finally:
        loop.close()


def executor_limits(engine: SimulatedEngine, load: RequestLoad) -> ExecutorLimits:
    """Raises CapacityError: a request of the load has no room."""
    limits = engine.limits
    longest = max(len(item.prompt_token_ids) + item.sampling.max_new_tokens for item in load.requests)
    room = min(limits.max_seq_len, engine.num_pages * limits.page_size)
    if longest > room:
        hint = "Sweep shorter requests, or plan a larger --max-seq-len."
        raise CapacityError.about(
            engine.name, expected=f"requests of at most {room} tokens", found=str(longest), hint=hint
        )
    return ExecutorLimits(
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        max_num_tokens=limits.max_num_tokens,
        max_draft_len=engine.num_draft_tokens,
        page_size=limits.page_size,
        num_pages=engine.num_pages,
    )


def _point(engine: SimulatedEngine, work: EngineWork, load: RequestLoad) -> SimulatedPoint:
    result, executor = simulate(engine, load, work)
    replicas = engine.num_replicas
    per_s = result.output_tok_per_s * replicas
    return SimulatedPoint(
        configuration=engine.name,
        drafter=engine.drafter,
        layout=engine.layout,
        num_draft_tokens=engine.num_draft_tokens,
        num_gpus=engine.num_gpus,
        concurrency=load.concurrency * replicas if load.concurrency else None,
        request_rate_per_s=load.request_rate_per_s * replicas if load.request_rate_per_s else None,
        output_tok_per_s=per_s,
        output_tok_per_s_per_gpu=per_s / engine.num_gpus,
        tok_per_s_per_user=result.tok_per_s_per_user,
        time_to_first_token_p50_s=result.time_to_first_token_p50_s,
        time_to_first_token_p99_s=result.time_to_first_token_p99_s,
        time_per_output_token_p50_s=result.time_per_output_token_p50_s,
        time_per_output_token_p99_s=result.time_per_output_token_p99_s,
        acceptance_length=result.acceptance_length,
        mean_step_s=executor.device_s / executor.num_steps,
        floor_fraction=executor.floor_s / executor.device_s,
        device_s_by_source=dict(executor.known_s),
    )


def curves(points: Sequence[SimulatedPoint], key: Callable[[SimulatedPoint], str]) -> dict[str, list[Point]]:
    """For the figure: a curve for each value of `key`, of the best configurations where a key has several."""
    from dflash_trt.bench.pareto import Point, frontier

    found: dict[str, list[Point]] = {}
    for point in points:
        if point.tok_per_s_per_user is not None:
            drafts = f" K{point.num_draft_tokens}" if point.num_draft_tokens else ""
            label = point.load if key(point) == point.configuration else f"{point.layout}{drafts}: {point.load}"
            height = point.output_tok_per_s_per_gpu
            found.setdefault(key(point), []).append(
                Point(per_user=point.tok_per_s_per_user, per_gpu=height, label=label)
            )
    is_whole = all(key(point) == point.configuration for point in points)
    return found if is_whole else {name: frontier(found[name]) for name in found}


def best(points: Sequence[SimulatedPoint], per_user: float) -> SimulatedPoint | None:
    """The most tok/s per GPU among loads with at least `per_user` tok/s per user; None if there is none."""
    enough = [point for point in points if (point.tok_per_s_per_user or 0.0) >= per_user]
    return max(enough, key=lambda point: point.output_tok_per_s_per_gpu, default=None)


def check_drafts(engine: SimulatedEngine) -> None:
    """Raises ConfigError: K is beyond what the drafter makes, or what its acceptance is known for."""
    known = len(engine.acceptance.fractions) if engine.acceptance else 0
    if engine.num_draft_tokens > min(known, engine.limits.max_draft_len):
        expected = f"K of at most {min(known, engine.limits.max_draft_len)}"
        hint = f"The drafter makes {engine.limits.max_draft_len} drafts, and acceptance is given for {known} positions."
        raise ConfigError.about(engine.name, expected=expected, found=str(engine.num_draft_tokens), hint=hint)
