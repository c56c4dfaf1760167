"""Looked-up kernel times against the rows of NVIDIA's tables, and fitted ones against looked-up ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.model.gated_delta import GatedDelta
from dflash_trt.core.model.gqa import AttentionMask, Gqa
from dflash_trt.core.model.mla import Mla
from dflash_trt.core.model.rope import RopeSpec
from dflash_trt.plan import kernel_tables as module
from dflash_trt.plan.attention_work import MixingWork
from dflash_trt.plan.exchanges import Exchange, Kind
from dflash_trt.plan.gpus import GPUS, gpu_of
from dflash_trt.plan.kernel_fits import FittedKernels, kernel_fits
from dflash_trt.plan.kernel_tables import KernelTables, kernel_tables
from dflash_trt.plan.step_costs import clock_of
from dflash_trt.plan.step_work import Experts, Product, StepWork
from tests.plan.test_machine_file import MACHINE

core = pytest.importorskip("aiconfigurator_core", reason="the extra `silicon`")
parquet = pytest.importorskip("pyarrow.parquet")

DATA = Path(core.__file__).parent / "systems" / "data"
VERSIONS = {"trtllm": "1.3.0rc20", "sglang": "0.5.14", "vllm": "0.24.0"}
ROPE = RopeSpec(theta=1e4)


@pytest.fixture(scope="module")
def h200() -> KernelTables:
    tables = kernel_tables("h200")
    assert tables is not None
    return tables


def rows(gpu: str, part: str, name: str, **wanted: Any) -> list[dict[str, Any]]:
    """The table's rows with these values, of all three engines."""
    found = []
    for engine, version in VERSIONS.items():
        path = DATA / gpu / part / engine / version / f"{name}.parquet"
        filters = [(key, "=", value) for key, value in wanted.items()]
        found += parquet.read_table(path, filters=filters).to_pylist()
    return found


def product(n: int, k: int, num_rows: float, name: str | None = None, count: float = 1.0) -> Product:
    elements = count * n * k
    return Product(rows=num_rows, elements=elements, num_bytes=2 * elements, format=name, count=count, shape=(n, k))


def mixing(
    mixer: Gqa | Mla | GatedDelta, tokens: list[int], seen: list[int], *, block_size: int = 1, itemsize: int = 2
) -> MixingWork:
    return MixingWork(
        mixer=mixer,
        times=1,
        num_bytes=1e6,
        flops=1e6,
        num_tokens=np.array(tokens),
        num_seen=np.array(seen),
        block_size=block_size,
        kv_itemsize=itemsize,
    )


@pytest.mark.parametrize("num_rows", [1, 16, 256])
def test_a_product_takes_what_the_fastest_engine_was_measured_at(h200: KernelTables, num_rows: int) -> None:
    found = h200.product(product(4096, 4096, num_rows, count=3.0))
    table = rows("h200_sxm", "gemm", "gemm_perf", gemm_dtype="bfloat16", m=num_rows, n=4096, k=4096)
    assert found is not None and len(table) >= 3
    assert 1e3 * found.seconds == pytest.approx(3 * min(row["latency"] for row in table), rel=1e-6)
    assert found.source in ("TensorRT-LLM 1.3.0rc20", "SGLang 0.5.14", "vLLM 0.24.0")


def test_experts_are_found_by_their_sizes_and_ranks(h200: KernelTables) -> None:
    moe = Moe(num_experts=128, num_experts_per_token=4, intermediate_size=2880, routing="softmax_top_k")
    sizes = Experts(hidden_size=2880, moe=moe, moe_tp_size=1, ep_size=8, num_tokens=64)
    item = Product(rows=2.0, elements=1.0, num_bytes=1.0, format="mxfp4", count=36.0, experts=sizes)
    keys = {"hidden_size": 2880, "inter_size": 2880, "topk": 4, "num_experts": 128, "moe_tp_size": 1, "moe_ep_size": 8}
    table = rows(
        "h200_sxm", "moe", "moe_perf", moe_dtype="w4a16_mxfp4", num_tokens=64, distribution="power_law_1.01", **keys
    )
    found = h200.product(item)
    assert found is not None
    latencies = [1e-3 * 36 * row["latency"] for row in table]
    assert min(latencies) * 0.999 <= found.seconds <= max(latencies) * 1.001


