"""Measuring a machine: what is fitted is what was there, and what is measured is of this machine."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dflash_trt.bench import machine, machine_probes, machine_rates
from dflash_trt.bench.host import HostReport
from dflash_trt.bench.machine_probes import COSTS, CPU_SIZES, Probe, ProbeEngine, ProbeTime, fitted_costs
from dflash_trt.core.errors import ConfigError
from dflash_trt.plan.machine_file import read_machine_file
from dflash_trt.plan.step_floor import floor_of
from dflash_trt.plan.step_work import ComputedRows, EngineWork
from tests.cli.conftest import Invoke, invoke  # noqa: F401 - a fixture
from tests.plan.test_machine_file import MACHINE
from tests.serving.engines import Clock

CPU = torch.device("cpu")


def probes(costs: dict[str, float]) -> list[ProbeTime]:
    """Steps of engines of all sizes that would take exactly this."""
    from dflash_trt.bench.machine_probes import probe_specs
    from dflash_trt.engine_dir import PretrainedConfig

    found = []
    for size in CPU_SIZES:
        target, draft = probe_specs(size)
        config = PretrainedConfig(target=target, draft=draft, dtype="float32")
        for drafts in (0, 3, 7):
            engine = EngineWork(config, has_drafter=drafts > 0)
            for requests, context, chunk in ((1, 64, 0), (4, 448, 0), (16, 64, 0), (16, 448, 0), (2, 0, 90)):
                tokens = chunk or drafts + 1
                step = engine.of(
                    ComputedRows(
                        num_tokens=np.full(requests, tokens),
                        context_lens=np.full(requests, context),
                        num_draft_tokens=drafts,
                    )
                )
                seconds = sum(costs[name] * (getattr(step, count) if count else 1) for name, count in COSTS.items())
                found.append(ProbeTime(work=step, seconds=1e-3 + seconds))
    return found


def test_costs_that_made_the_times_are_found_again() -> None:
    costs = {"kv_s_per_byte": 8e-11, "mixing_s_per_flop": 9e-12, "activation_s_per_byte": 5e-11, "logit_s": 5e-9}
    costs |= {"token_s": 4e-7, "request_s": 2e-6, "layer_s": 1e-4, "pass_s": 3e-5, "step_s": 6e-5}
    found = fitted_costs(probes(costs), lambda work: 1e-3)
    assert found == pytest.approx(costs, rel=1e-5)
    assert fitted_costs(probes(costs | {"layer_s": 2e-4}), lambda work: 1e-3)["layer_s"] == pytest.approx(2e-4)


def test_models_of_probes_have_the_masks_and_the_values_of_trained_ones() -> None:
    target, draft = machine_probes.probe_specs(CPU_SIZES[0])
    assert all(layer.mixer.mask.is_causal for layer in target.layers)
    assert not any(layer.mixer.mask.is_causal for layer in draft.layers)
    for name, tensor in machine_probes._random_tensors(target, draft, torch.float32, CPU).items():
        assert torch.equal(tensor, tensor.bfloat16().float())
        if tensor.dim() == 1:
            assert (tensor == 1).all(), f"{name} is a norm"
        else:
            assert 0.97 < tensor.std() * tensor.shape[-1] ** 0.5 < 1.03, f"{name} keeps the size of its rows"


def test_a_cost_is_never_negative() -> None:
    costs = dict.fromkeys(COSTS, 0.0) | {"layer_s": 1e-4}
    times = [replace(item, seconds=item.seconds - 1e-5 * item.work.num_passes) for item in probes(costs)]
    found = fitted_costs(times, lambda work: 1e-3)
    assert min(found.values()) >= 0 and found["pass_s"] == 0


@pytest.mark.parametrize(("num_tokens", "num_drafts", "num_candidates"), [(8, 7, 7), (4, 3, 3), (60, 7, 0), (1, 0, 0)])
def test_a_probe_runs_the_step_that_its_work_counts(num_tokens: int, num_drafts: int, num_candidates: int) -> None:
    engine = ProbeEngine(CPU_SIZES[0], CPU, has_drafter=True)
    probe = engine.step(num_requests=3, num_tokens=num_tokens, context_len=40, num_drafts=num_drafts)
    engine.close()
    rows, updates = probe.plan.rows, probe.plan.page_updates
    assert rows.num_draft_tokens == num_drafts and rows.num_candidates.tolist() == [num_candidates] * 3
    assert rows.num_tokens.tolist() == [num_tokens] * 3 and rows.context_lens.tolist() == [40] * 3
    assert len(set(updates.page_ids.tolist())) == 3 * -(-(40 + num_tokens) // 32), "no page is shared"
    step = ComputedRows(num_tokens=rows.num_tokens, context_lens=rows.context_lens, num_draft_tokens=num_drafts)
    assert replace(probe.work, mixings=()) == replace(engine.work.of(step), mixings=())


@pytest.mark.parametrize(("has_drafter", "drafts", "chunk_drafts"), [(True, [3, 7], 7), (False, [0], 0)])
def test_probes_are_blocks_of_every_load_and_two_chunks_of_prompts(has_drafter, drafts, chunk_drafts) -> None:
    engine = SimpleNamespace(step=lambda **step: step)
    *blocks, one, four = machine_probes._steps(engine, has_drafter=has_drafter)  # type: ignore[arg-type]
    loads = [(requests, context, k) for requests in (1, 4, 16) for context in (64, 448) for k in drafts]
    assert [(step["num_requests"], step["context_len"], step["num_drafts"]) for step in blocks] == loads
    assert all(step["num_tokens"] == step["num_drafts"] + 1 for step in blocks)
    for chunk, size in ((one, (1, 200)), (four, (4, 60))):
        assert (chunk["num_requests"], chunk["num_tokens"]) == size
        assert (chunk["context_len"], chunk["num_drafts"]) == (0, chunk_drafts)


def test_a_probe_takes_the_median_of_its_rounds_after_one_to_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, closed = [], []

    class Engine:
        def __init__(self, size: object, device: object, *, has_drafter: bool) -> None:
            opened.append((size, has_drafter))

        def close(self) -> None:
            closed.append(opened[-1])

    def steps(engine: Engine, *, has_drafter: bool) -> Iterator[Probe]:
        assert opened[-1][1] is has_drafter
        for last in (10.0, 20.0):
            times = iter([100.0, last, 1.0, 2.0, 3.0, last, last, 4.0])  # an odd number of them counts
            yield Probe("work", "plan", lambda plan, times=times: next(times))  # type: ignore[arg-type]

    monkeypatch.setattr(machine_probes, "ProbeEngine", Engine)
    monkeypatch.setattr(machine_probes, "_steps", steps)
    found = machine_probes.probe_times(CPU, CPU_SIZES[:2])
    assert [item.seconds for item in found] == [4.0] * 8
    assert closed == opened == [(size, has) for size in CPU_SIZES[:2] for has in (False, True)]


def test_costs_of_the_host_are_seconds_of_a_step_and_of_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def measured(num_requests: int, *, is_chained: bool, **_: int) -> HostReport:
        asked.append(is_chained)
        step_ms = 0.25 + 0.5 * num_requests
        return HostReport(
            num_requests=num_requests, num_ranks=1, is_chained=is_chained, num_steps=1, step_ms=step_ms, between_ms=9.0
        )

    monkeypatch.setattr(machine, "measure_host", measured)
    assert machine._host_costs(is_chained=True) == pytest.approx((0.25e-3, 0.5e-3))
    assert asked == [True] * 3


def test_rates_are_what_is_moved_and_multiplied_over_the_time_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_rates, "seconds_of", lambda run, device: 0.5)
    mib = 1 << 20
    assert machine_rates.copy_rates(CPU) == {
        size * mib: max(64, size) // size * size * mib * 2.0 for size in (2, 8, 16, 24, 32, 64, 256)
    }
    rates = machine_rates.MatrixRates(CPU)
    assert rates.num_elements == 4 * 512 * 512 * (1.5 + 1 + 5 + 2.5)
    assert rates.by_rows()[8] == rates.flops_per_s(8) == 2 * 8 * rates.num_elements / 0.5
    assert rates.peaks() == dict.fromkeys((32, 8), 2 * 256 * rates.num_elements / 0.5)
    monkeypatch.setattr(rates, "flops_per_s", lambda rows: 1.0 if rows == 4 else 1 / rows)
    assert [rates.by_rows()[rows] for rows in (1, 2, 4, 256)] == [1.0] * 4
    monkeypatch.setattr(rates, "flops_per_s", lambda rows: 2.0 if rows == 4 else float(rows > 2))
    assert [rates.by_rows()[rows] for rows in (1, 2, 4, 256)] == [0.0, 0.0, 2.0, 2.0], "never less for more rows"


@pytest.mark.parametrize(("library", "bits"), [(None, None), ("kernels", 16)])
def test_a_machine_file_says_what_was_measured_on_what(library, bits, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate beyond all caches is the machine's; plain weights have 16 bits where the CPU kernels read them."""
    monkeypatch.setattr(machine, "copy_rates", lambda device: {2: 30.0, 8: 10.0, 4: 20.0})
    monkeypatch.setattr(machine, "cpu_library", lambda: library)
    monkeypatch.setattr(machine, "total_memory_bytes", lambda: 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    rates = SimpleNamespace(peaks=lambda: {32: 5.0})
    found = machine._measured("n", CPU, rates)  # type: ignore[arg-type]
    assert (found.name, found.memory_bytes, found.compute_capability, found.costs) == ("n", 64, None, None)
    assert (found.copy_bytes_per_s, found.copy_bytes_per_s_by_working_set_bytes[4]) == (10.0, 20.0)
    assert (found.plain_weight_bits, found.peak_flops_per_s_by_operand_bits) == (bits, {32: 5.0})
    assert found.how.endswith(f" on cpu, 3 thread(s), CPU kernels: {library is not None}")


def test_a_time_is_the_median_of_calls_after_one_to_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seconds = Clock(), iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 9.0, 5.0])

    def run() -> None:
        clock.now += next(seconds)

    monkeypatch.setattr(machine_rates, "clock_of_cpu", clock)
    assert machine_rates.seconds_of(run, CPU) == 4.0
    assert machine_rates.seconds_of(run, CPU, num_times=1) == 5.0


