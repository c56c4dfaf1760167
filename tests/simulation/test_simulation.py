"""Simulated loads: times are sums of the steps' times, acceptance is what was given, and nothing is lost."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from dflash_trt.bench.machine_probes import CPU_SIZES, probe_specs
from dflash_trt.core.errors import CapacityError, ConfigError
from dflash_trt.engine_dir import EngineLimits, PretrainedConfig
from dflash_trt.plan.gpus import gpu_of
from dflash_trt.plan.step_costs import StepClock, assumed_costs
from dflash_trt.plan.step_work import ComputedRows, EngineWork
from dflash_trt.simulation.acceptance import AcceptanceByPosition, read_acceptance
from dflash_trt.simulation.load import Lengths, RequestLoad
from dflash_trt.simulation.sweep import SimulatedEngine, Workload, best, curves, simulate, sweep

TARGET, DRAFT = probe_specs(CPU_SIZES[0])
LIMITS = EngineLimits(max_batch_size=8, max_seq_len=512, max_num_tokens=256, max_draft_len=7, page_size=16)
H200 = gpu_of("h200")
COSTS = assumed_costs(H200).model_copy(
    update={"is_host_hidden": False, "step_s": 5e-4, "host_step_s": 1e-4, "host_request_s": 1e-5}
)
GIVEN = AcceptanceByPosition((0.9, 0.6, 0.5))
PLAIN = SimulatedEngine(
    pretrained_config=PretrainedConfig(target=TARGET, draft=DRAFT, dtype="bfloat16"),
    limits=LIMITS,
    num_pages=400,
    clock=StepClock(H200, COSTS),
    drafter="AR",
    num_draft_tokens=0,
    acceptance=None,
)
DRAFTED = replace(PLAIN, drafter="DFlash", num_draft_tokens=3, acceptance=GIVEN)


def load(*lengths: tuple[int, int], concurrency: int | None = 1, rate: float | None = None) -> RequestLoad:
    """(prompt, answer) of each request."""
    requests = [
        Lengths(num_prompt_tokens=prompt, num_output_tokens=answer).request(i)
        for i, (prompt, answer) in enumerate(lengths)
    ]
    return RequestLoad(requests=requests, concurrency=concurrency, request_rate_per_s=rate)


def run(engine: SimulatedEngine, given: RequestLoad):
    return simulate(engine, given, EngineWork(engine.pretrained_config, has_drafter=engine.num_draft_tokens > 0))


def step_s(tokens: int, context: int) -> float:
    step = ComputedRows(num_tokens=np.array([tokens]), context_lens=np.array([context]), num_draft_tokens=0)
    return StepClock(H200, COSTS).time(EngineWork(PLAIN.pretrained_config, has_drafter=False).of(step)).total_s


def test_one_request_takes_its_prompt_and_a_step_for_every_token() -> None:
    result, executor = run(PLAIN, load((100, 6)))
    times = [step_s(100, 0), *(step_s(1, 100 + i) for i in range(5))]
    assert executor.num_steps == 6
    assert result.duration_s == pytest.approx(sum(times), rel=1e-9)
    assert result.time_to_first_token_p50_s == pytest.approx(times[0])
    assert result.time_per_output_token_p50_s == pytest.approx(sum(times[1:]) / 5)
    assert result.tok_per_s_per_user == pytest.approx(5 / sum(times[1:]))


def test_a_prompt_longer_than_a_step_takes_several() -> None:
    result, executor = run(PLAIN, load((300, 1)))
    assert executor.num_steps == 2
    assert executor.floor_s > run(PLAIN, load((256, 1)))[1].floor_s, "of all steps"
    assert result.time_to_first_token_p50_s == pytest.approx(step_s(256, 0) + step_s(44, 256))


def test_a_prefix_that_requests_share_is_computed_once() -> None:
    """The second request computes what is its own: the prompt beyond the pages of 16 tokens that both have."""
    workload = Workload(
        concurrencies=(1,),
        request_rates_per_s=(),
        lengths=Lengths(num_prompt_tokens=100, num_output_tokens=1),
        spread_fraction=0.0,
        requests_per_client=2,
        duration_s=1.0,
        num_shared_tokens=70,
    )
    (given,) = workload.loads(1)
    result, executor = run(PLAIN, given)
    assert executor.num_steps == 2
    assert result.duration_s == pytest.approx(step_s(100, 0) + step_s(36, 64))
    (cold,) = replace(workload, num_shared_tokens=0).loads(1)
    assert run(PLAIN, cold)[0].duration_s == pytest.approx(2 * step_s(100, 0))


def test_a_chained_loop_hides_the_host_behind_the_device() -> None:
    hidden = replace(PLAIN, clock=StepClock(H200, COSTS.model_copy(update={"is_host_hidden": True})))
    given = load((20, 50))
    slow, fast = run(PLAIN, given)[0], run(hidden, given)[0]
    assert fast.duration_s < slow.duration_s - 45 * 1e-4
    _, executor = run(hidden, given)
    assert fast.duration_s > executor.device_s * 50 / executor.num_steps  # no step is shorter than its device's


def test_drafts_are_accepted_as_often_as_given() -> None:
    result, _ = run(DRAFTED, load(*[(20, 300)] * 8, concurrency=4))
    assert result.acceptance_length == pytest.approx(GIVEN.acceptance_length(3), rel=0.04)
    assert GIVEN.acceptance_length(3) == 3.0
    worse = replace(DRAFTED, acceptance=AcceptanceByPosition((0.4, 0.2, 0.1)))
    found = run(worse, load(*[(20, 300)] * 8, concurrency=4))[0].acceptance_length
    assert found == pytest.approx(1.7, rel=0.04)


def test_each_position_is_accepted_with_its_own_fraction_and_after_those_before_it() -> None:
    drawn = GIVEN.draw(np.random.default_rng(0), np.full(20000, 3))
    assert [(drawn > i).mean() for i in range(3)] == pytest.approx(GIVEN.fractions, abs=0.01)
    num_candidates = np.arange(4).repeat(50)
    assert (GIVEN.draw(np.random.default_rng(0), num_candidates) <= num_candidates).all()


def test_arrivals_do_not_wait_for_answers_and_count_from_when_they_came() -> None:
    alone, _ = run(PLAIN, load((50, 4)))
    seldom, _ = run(PLAIN, load(*[(50, 4)] * 20, concurrency=None, rate=0.01 / alone.duration_s))
    assert seldom.time_to_first_token_p50_s == pytest.approx(alone.time_to_first_token_p50_s, rel=1e-6)
    assert seldom.duration_s > 500 * alone.duration_s
    crowded, _ = run(PLAIN, load(*[(50, 4)] * 60, concurrency=None, rate=100 / alone.duration_s))
    assert crowded.time_to_first_token_p99_s > 3 * alone.time_to_first_token_p50_s


def test_the_last_answer_ends_the_load_its_time_counted_from_its_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arrival is seen when the step that runs has ended; its times count from before."""
    monkeypatch.setattr("dflash_trt.simulation.sweep.result_of", lambda outputs, duration_s: (outputs, duration_s))
    for rate in (50.0, 2000.0, 50000.0):
        (outputs, duration_s), _ = run(PLAIN, load(*[(200, 5)] * 12, concurrency=None, rate=rate))
        dice, arrivals = random.Random(0), [0.0]
        while len(arrivals) < 12:
            arrivals.append(arrivals[-1] + dice.expovariate(rate))
        ends = [arrivals[int(output.request_id)] + output.total_s for output in outputs]
        firsts = [arrivals[int(output.request_id)] + output.time_to_first_token_s for output in outputs]
        assert max(ends) == pytest.approx(duration_s)
        assert ends == pytest.approx(sorted(ends)), "outputs come as they end"
        # Four tokens follow the first, each in a step of its own.
        assert min(end - first for end, first in zip(ends, firsts, strict=True)) >= 4 * step_s(1, 200) * (1 - 1e-9)
    (outputs, _), _ = run(PLAIN, load((200, 5), (200, 5), concurrency=None, rate=50000.0))
    arrival_s = random.Random(0).expovariate(50000.0)
    assert 0 < arrival_s < step_s(200, 0), "the second comes while the first's prompt is computed"
    both = ComputedRows(num_tokens=np.array([1, 200]), context_lens=np.array([200, 0]), num_draft_tokens=0)
    second_s = StepClock(H200, COSTS).time(EngineWork(PLAIN.pretrained_config, has_drafter=False).of(both)).total_s
    first, second = sorted(outputs, key=lambda output: int(output.request_id))
    assert first.time_to_first_token_s == pytest.approx(step_s(200, 0))
    assert second.time_to_first_token_s == pytest.approx(step_s(200, 0) + second_s - arrival_s)