def test_attention_of_decoding_requests_is_found_by_batch_and_context(h200: KernelTables) -> None:
    gqa = Gqa(num_heads=32, num_kv_heads=8, head_dim=128, rope=ROPE)
    table = rows(
        "h200_sxm",
        "attention",
        "generation_attention_perf",
        batch_size=8,
        num_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        window_size=0,
        kv_cache_dtype="bfloat16",
    )
    at = [row["latency"] for row in table if row["isl"] + row["step"] == 4096]
    found = h200.mixing(mixing(gqa, [1] * 8, [4095] * 8))
    assert found is not None and at
    assert 0.9 * min(at) < 1e3 * found.seconds < 1.1 * max(at)
    windowed = gqa.model_copy(update={"mask": AttentionMask(window=128)})
    near = h200.mixing(mixing(windowed, [1] * 8, [128] * 8))
    assert near is not None and near.seconds < found.seconds
    far, narrow = (
        h200.mixing(mixing(m, [1] * 8, [4095] * 8)) for m in (windowed, gqa.model_copy(update={"head_dim": 64}))
    )
    assert far is not None and far.seconds < found.seconds, "a window, at the same sizes"
    assert narrow is not None and narrow.seconds not in (found.seconds, far.seconds)
    half = h200.mixing(mixing(gqa, [1] * 64, [8191] * 64, itemsize=1))
    whole = h200.mixing(mixing(gqa, [1] * 64, [8191] * 64))
    assert half is not None and whole is not None and half.seconds < 0.7 * whole.seconds, "pages in FP8"


@pytest.mark.parametrize("gpu", ["h200", "b300"])
@pytest.mark.parametrize("tokens", [1024, 4096, 16384])
def test_attention_of_a_prompt_takes_what_tensorrt_llm_was_measured_at(gpu: str, tokens: int) -> None:
    """And the 13 us that the package adds for RoPE and page writes, so that no engine counts as measured."""
    tables, gqa = kernel_tables(gpu), Gqa(num_heads=32, num_kv_heads=8, head_dim=128, rope=ROPE)
    table = rows(
        f"{gpu}_sxm",
        "attention",
        "context_attention_perf",
        batch_size=1,
        isl=tokens,
        num_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        window_size=0,
        kv_cache_dtype="bfloat16",
        attn_dtype="bfloat16",
    )
    assert tables is not None and table
    found = tables.mixing(mixing(gqa, [tokens], [0]))
    assert found is not None
    assert 1e3 * found.seconds == pytest.approx(table[0]["latency"] + 0.0132, rel=0.01)
    assert found.source == f"TensorRT-LLM {VERSIONS['trtllm']}" and table[0]["framework"] == "TRTLLM"


@pytest.mark.parametrize("gpu", ["h200", "b300"])
def test_the_chunks_of_a_prompt_take_what_the_prompt_takes(gpu: str) -> None:
    """A chunk reads what is in pages, or in the prefix cache. Tables have whole prompts."""
    tables, gqa = kernel_tables(gpu), Gqa(num_heads=32, num_kv_heads=8, head_dim=128, rope=ROPE)
    assert tables is not None
    chunks = [tables.mixing(mixing(gqa, [4096], [seen])) for seen in (0, 4096, 8192, 12288)]
    whole = tables.mixing(mixing(gqa, [16384], [0]))
    assert whole is not None
    assert sum(chunk.seconds for chunk in chunks if chunk) == pytest.approx(whole.seconds, rel=0.2)


def test_a_verify_block_takes_no_less_than_a_decode_step_and_prompts_come_on_top(h200: KernelTables) -> None:
    gqa = Gqa(num_heads=32, num_kv_heads=8, head_dim=128, rope=ROPE)
    decode, block, mixed = (
        h200.mixing(mixing(gqa, tokens, [1024] * len(tokens), block_size=8))
        for tokens in ([1] * 16, [8] * 16, [8] * 16 + [512])
    )
    assert decode is not None and block is not None and mixed is not None
    assert decode.seconds <= block.seconds < mixed.seconds


def test_latents_of_a_block_are_a_decode_step_of_more_heads(h200: KernelTables) -> None:
    mla = Mla(num_heads=16, latent_dim=512, nope_dim=128, rope_dim=64, v_head_dim=128, rope=ROPE, scale=0.1)
    one, block, long = (h200.mixing(mixing(mla, [tokens] * 8, [4096] * 8, block_size=tokens)) for tokens in (1, 8, 32))
    assert one is not None and block is not None and long is not None
    assert one.seconds < block.seconds < 8 * one.seconds and block.seconds < long.seconds


