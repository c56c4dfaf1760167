"""Measures this machine into a machine file: the bounds of a step, and the costs in addition to them."""

from __future__ import annotations

import numpy as np
import torch

from dflash_trt.bench.host import measure_host
from dflash_trt.bench.machine_probes import COSTS, CPU_SIZES, GPU_SIZES, ProbeTime, fitted_costs, probe_times
from dflash_trt.bench.machine_rates import MatrixRates, copy_rates, cpu_library
from dflash_trt.bench.progress import Progress
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.host_resources import total_memory_bytes
from dflash_trt.executor.threads import default_num_threads
from dflash_trt.plan.machine_file import MachineFile
from dflash_trt.plan.step_costs import StepClock, StepCosts

_HOST_REQUESTS = (1, 4, 16)


def measure_roofs(name: str, device: torch.device) -> MachineFile:
    """Copies and matrix products alone: what floors need."""
    return _measured(name, device, MatrixRates(device))


def measure_machine(name: str, device: torch.device, progress: Progress) -> MachineFile:
    """Everything: some seconds on a CPU."""
    matrices = MatrixRates(device)
    found = _measured(name, device, matrices)
    progress(1, 3, "copies and matrix products")
    host_step_s, host_request_s = _host_costs(is_chained=device.type == "cuda")
    progress(2, 3, f"the host: {1e3 * host_step_s:.3g} ms per step")
    costs = StepCosts(
        product_rates=matrices.by_rows(),
        product_memory_fraction=1.0,
        exchange_latency_s=0.0,
        host_step_s=host_step_s,
        host_request_s=host_request_s,
        is_host_hidden=device.type == "cuda",
        **dict.fromkeys(COSTS, 0.0),
    )
    times = probe_times(device, CPU_SIZES if device.type == "cpu" else GPU_SIZES)
    fitted = fitted_costs(times, lambda work: StepClock(found.gpu, costs).time(work).products_s)
    costs = costs.model_copy(update=fitted)
    errors = probe_errors(found, costs, times)
    spread = f"{errors[0]:.2f} to {errors[-1]:.2f}, median {np.median(errors):.2f}"
    progress(3, 3, f"{len(times)} steps of small engines: model / measured {spread}")
    return found.model_copy(update={"costs": costs})


def probe_errors(machine: MachineFile, costs: StepCosts, times: list[ProbeTime]) -> list[float]:
    """Model over measurement, of the steps that were fitted, ascending."""
    clock = StepClock(machine.gpu, costs)
    return sorted(clock.time(t.work).device_s / t.seconds for t in times)


def _measured(name: str, device: torch.device, matrices: MatrixRates) -> MachineFile:
    rates = copy_rates(device)
    is_gpu = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if is_gpu else None
    threads = "" if is_gpu else f", {torch.get_num_threads()} thread(s), CPU kernels: {cpu_library() is not None}"
    return MachineFile(
        name=name,
        how=f"dflash-trt bench machine, PyTorch {torch.__version__} on {device.type}{threads}",
        memory_bytes=properties.total_memory if properties else total_memory_bytes(),
        compute_capability=(properties.major, properties.minor) if properties else None,
        num_multiprocessors=properties.multi_processor_count if properties else 192,
        copy_bytes_per_s=rates[max(rates)],
        copy_bytes_per_s_by_working_set_bytes=rates,
        peak_flops_per_s_by_operand_bits=matrices.peaks(),
        plain_weight_bits=16 if not is_gpu and cpu_library() is not None else None,
    )


def _host_costs(*, is_chained: bool) -> tuple[float, float]:
    """Seconds of a step, and of each of its requests."""
    found = [
        measure_host(count, num_steps=60, num_prompt_tokens=100, is_chained=is_chained) for count in _HOST_REQUESTS
    ]
    slope, start = np.polyfit([report.num_requests for report in found], [report.step_ms / 1e3 for report in found], 1)
    return max(0.0, float(start)), max(0.0, float(slope))


def device_at_hand(device: str, num_threads: int | None) -> torch.device:
    """The device of RuntimeConfig's `device`, with `num_threads` threads on a CPU.

    Raises:
        ConfigError: "cuda" without a GPU.
    """
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ConfigError.about("--device", expected="a CUDA GPU that PyTorch can use", found="none")
    if device == "cpu" or not has_gpu:
        torch.set_num_threads(num_threads or default_num_threads())
        return torch.device("cpu")
    return torch.device("cuda")