def test_few_pages_preempt_requests_and_lose_none() -> None:
    tight = replace(DRAFTED, num_pages=32)
    result, _ = run(tight, load(*[(100, 100)] * 10, concurrency=8))
    assert result.num_requests == 10 and result.num_output_tokens == 1000
    assert result.duration_s > run(DRAFTED, load(*[(100, 100)] * 10, concurrency=8))[0].duration_s
    for num_pages in (32, 400):  # as the pages or max_seq_len say
        with pytest.raises(CapacityError, match="requests of at most 512 tokens, found 600"):
            run(replace(PLAIN, num_pages=num_pages), load((500, 100)))
    with pytest.raises(CapacityError, match="requests of at most 320 tokens, found 321"):
        run(replace(PLAIN, num_pages=20), load((221, 100)))


@pytest.mark.parametrize("num_replicas", [1, 2, 5])
def test_replicas_share_the_arrivals_of_the_same_time(num_replicas: int) -> None:
    workload = Workload(
        concurrencies=(),
        request_rates_per_s=(10.0, 40.0),
        lengths=Lengths(num_prompt_tokens=30, num_output_tokens=20),
        spread_fraction=0.5,
        requests_per_client=2,
        duration_s=3.0,
    )
    loads = workload.loads(num_replicas)
    assert [item.request_rate_per_s for item in loads] == [10.0 / num_replicas, 40.0 / num_replicas]
    assert [len(item.requests) * num_replicas for item in loads] == [30, 120]