@pytest.mark.parametrize(("seen", "keys"), [(4088, 512), (4089, 513)])
def test_ranks_that_divide_positions_attend_for_the_requests_of_all(
    h200: KernelTables, monkeypatch: pytest.MonkeyPatch, seen: int, keys: int
) -> None:
    """Each to an eighth of the keys, those of its own tokens among them."""
    asked = []
    monkeypatch.setattr(h200, "_decode", lambda *given: asked.append(given[2:]))
    mla = Mla(num_heads=16, latent_dim=512, nope_dim=128, rope_dim=64, v_head_dim=128, rope=ROPE, scale=0.1)
    h200.mixing(replace(mixing(mla, [8] * 4, [seen] * 4, block_size=8), num_parts=8))
    assert asked == [(8 * 4, keys)]


def test_a_delta_net_takes_half_as_long_for_each_further_token_of_a_block(h200: KernelTables) -> None:
    net = GatedDelta(num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128, conv_size=4)
    one, block, prompt = (h200.mixing(mixing(net, [n] * 8, [100] * 8, block_size=min(n, 8))) for n in (1, 8, 512))
    assert one is not None and block is not None and prompt is not None
    assert block.seconds == pytest.approx(4.5 * one.seconds)
    assert block.seconds < prompt.seconds < 8 * 512 * one.seconds, "each prompt in chunks"


def test_an_all_reduce_is_found_by_ranks_and_size(h200: KernelTables) -> None:
    item = Exchange(kind="all_reduce", count=64, rows=8, features=4096, num_bytes=1.0)
    table = rows("h200_sxm", "comm", "custom_allreduce_perf", num_gpus=8, message_size=8 * 4096)
    found = h200.exchange(item, 8)
    assert found is not None and table
    latencies = [1e-3 * 64 * row["latency"] for row in table]
    assert min(latencies) * 0.999 <= found.seconds <= max(latencies) * 1.001


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all"])
def test_an_exchange_of_rows_is_no_faster_than_the_links(h200: KernelTables, kind: Kind) -> None:
    """A message of NCCL's tables is the whole of what is gathered, scattered or sent, not one rank's part."""
    received, link_rate = 32768 * 7168 * 2 * 7 / 8, gpu_of("h200").link_rate
    found = h200.exchange(Exchange(kind=kind, count=1, rows=32768, features=7168, num_bytes=received), 8)
    assert found is not None and 0.6 * link_rate < received / found.seconds < link_rate


def test_what_no_engine_was_measured_at_is_left_to_others(h200: KernelTables) -> None:
    assert h200.product(product(4096, 4096, 8, "nvfp4_w4a16")) is None
    assert h200.product(product(4096, 4096, 8, "nvfp4")) is None, "no such operands on Hopper"
    assert h200.mixing(mixing(Gqa(num_heads=9, num_kv_heads=3, head_dim=128, rope=ROPE), [1], [100])) is None


def test_without_the_package_or_its_gpu_kernels_are_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_tables("a100") is None
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    kernel_tables.cache_clear()
    try:
        assert kernel_tables("h200") is None
        clock = clock_of(gpu_of("h200"), None)
        assert not clock.has_measured_kernels
    finally:
        kernel_tables.cache_clear()


@pytest.mark.parametrize("gpu", [gpu.name for gpu in GPUS])
def test_fits_are_near_the_tables_at_sizes_between_those_of_the_fit(gpu: str) -> None:
    tables, fitted = KernelTables(gpu), FittedKernels(gpu_of(gpu))
    ratios = []
    for n, k, num_rows in (
        (5120, 5120, 4),
        (5120, 5120, 100),
        (10240, 8192, 32),
        (8192, 3072, 1000),
        (28672, 4096, 24),
    ):
        known, guessed = tables.product(product(n, k, num_rows)), fitted.product(product(n, k, num_rows))
        assert known is not None
        ratios.append(guessed.seconds / known.seconds)
    assert 0.85 < float(np.median(ratios)) < 1.2 and all(0.6 < ratio < 1.6 for ratio in ratios), ratios
    assert all(fit.median_ratio < 1.7 and fit.num_points >= 20 for fit in kernel_fits(gpu).values())


def test_a_machine_of_which_only_floors_were_measured_takes_the_fractions_of_an_h200() -> None:
    clock = clock_of(MACHINE.gpu, None)
    assert not clock.has_measured_kernels and kernel_fits(MACHINE.gpu.name) == kernel_fits("h200")
    work = StepWork(
        num_requests=1,
        num_tokens=1,
        products=(product(64, 64, 1),),
        vector_bytes=0.0,
        kv_bytes=0.0,
        mixing_flops=0.0,
        activation_bytes=0.0,
        num_logits=0,
        num_layers=1,
        num_passes=0,
    )
    assert clock.time(work).products_s > 2 * 64 * 64 / MACHINE.gpu.read_rate(2 * 64 * 64)
