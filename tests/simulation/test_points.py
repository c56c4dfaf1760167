"""Points of a sweep: each number is that of its load and of its steps, whoever prints it."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from dflash_trt.bench.pareto import Point
from dflash_trt.core.errors import ConfigError
from dflash_trt.plan.step_costs import StepClock
from dflash_trt.plan.step_work import EngineWork
from dflash_trt.simulation.acceptance import AcceptanceByPosition, read_acceptance
from dflash_trt.simulation.load import Lengths, LoadResult, result_of
from dflash_trt.simulation.report import SweepReport
from dflash_trt.simulation.sweep import SimulatedPoint, Workload, check_drafts, curves, simulate, sweep
from tests.bench.test_speedup import output
from tests.simulation.test_simulation import COSTS, DRAFTED, PLAIN, load, run

WORKLOAD = Workload(
    concurrencies=(6,),
    request_rates_per_s=(40.0,),
    lengths=Lengths(num_prompt_tokens=30, num_output_tokens=100),
    spread_fraction=0.5,
    requests_per_client=5,
    duration_s=0.5,
)
POINT = SimulatedPoint(
    configuration="DFlash, K = 3, tp2x1",
    drafter="DFlash",
    layout="tp2x1",
    num_draft_tokens=3,
    num_gpus=2,
    concurrency=4,
    request_rate_per_s=None,
    output_tok_per_s=1000.0,
    output_tok_per_s_per_gpu=500.0,
    tok_per_s_per_user=70.0,
    time_to_first_token_p50_s=0.012,
    time_to_first_token_p99_s=0.034,
    time_per_output_token_p50_s=0.005,
    time_per_output_token_p99_s=0.006,
    acceptance_length=2.5,
    mean_step_s=0.0078,
    floor_fraction=0.25,
    device_s_by_source={"a": 3.0, "b": 1.0},
)


def test_what_clients_see_is_over_requests() -> None:
    """Times per token of 0.5, 0.25 and 1 s; the last answer has a single token."""
    outputs = [
        output(1, 2, 3, time_to_first_token_s=0.5, total_s=1.5, num_verify_steps=1, num_emitted_by_verify=2),
        output(1, 2, time_to_first_token_s=1.0, total_s=1.25, num_verify_steps=3, num_emitted_by_verify=4),
        output(1, 2, time_to_first_token_s=4.0, total_s=5.0, num_verify_steps=0, num_emitted_by_verify=0),
        output(1, time_to_first_token_s=2.0, total_s=2.0, num_verify_steps=0, num_emitted_by_verify=0),
    ]
    assert result_of(outputs, 16.0) == LoadResult(
        num_requests=4,
        num_output_tokens=8,
        duration_s=16.0,
        output_tok_per_s=0.5,
        tok_per_s_per_user=2.0,
        time_to_first_token_p50_s=1.5,
        time_to_first_token_p99_s=pytest.approx(np.percentile([0.5, 1.0, 2.0, 4.0], 99)),
        time_per_output_token_p50_s=0.5,
        time_per_output_token_p99_s=pytest.approx(np.percentile([0.25, 0.5, 1.0], 99)),
        acceptance_length=1.5,
    )
    alone = result_of(outputs[-1:], 2.0)
    assert (alone.tok_per_s_per_user, alone.time_per_output_token_p50_s, alone.acceptance_length) == (None, None, None)


def test_a_point_is_its_replicas_under_their_share_of_the_load() -> None:
    engine = replace(DRAFTED, num_replicas=3)
    work = EngineWork(engine.pretrained_config, has_drafter=True)
    told: list[tuple[int, int, str]] = []
    points = sweep([engine], WORKLOAD, progress=lambda *words: told.append(words))
    assert told == [(1, 2, f"{engine.name}, 6 clients"), (2, 2, f"{engine.name}, 40 requests/s")]
    seen = [field for field in asdict(points[0]) if field.endswith(("_p50_s", "_p99_s", "_user", "_length"))]
    assert len(seen) == 6
    for point, share in zip(points, WORKLOAD.loads(3), strict=True):
        result, executor = simulate(engine, share, work)
        assert [getattr(point, field) for field in seen] == [getattr(result, field) for field in seen]
        assert result.time_to_first_token_p50_s < result.time_to_first_token_p99_s
        assert point.output_tok_per_s == pytest.approx(3 * result.output_tok_per_s)
        assert point.output_tok_per_s_per_gpu == pytest.approx(result.output_tok_per_s)
        assert point.mean_step_s == pytest.approx(executor.device_s / executor.num_steps)
        assert point.floor_fraction == pytest.approx(executor.floor_s / executor.device_s)
    assert [(point.concurrency, point.request_rate_per_s, point.num_gpus) for point in points] == [
        (6, None, 3),
        (None, pytest.approx(40.0), 3),
    ]


def test_lengths_of_requests_are_spread_around_theirs_and_the_same_for_every_load() -> None:
    [requests] = [share.requests for share in WORKLOAD.loads(1) if share.concurrency]
    assert len(requests) == 6 * 5
    prompts = [len(request.prompt_token_ids) for request in requests]
    answers = [request.sampling.max_new_tokens for request in requests]
    for found, middle in ((prompts, 30), (answers, 100)):
        assert middle * 0.5 <= min(found) < 0.8 * middle and 1.2 * middle < max(found) <= middle * 1.5
    [others] = [share.requests for share in WORKLOAD.loads(3) if share.concurrency]
    assert list(others) == list(requests[: len(others)])
    [even] = [share.requests for share in replace(WORKLOAD, spread_fraction=0.0).loads(6) if share.concurrency]
    assert {(len(item.prompt_token_ids), item.sampling.max_new_tokens) for item in even} == {(30, 100)}


def test_arrivals_are_those_of_the_seed() -> None:
    given = load(*[(50, 4)] * 5, concurrency=None, rate=10.0)
    durations = [run(PLAIN, replace(given, seed=seed))[0].duration_s for seed in (0, 3, 3)]
    assert durations[0] != durations[1] == durations[2]


def test_steps_that_follow_in_the_queue_have_the_context_that_was_accepted() -> None:
    """No draft is accepted, and K/V is all that costs: a token a step, chained or not."""
    costs = COSTS.model_copy(update={"kv_s_per_byte": 1.0, "is_host_hidden": False})
    rejected = replace(
        DRAFTED, clock=StepClock(DRAFTED.clock.gpu, costs), acceptance=AcceptanceByPosition((0.0, 0.0, 0.0))
    )
    chained = replace(rejected, clock=StepClock(DRAFTED.clock.gpu, costs.model_copy(update={"is_host_hidden": True})))
    given = load((10, 100))
    expected, found = (run(engine, given)[0].duration_s for engine in (rejected, chained))
    assert found == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    ("num_drafts", "limit", "fractions", "found"),
    [(3, 7, (0.5,) * 3, None), (0, 7, None, None), (4, 7, (0.5,) * 3, 3), (3, 2, (0.5,) * 3, 2), (1, 7, None, 0)],
)
def test_no_more_drafts_are_simulated_than_made_and_known(
    num_drafts: int, limit: int, fractions: tuple[float, ...] | None, found: int | None
) -> None:
    limits = PLAIN.limits.model_copy(update={"max_draft_len": limit})
    acceptance = None if fractions is None else AcceptanceByPosition(fractions)
    engine = replace(PLAIN, limits=limits, num_draft_tokens=num_drafts, acceptance=acceptance)
    if found is None:
        check_drafts(engine)
        return
    with pytest.raises(ConfigError, match=f"expected K of at most {found}, found {num_drafts}"):
        check_drafts(engine)


def test_of_several_sides_the_last_that_drafted_counts_or_the_algorithm_that_is_asked_for(tmp_path: Path) -> None:
    sides = [("dflash", [0.7]), ("dflash", [0.6]), ("eagle3", [0.5]), (None, [])]
    path = tmp_path / "report.json"
    path.write_text(json.dumps([{"algorithm": name, "accepted_fraction_by_position": rates} for name, rates in sides]))
    asked = [read_acceptance(str(path), algorithm=name).fractions for name in (None, "dflash", "unknown")]
    assert asked == [(0.5,), (0.6,), (0.5,)]


def test_a_report_says_each_number_of_a_point_with_its_unit() -> None:
    slow = replace(
        POINT,
        configuration="AR, tp2x1",
        num_draft_tokens=0,
        concurrency=None,
        request_rate_per_s=2.5,
        tok_per_s_per_user=None,
        acceptance_length=None,
    )
    report = SweepReport(
        subject="a pair",
        hardware="a GPU",
        command="plan",
        assumptions=("this",),
        points=(slow, POINT),
        per_user=(50.0, 80.0),
        left_out=("that",),
    )
    title, head, *rows = (" ".join(line.split()) for line in report.lines())
    assert title == "simulated: a pair on a GPU"
    assert head == "configuration load tok/s per GPU per user TTFT ms accepted step ms floor"
    assert rows == [
        "AR, tp2x1 2.5/s 1000 500 - 12 - 7.8 25%",
        "DFlash, K = 3, tp2x1 4 1000 500 70 12 2.50 7.8 25%",
        "best at 50 tok/s per user: DFlash, K = 3, tp2x1, 4 clients, 500 tok/s per GPU (simulated)",
        "no configuration gives a user 80 tok/s (simulated)",
        "left out: that",
        "where the device's time comes from: a 75%, b 25%",
        "assumed: this",
    ]
    arrivals = replace(report, points=(replace(slow, tok_per_s_per_user=90.0),), per_user=(80.0,)).lines()
    assert any("80 tok/s per user: AR, tp2x1, 2.5 requests/s, 500 tok/s per GPU" in line for line in arrivals)
    spent = {"c": 100.0, "d": 0.6, "e": 0.4}  # half a percent of it all is named
    shares = replace(report, points=(replace(POINT, device_s_by_source=spent),)).lines()
    assert "where the device's time comes from: c 99%, d 1%" in shares
    best = [(item["per_user_tok_per_s"], item["point"]) for item in report.as_json()["best"]]
    assert best == [(50.0, asdict(POINT)), (80.0, None)]


def test_a_curve_of_a_drafter_has_the_best_of_its_configurations() -> None:
    worse = replace(POINT, configuration="other", layout="tp1x2", tok_per_s_per_user=60.0, output_tok_per_s_per_gpu=400)
    better = replace(worse, tok_per_s_per_user=40.0, output_tok_per_s_per_gpu=900.0)
    silent = replace(POINT, tok_per_s_per_user=None)
    found = curves([POINT, worse, better, silent], lambda point: point.drafter)
    assert found == {
        "DFlash": [
            Point(per_user=40.0, per_gpu=900.0, label="tp1x2 K3: 4"),
            Point(per_user=70.0, per_gpu=500.0, label="tp2x1 K3: 4"),
        ]
    }
    [whole] = curves([POINT], lambda point: point.configuration).values()
    assert [point.label for point in whole] == ["4"]