def test_one_thread_is_timed_by_what_it_computes_and_several_by_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_rates, "time", SimpleNamespace(thread_time=lambda: 1.0, perf_counter=lambda: 2.0))
    for num_threads, clock in ((1, 1.0), (2, 2.0), (3, 2.0)):
        monkeypatch.setattr(torch, "get_num_threads", lambda num_threads=num_threads: num_threads)
        assert machine_rates.clock_of_cpu() == clock


def test_errors_of_the_model_are_over_what_was_measured() -> None:
    times = probes(dict.fromkeys(COSTS, 0.0))[:2]
    costs = MACHINE.costs.model_copy(update={"step_s": 1.0})
    doubled = [replace(item, seconds=0.5) for item in times]
    assert machine.probe_errors(MACHINE, costs, doubled) == pytest.approx([2.0, 2.0], rel=0.1)


def test_a_gpu_that_is_not_there_is_refused_and_threads_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    with pytest.raises(ConfigError, match="--device: expected a CUDA GPU"):
        machine.device_at_hand("cuda", None)
    assert machine.device_at_hand("auto", 3) == machine.device_at_hand("cpu", 5) == CPU
    assert threads == [3, 5]


def test_roofs_of_this_machine_bound_what_it_does() -> None:
    found = machine.measure_roofs("this CPU", CPU)
    rates = found.copy_bytes_per_s_by_working_set_bytes
    assert found.copy_bytes_per_s == rates[max(rates)] > 1e8
    assert found.gpu.flops_of(16) > 1e8
    engine = ProbeEngine(CPU_SIZES[0], CPU, has_drafter=True)
    probe = engine.step(num_requests=2, num_tokens=8, context_len=40, num_drafts=7)
    fraction = floor_of(probe.work, found.gpu).total_s / min(probe.seconds(probe.plan) for _ in range(5))
    engine.close()
    assert 0 < fraction < 1.5  # the machine is shared: a slow moment of either may be 1.5 times the other's


