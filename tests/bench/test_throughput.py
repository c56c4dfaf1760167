"""The closed load: what it sends, and what its report makes of what came back."""

import pytest

from dflash_trt.bench import throughput
from dflash_trt.bench.throughput import LoadReport, Work, mixed_work, run_in_flight
from dflash_trt.core.request import SamplingParams
from tests.bench.test_arithmetic import output
from tests.serving.engines import make_executor, make_generator


def test_mixed_work_has_many_short_and_few_long_answers() -> None:
    work = mixed_work(["a", "b", "c"], 600, 90)
    assert [item.prompt for item in work[:4]] == ["a", "b", "c", "a"]
    lengths = [item.sampling.max_new_tokens for item in work]
    assert min(lengths) >= 1 and 80 < max(lengths) <= 90
    assert sum(lengths) / 600 == pytest.approx(30, rel=0.1)
    assert all(item.sampling.ignore_eos for item in work)
    assert work == mixed_work(["a", "b", "c"], 600, 90)


def test_a_closed_load_never_has_more_requests_than_clients(monkeypatch) -> None:
    sizes: list[int] = []
    executor = make_executor()
    submit = executor.submit
    monkeypatch.setattr(executor, "submit", lambda plan: sizes.append(plan.rows.num_requests) or submit(plan))
    work = [Work(prompt=[5, i], sampling=SamplingParams(max_new_tokens=6)) for i in range(7)]
    with make_generator(executor) as engine:
        report = run_in_flight(engine, work, concurrency=2)
    assert max(sizes) == 2
    assert (report.concurrency, report.num_requests, report.num_output_tokens) == (2, 7, 42)
    assert report.output_tok_per_s == pytest.approx(42 / report.wall_time_s)


def test_a_report_has_the_mean_time_to_first_token_and_the_acceptance_of_all_steps() -> None:
    outputs = [
        output(1, 2, 3, time_to_first_token_s=0.25, num_verify_steps=1, num_emitted_by_verify=4),
        output(1, time_to_first_token_s=0.75, num_verify_steps=3, num_emitted_by_verify=4),
    ]
    assert throughput._report(outputs, 5, 2.0) == LoadReport(
        concurrency=5,
        num_requests=2,
        num_output_tokens=4,
        wall_time_s=2.0,
        output_tok_per_s=2.0,
        mean_time_to_first_token_s=0.5,
        acceptance_length=2.0,
    )


def test_a_request_that_fails_is_no_measurement() -> None:
    with make_generator(make_executor(fails_on=lambda batch: True)) as engine:
        work = [Work(prompt=[5], sampling=SamplingParams(max_new_tokens=6))]
        with pytest.raises(AssertionError, match="RuntimeError"):
            run_in_flight(engine, work, concurrency=1)