def test_replicas_share_the_clients_and_speed_counts_all_gpus() -> None:
    workload = Workload(
        concurrencies=(1, 4),
        request_rates_per_s=(8.0,),
        lengths=Lengths(num_prompt_tokens=30, num_output_tokens=20),
        spread_fraction=0.0,
        requests_per_client=2,
        duration_s=1.0,
    )
    one, two = (replace(PLAIN, num_replicas=count) for count in (1, 2))
    points = sweep([one, two], workload, progress=lambda *_: None)
    assert [p.request_rate_per_s for p in points] == [None, None, 8.0, None, 8.0]
    points = [p for p in points if p.request_rate_per_s is None]
    assert [(p.layout, p.concurrency, p.num_gpus) for p in points] == [
        ("tp1x1", 1, 1),
        ("tp1x1", 4, 1),
        ("tp1x2", 4, 2),  # one client cannot be shared
    ]
    alone = sweep([one], replace(workload, concurrencies=(2,)), progress=lambda *_: None)[0]
    assert points[2].output_tok_per_s_per_gpu == pytest.approx(alone.output_tok_per_s_per_gpu)
    assert points[2].output_tok_per_s == pytest.approx(2 * alone.output_tok_per_s)
    fastest = max(point.tok_per_s_per_user for point in points)
    assert best(points, 0.0) is points[1] and best(points, fastest) is points[0] and best(points, 2 * fastest) is None
    assert [len(found) for found in curves(points, lambda point: point.configuration).values()] == [2, 1]


def test_without_drafts_a_sweep_pays_for_no_drafter() -> None:
    workload = Workload(
        concurrencies=(2,),
        request_rates_per_s=(),
        lengths=Lengths(num_prompt_tokens=30, num_output_tokens=20),
        spread_fraction=0.0,
        requests_per_client=2,
        duration_s=1.0,
    )
    has_none = PLAIN.pretrained_config.model_copy(update={"draft": None})
    (plain,), (alone,) = (
        sweep([replace(PLAIN, pretrained_config=config)], workload, progress=lambda *_: None)
        for config in (PLAIN.pretrained_config, has_none)
    )
    assert plain.output_tok_per_s == alone.output_tok_per_s and plain.floor_fraction == alone.floor_fraction


def test_acceptance_is_read_from_reports_of_bench(tmp_path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"speedup": 1.5, "accepted_fraction_by_position": [0.8, 0.5]}))
    assert read_acceptance(str(path)).fractions == (0.8, 0.5)
    sides = [{"algorithm": None, "accepted_fraction_by_position": []}]
    sides += [
        {"algorithm": name, "accepted_fraction_by_position": [rate]} for name, rate in (("dflash", 0.7), ("x", 0.1))
    ]
    path.write_text(json.dumps(sides))
    assert read_acceptance(str(path), algorithm="dflash").fractions == (0.7,)
    path.write_text(json.dumps({"reports": [{"acceptance": {"by_position": [0.6]}}]}))
    assert read_acceptance(str(path)).fractions == (0.6,)
    for wrong in ("0.5,0.6", "1.2", str(tmp_path / "none.json")):
        with pytest.raises(ConfigError):
            read_acceptance(wrong)
