"""Times of steps against sums written out by hand, and what a machine hands on to its plan."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dflash_trt.core.errors import ConfigError
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.model.gqa import Gqa
from dflash_trt.core.model.rope import RopeSpec
from dflash_trt.plan.attention_work import MixingWork
from dflash_trt.plan.exchanges import Exchange
from dflash_trt.plan.gpus import Gpu, gpu_of
from dflash_trt.plan.kernel_fits import FittedKernels, kernel_fits
from dflash_trt.plan.kernel_tables import KernelTables
from dflash_trt.plan.machine_file import MachineFile
from dflash_trt.plan.step_costs import StepClock, StepCosts, StepTime, assumed_costs, assumptions_of
from dflash_trt.plan.step_floor import StepFloor, floor_of
from dflash_trt.plan.step_work import Experts, Product, StepWork
from tests.plan.test_machine_file import MACHINE

GPU = Gpu(
    name="g",
    memory_bytes=1 << 30,
    capability=(9, 0),
    bytes_per_s=1000.0,
    link_bytes_per_s=50.0,
    peak_flops={16: 4e5, 8: 8e5},
)
COSTS = StepCosts(
    product_rates={1: 1e4, 100: 3e4},
    product_memory_fraction=0.5,
    kv_s_per_byte=1e-1,
    mixing_s_per_flop=1e-2,
    activation_s_per_byte=2.0,
    logit_s=3.0,
    token_s=5.0,
    request_s=7.0,
    layer_s=11.0,
    pass_s=13.0,
    step_s=17.0,
    exchange_latency_s=0.25,
    host_step_s=19.0,
    host_request_s=23.0,
    is_host_hidden=False,
)
ROPE = RopeSpec(theta=1e4)
MOE = Moe(num_experts=4, num_experts_per_token=2, intermediate_size=8, routing="top_k_softmax")
WORK = StepWork(
    num_requests=3,
    num_tokens=4,
    products=(),
    vector_bytes=0.0,
    kv_bytes=600.0,
    mixing_flops=900.0,
    activation_bytes=1000.0,
    num_logits=10_000,
    num_layers=100_000,
    num_passes=1_000_000,
    num_ranks=2,
    mixings=(
        MixingWork(
            mixer=None,
            times=1,
            num_bytes=600.0,
            flops=900.0,
            num_tokens=np.ones(3),
            num_seen=np.ones(3),
            block_size=1,
            kv_itemsize=2,
        ),
    ),
    exchanges=(Exchange(kind="all_reduce", count=8, rows=4, features=5, num_bytes=200.0),),
)


def product(rows: float, num_bytes: float, elements: float = 1000.0, name: str | None = None) -> Product:
    return Product(rows=rows, elements=elements, num_bytes=num_bytes, format=name)


def test_a_step_takes_the_sum_of_its_parts() -> None:
    found = StepClock(GPU, COSTS).time(WORK)
    operators_s = 17 + 2 * 1000 + 3 * 10_000 + 5 * 4 + 7 * 3 + 11 * 100_000 + 13 * 1_000_000
    assert found == StepTime(
        products_s=0.0,
        mixing_s=pytest.approx(60 + 9),
        operators_s=operators_s,
        exchange_s=200 / 50 + 8 * 0.25,
        host_s=19 + 3 * 23,
        is_host_hidden=False,
        known_s={"rates of g": pytest.approx(69 + operators_s + 6)},
    )
    assert found.device_s == pytest.approx(69 + operators_s + 6)
    assert found.total_s == pytest.approx(found.device_s + 88)
    waiting = replace(WORK, exchanges=(replace(WORK.exchanges[0], host_s=0.5),))
    assert StepClock(GPU, COSTS).time(waiting).exchange_s == found.exchange_s + 8 * 0.5
    assert replace(found, is_host_hidden=True).total_s == found.device_s
    assert replace(found, is_host_hidden=True, host_s=1e9).total_s == 1e9


@pytest.mark.parametrize(
    ("item", "seconds"),
    [
        (product(1, 9000), 9000 / 500),  # half of the bandwidth
        (product(10, 0), 2 * 10 * 1000 / 2e4),  # between two measured numbers of rows, in their logarithm
        (product(1000, 0), 2 * 1000 * 1000 / 3e4),
        (product(0.5, 0), 2 * 0.5 * 1000 / 1e4),
        (product(100, 0, name="fp8"), 2 * 100 * 1000 / 6e4),
        (product(100, 0, name="fp8_w8a16"), 2 * 100 * 1000 / 3e4),
    ],
)
def test_a_product_takes_the_longer_of_its_bytes_and_its_flops(item: Product, seconds: float) -> None:
    clock = StepClock(GPU, COSTS)
    assert clock.time(replace(WORK, products=(item,))).products_s == pytest.approx(seconds)
    both = (item, product(1, 500))
    assert clock.time(replace(WORK, products=both)).products_s == pytest.approx(seconds + 1), "GEMM by GEMM"


def test_weights_are_read_as_wide_and_as_fast_as_the_machine_keeps_them() -> None:
    """The bandwidth is that of all bytes of the step: 6000 of weights, 400 of vectors, 600 of K/V."""
    kept = replace(GPU, plain_weight_bits=16, read_bytes_per_s={6999: 100.0, 7000: 200.0, 7001: 100.0})
    work = replace(WORK, products=(product(1, 12_000, elements=3000),), vector_bytes=400.0)
    assert StepClock(kept, COSTS).time(work).products_s == pytest.approx(6000 / (200 * 0.5))
    floor = floor_of(work, kept)
    assert (floor.weights_bytes, floor.kv_bytes, floor.memory_s) == (6400, 600, pytest.approx(7000 / 200))


@pytest.mark.parametrize("experts", [None, Experts(hidden_size=8, moe=MOE, moe_tp_size=1, ep_size=1, num_tokens=1)])
def test_a_format_without_a_fit_takes_that_of_unquantized_weights_of_its_kind(experts: Experts | None) -> None:
    gpu, kind = gpu_of("h200"), "products" if experts is None else "experts"
    fits = kernel_fits("h200")
    assert f"{kind} fp8_w8a16" not in fits and fits["products None"] != fits["experts None"]
    items = [replace(product(1, 1e9, name=name), experts=experts) for name in ("fp8_w8a16", None)]
    fit = fits[f"{kind} None"]
    expected = fit.latency_s + 1e9 / (4.8e12 * fit.memory_fraction)
    assert [FittedKernels(gpu).product(item).seconds for item in items] == [pytest.approx(expected)] * 2


def test_rows_of_features_are_bytes_without_a_kernel_of_their_own() -> None:
    attention, gqa = kernel_fits("h200")["attention"], Gqa(num_heads=2, num_kv_heads=1, head_dim=64, rope=ROPE)
    features = replace(WORK.mixings[0], times=7, num_bytes=1e9)
    alone, attended = (FittedKernels(gpu_of("h200")).mixing(replace(features, mixer=mixer)) for mixer in (None, gqa))
    assert alone.seconds == pytest.approx(1e9 / (4.8e12 * attention.memory_fraction))
    assert attended.seconds - alone.seconds == pytest.approx(7 * attention.latency_s)


def test_a_rank_alone_needs_no_links() -> None:
    lone = replace(GPU, link_bytes_per_s=None)
    assert StepClock(lone, COSTS).time(replace(WORK, exchanges=())).exchange_s == 0
    with pytest.raises(ConfigError, match="g: expected a bandwidth between ranks, found none"):
        StepClock(lone, COSTS).time(WORK)


def test_a_floor_waits_for_the_longer_of_memory_and_compute_and_then_for_the_links() -> None:
    floor: dict[str, Any] = {"weights_bytes": 0, "kv_bytes": 0, "exchange_bytes": 0, "flops": 0.0}
    found = StepFloor(memory_s=2.0, compute_s=3.0, exchange_s=4.0, **floor)
    assert (found.total_s, replace(found, memory_s=5.0).total_s) == (7.0, 9.0)


def test_a_clock_says_what_its_times_rest_on() -> None:
    gpu = gpu_of("h200")
    costs = assumed_costs(gpu)
    assert costs.is_host_hidden and costs.logit_s == pytest.approx(3 * 2 / 4.8e12), "written once, read twice"
    fitted, measured = (
        " ".join(assumptions_of(StepClock(gpu, costs, kernels)))
        for kernels in ([FittedKernels(gpu)], [KernelTables.__new__(KernelTables)])
    )
    assert "by fits to NVIDIA's measurements. pip install 'dflash-trt[silicon]'" in fitted
    assert assumptions_of(StepClock(gpu, costs)) == ("step times are from the machine file, one device a rank",)
    assert "as NVIDIA measured them (aiconfigurator-core 0.12.0)" in measured
    for said in (fitted, measured):
        assert f"take {1e6 * costs.layer_s:g} us a layer" in said
        assert (
            f"the host takes {1e6 * costs.host_step_s:g} us a step and {1e6 * costs.host_request_s:g} us a request"
            in said
        )


@pytest.mark.parametrize(
    ("gpu", "name", "bits"),
    [
        ("h200", None, 16),
        ("h200", "fp8", 8),
        ("h200", "nvfp4", 16),
        ("b200", "nvfp4", 4),
        ("b200", "nvfp4_w4a16", 16),
        ("b200", "fp8_block", 16),
        ("48", "fp8", 16),
        ("h100", "int8", 8),
        ("b200", "int8", 8),
        ("b300", "int8", 16),
    ],
)
def test_operands_are_as_wide_as_codes_where_the_gpu_quantizes_activations(
    gpu: str, name: str | None, bits: int
) -> None:
    assert gpu_of(gpu).operand_bits(name) == bits


def test_a_cpu_multiplies_integers_as_they_are_and_all_other_codes_as_plain_numbers() -> None:
    cpu = Gpu(name="cpu", memory_bytes=1, peak_flops={32: 1.0, 8: 4.0})
    assert [cpu.flops_of(cpu.operand_bits(name)) for name in ("int8", "fp8", "int4", None)] == [4.0, 1.0, 1.0, 1.0]


def test_names_of_gpus_are_in_any_case_and_sizes_in_gib() -> None:
    assert gpu_of("H200") is gpu_of("h200")
    assert (gpu_of("1.5").memory_bytes, gpu_of("1.5").name) == (3 << 29, "GPU of 1.5 GiB")


def test_a_machine_file_hands_on_everything_that_was_measured() -> None:
    given = {"compute_capability": (9, 0), "num_multiprocessors": 132, "link_bytes_per_s": 5e10}
    machine = MachineFile(**MACHINE.model_dump() | given)
    assert machine.gpu == Gpu(
        name="a CPU",
        memory_bytes=1 << 34,
        capability=(9, 0),
        num_multiprocessors=132,
        bytes_per_s=1e10,
        link_bytes_per_s=5e10,
        peak_flops={32: 2e11},
        read_bytes_per_s={1 << 20: 4e10, 1 << 28: 1e10},
        plain_weight_bits=16,
    )