def test_the_command_writes_a_file_that_plan_simulates_with(
    tmp_path: Path,
    invoke: Invoke,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one probe engine, the smallest, instead of three: the measurement itself is whole."""
    monkeypatch.setattr("dflash_trt.bench.machine.CPU_SIZES", CPU_SIZES[:1])
    path = tmp_path / "machine.json"
    result = invoke("bench", "machine", "-o", path, "--device", "cpu", "--name", "this CPU")
    assert result.exit_code == 0, result.stderr
    found = read_machine_file(path)
    assert found.name == "this CPU" and found.costs is not None
    rates = [rate for _, rate in sorted(found.costs.product_rates.items())]
    assert rates == sorted(rates) and rates[-1] > 1e8
    # Which of them takes the time is a matter of the fit: noise may take one of them to its bound, zero.
    assert sum(getattr(found.costs, name) for name in COSTS) > 0
    assert found.costs.host_step_s + found.costs.host_request_s > 0
    words = ("--sweep", "--accepted", "0.8,0.5", "--concurrency", "1,2", "--prompt-tokens", 20, "--output-tokens", 10)
    swept = invoke("plan", "demo", "--machine", path, *words)
    assert swept.exit_code == 0, swept.stderr
    assert "simulated: target on 1 x this CPU" in swept.stdout
    assert "step times are from the machine file" in swept.stdout
    refused = invoke("bench", "machine", "--device", "cpu", "-o", tmp_path / "none" / "machine.json")
    assert refused.exit_code == 2 and "--output: expected a file in a directory that exists" in refused.stderr
