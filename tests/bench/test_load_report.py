"""Numbers of records that are known, and curves."""

import re
from dataclasses import replace

import numpy as np
import pytest

from dflash_trt.bench.acceptance import acceptance, counts_of_answers
from dflash_trt.bench.conversation import RequestRecord
from dflash_trt.bench.load_report import Limits, Percentiles, report_of
from dflash_trt.bench.load_table import acceptance_lines, load_warnings, table
from dflash_trt.bench.pareto import Point, curves, frontier, hull, per_gpu_at, ratios_at, shared_interactivity
from dflash_trt.bench.request_load import Load, LoadRun

LOAD = Load(num_conversations=4, concurrency=4)
# As a step tells them: drafts verified, and accepted.
STEPS = {"a": [(3, 3), (3, 0), (1, 1)], "b": [(3, 1)]}


def speculation(steps: list[tuple[int, int]]) -> dict[str, object]:
    accepted = [taken for _, taken in steps]
    return {
        "num_spec_tokens": 3,
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": sum(accepted),
        "acceptance_histogram": [accepted.count(length) for length in range(4)],
        "per_step_accepted": accepted,
        "per_step_drafted": [drafted for drafted, _ in steps],
    }


def record(ttft_s: float, num_events: int, gap_s: float, **fields: object) -> RequestRecord:
    times = tuple(1.0 + ttft_s + gap_s * index for index in range(num_events))
    values = {"category": None, "started_s": 1.0, "content_s": times, "num_output_tokens": 2 * num_events}
    return RequestRecord(**(values | fields))  # type: ignore[arg-type]


RECORDS = (
    record(0.1, 5, 0.02, category="a", speculation=speculation(STEPS["a"]), num_prompt_tokens=7),
    record(0.2, 5, 0.04, category="b", speculation=speculation(STEPS["b"]), num_prompt_tokens=8),
    record(0.3, 1, 0.0, num_output_tokens=1, num_prompt_tokens=9),
    record(0.0, 0, 0.0, error="status 500", num_prompt_tokens=100),
)
UNEVEN = Percentiles(mean=1.0, p50=2.0, p90=4.0, p99=8.0)
RUN = LoadRun(records=RECORDS, duration_s=2.0, max_client_lag_s=0.001)
LIMITS = Limits(time_to_first_token_s=0.25, time_per_output_token_s=0.01)
REPORT = report_of("s", LOAD, [RUN, RUN], num_gpus=None, limits=LIMITS)


def test_percentiles_are_numpys_over_requests_that_were_answered() -> None:
    assert REPORT.num_requests == 6 and REPORT.num_errors == 2 and REPORT.first_error == "status 500"
    assert REPORT.time_to_first_token_s.p90 == pytest.approx(np.percentile([0.1, 0.2, 0.3] * 2, 90))
    assert REPORT.time_per_output_token_s.p50 == pytest.approx(np.median([0.08 / 9, 0.16 / 9] * 2))
    assert REPORT.inter_token_latency_s.mean == pytest.approx(0.03), "events, of all requests together"
    assert REPORT.end_to_end_s.p99 == pytest.approx(np.percentile([0.18, 0.36, 0.3] * 2, 99))
    assert REPORT.tok_per_s_per_user.p50 == pytest.approx(np.median([9 / 0.08, 9 / 0.16]))
    assert REPORT.output_tok_per_s == pytest.approx(2 * 21 / 4.0)


def test_goodput_counts_requests_within_every_limit() -> None:
    """The first only: the second is too slow per token, the third too late, the fourth failed."""
    assert REPORT.goodput_request_per_s == pytest.approx(2 / 4.0)
    assert REPORT.good_fraction == pytest.approx(1 / 4)
    exact = replace(LIMITS, time_to_first_token_s=RUN.records[2].time_to_first_token_s)
    assert report_of("s", LOAD, [RUN], num_gpus=None, limits=exact).good_fraction == pytest.approx(2 / 4)
    looser = replace(LIMITS, time_to_first_token_s=0.35)
    assert report_of("s", LOAD, [RUN], num_gpus=None, limits=looser).good_fraction == pytest.approx(2 / 4)
    assert report_of("s", LOAD, [RUN], num_gpus=None, limits=Limits()).goodput_request_per_s is None
    for limit_s, good in ((0.17, 0), (0.2, 1), (0.31, 2), (0.4, 3)):  # requests take 0.18, 0.36 and 0.3 s
        found = report_of("s", LOAD, [RUN], num_gpus=None, limits=Limits(end_to_end_s=limit_s))
        assert found.good_fraction == pytest.approx(good / 4)


def test_times_of_a_request_are_those_of_its_events_with_text() -> None:
    one, two, none = (
        record(0.5, 1, 0.0, num_output_tokens=1),
        record(0.5, 2, 0.25, num_output_tokens=2),
        record(0, 0, 0),
    )
    assert (one.time_per_output_token_s, two.time_per_output_token_s) == (None, 0.25)
    assert replace(two, num_output_tokens=3).time_per_output_token_s == 0.125
    assert (two.time_to_first_token_s, two.end_to_end_s, two.gaps_s) == (0.5, 0.75, (0.25,))
    assert (none.ended_s, none.end_to_end_s, none.gaps_s) == (1.0, 0.0, ())


def test_sums_are_over_all_rounds_and_speeds_over_their_time() -> None:
    slow = replace(RUN, duration_s=6.0, max_client_lag_s=0.5)
    found = report_of("s", LOAD, [slow, RUN], num_gpus=2, limits=LIMITS)
    assert (found.duration_s, found.max_client_lag_s, found.num_gpus) == (8.0, 0.5, 2)
    assert (found.num_prompt_tokens, found.num_output_tokens) == (2 * (7 + 8 + 9), 2 * 21)
    assert (found.request_per_s, found.output_tok_per_s) == (6 / 8, 42 / 8)
    assert found.output_tok_per_s_by_round == (21 / 6, 21 / 2)
    assert found.output_tok_per_s_per_gpu == 42 / 8 / 2
    assert REPORT.output_tok_per_s_per_gpu == REPORT.output_tok_per_s, "of the server, where nobody said"


def test_acceptance_is_over_steps_that_verified_the_draft() -> None:
    found = REPORT.acceptance
    assert found.num_verify_steps == 8 and found.length == pytest.approx(1 + 5 / 4)
    assert found.by_position == pytest.approx((3 / 4, 1 / 3, 1 / 3))
    by_category = {name: value.length for name, value in REPORT.acceptance_by_category.items()}
    assert by_category == {"a": pytest.approx(1 + 4 / 3), "b": pytest.approx(2.0)}
    bare = {name: value for name, value in speculation(STEPS["a"]).items() if not name.startswith("per_step")}
    found = acceptance(counts_of_answers([bare]))
    assert found.by_position == pytest.approx((2 / 3, 1 / 3, 1 / 3)), "every step counts"
    silent = replace(RUN, records=tuple(replace(record, speculation={"num_spec_steps": 0}) for record in RECORDS))
    assert report_of("s", LOAD, [silent], num_gpus=None, limits=LIMITS).acceptance is None


def test_a_line_of_the_table_has_its_numbers_under_their_headings() -> None:
    numbers = report_of("s", LOAD, [RUN], num_gpus=2, limits=LIMITS)
    explanation, *lines = table([numbers], unit="GPU")
    assert "p50 / p90 / p99" in explanation
    texts = [re.split(r"  +", line.strip()) for line in lines]
    assert dict(zip(*texts, strict=True)) == {
        "server": "s",
        "load": "4 clients",
        "tok/s per GPU": "5.2",
        "tok/s": "10.5",
        "tok/s/user": f"{numbers.tok_per_s_per_user.p50:.1f}",
        "TTFT ms": "200 / 280 / 298",
        "TPOT ms": "13.33 / 16.89 / 17.69",
        "ITL ms": "30 / 40 / 40",
        "end to end ms": "300 / 348 / 358.8",
        "accepted": "2.25",
        "errors": "1",
        "good req/s": "0.50",
    }
    arrivals = report_of("s", Load(num_conversations=4, request_rate_per_s=2.5), [RUN], num_gpus=None, limits=Limits())
    _, head, line = table([arrivals], unit="server")
    assert "2.5 req/s" in line and "good req/s" not in head
    _, head, first, second = table([arrivals, numbers], unit="server")
    assert head.endswith("good req/s") and (first.split()[-1], second.split()[-1]) == ("-", "0.50")
    assert [point.label for point in curves([arrivals])["s"]] == ["2.5/s"]


def test_the_text_has_the_acceptance_with_its_interval_and_what_is_too_few_to_say() -> None:
    whole, positions, categories = acceptance_lines([REPORT])
    assert whole.startswith("s: acceptance length 2.25 (95% interval over requests: 2.")
    assert positions.endswith("1: 0.75  2: 0.33  3: 0.33")
    assert "category: a 2.33 (2.33 to 2.33), b 2.00 (" in categories
    (warning,) = load_warnings([replace(REPORT, num_requests=500), REPORT])
    assert warning.startswith("p99 of 6 requests is about their maximum: send 100 or more")
    assert load_warnings([replace(REPORT, num_requests=100)]) == []


def curve(*places: tuple[float, float]) -> list[Point]:
    return [Point(per_user=x, per_gpu=y, label=str(index)) for index, (x, y) in enumerate(places)]


CURVES = {"plain": curve((50, 400), (100, 100)), "drafted": curve((60, 300), (200, 150), (90, 120))}


def test_the_hull_has_the_points_that_no_other_exceeds() -> None:
    assert [(p.per_user, p.per_gpu) for p in hull(CURVES)] == [(50, 400), (60, 300), (200, 150)]
    assert frontier(CURVES["drafted"]) == CURVES["drafted"][:2]
    level, tall = curve((50, 300), (60, 300)), curve((60, 200), (60, 300))
    assert frontier(level) == level[1:] and frontier(tall) == tall[1:], "no better in one speed, and worse in the other"


def test_throughput_is_compared_at_a_speed_per_user() -> None:
    assert per_gpu_at(CURVES["plain"], 75) == pytest.approx(250)
    assert per_gpu_at(CURVES["plain"], 10) == 400, "faster than asked"
    assert per_gpu_at(CURVES["plain"], 101) is None
    assert shared_interactivity(CURVES) == 100
    heights = (300 - 150 * 40 / 140, 100)
    assert ratios_at(CURVES, 100) == {"plain": 1.0, "drafted": pytest.approx(heights[0] / heights[1])}
    assert ratios_at(CURVES, 150) == {"plain": None, "drafted": None}


def test_a_report_is_a_point_of_its_servers_curve() -> None:
    (point,) = curves([REPORT])["s"]
    expected = Point(per_user=REPORT.tok_per_s_per_user.p50, per_gpu=REPORT.output_tok_per_s, label="4")
    assert point == expected
    skewed = replace(REPORT, num_gpus=2, output_tok_per_s_per_gpu=3.0, tok_per_s_per_user=UNEVEN)
    assert curves([skewed])["s"] == [Point(per_user=2.0, per_gpu=3.0, label="4")]
    assert curves([replace(REPORT, tok_per_s_per_user=None)]) == {"s": []}
