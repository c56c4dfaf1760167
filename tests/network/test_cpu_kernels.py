"""The CPU kernels against the same ops in PyTorch, in every instruction set."""

import itertools
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_trt.backends.step_inputs import step_inputs
from dflash_trt.backends.torch.native import build, library
from dflash_trt.backends.torch.native.build import UnavailableError, library_path
from dflash_trt.backends.torch.native.library import CpuKernels, NoKernels, cpu_kernels, load_kernels
from dflash_trt.backends.torch.native.linear import panel_linear
from dflash_trt.backends.torch.native.ops import NativeOps
from dflash_trt.backends.torch.native.programs import Programs
from dflash_trt.backends.torch.ops import TorchOps, make_rope_table
from dflash_trt.core.batch import ScheduledRequest, StepBatch, StepSampling
from dflash_trt.core.dtype import dtype_name
from dflash_trt.core.model.gqa import AttentionMask, Gqa
from dflash_trt.core.model.rope import RopeSpec, Rotary
from dflash_trt.core.state_spec import PagedKv
from dflash_trt.network.ops import Acceptance, KvDestination, Linear, Rows
from dflash_trt.network.state import Cache

if isinstance(FOUND := cpu_kernels(), NoKernels):
    pytest.skip(f"no CPU kernels: {FOUND.reason}", allow_module_level=True)

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, MAX_LEN, K = 6, 2, 64, 16, 512, 3
ROTARY = Rotary(RopeSpec(theta=10000.0), HEAD_DIM)
PARTIAL = Rotary(ROTARY.rope, HEAD_DIM // 4)  # the first features of a head alone
TABLES = {rotary: make_rope_table(rotary, num_positions=MAX_LEN, dtype=torch.float32) for rotary in (ROTARY, PARTIAL)}
# (tokens of the step, positions before them): blocks, a request of one token, prompts of more rows than a tile has.
STEP = [(4, 200), (1, 0), (1, 37), (70, 0), (33, 95), (4, 15)]
MASKS = {  # the causal ones also of blocks
    "causal": AttentionMask(),
    "window": AttentionMask(window=24),
    "window of one": AttentionMask(window=1),
    "whole block": AttentionMask(is_causal=False),
    "whole block, window": AttentionMask(is_causal=False, window=3),
    "anchored window": AttentionMask(is_causal=False, window=40, is_window_anchored=True),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make_ops(kernels: CpuKernels | None) -> Any:
    num_pages, parts = 0, []
    for index, (num_tokens, context_len) in enumerate(STEP):
        count = -(-(num_tokens + context_len) // PAGE_SIZE)
        # From the end of the pool on, backwards: pages of a request are not neighbours.
        pages = tuple(range(num_pages + count, num_pages, -1))
        num_pages += count
        parts.append(
            ScheduledRequest(
                request_id=str(index),
                token_ids=tuple(range(num_tokens)),
                context_len=context_len,
                num_candidates=min(num_tokens - 1, K) if num_tokens <= K + 1 else 0,
                page_ids=pages,
                sampling=StepSampling(),
            )
        )
    inputs = step_inputs(StepBatch(requests=tuple(parts), num_draft_tokens=K))
    common: dict[str, Any] = {"page_size": PAGE_SIZE, "num_draft_tokens": K}
    if kernels is None:
        return TorchOps(inputs, TABLES, **common)
    return NativeOps(inputs, TABLES, kernels=kernels, **common)


def make_gqa(mask: AttentionMask, **fields: Any) -> Gqa:
    return Gqa(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, rope=ROTARY.rope, mask=mask, **fields)


def make_cache(dtype: torch.dtype = torch.float32) -> Cache[Tensor]:
    spec = PagedKv(name="layer", num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype_name(dtype))
    return Cache(torch.full((64, *spec.page_shape(PAGE_SIZE)), torch.nan, dtype=dtype), spec)


def block_rows(ops: Any) -> Rows[Tensor]:
    starts = ops._inputs.context_lens.clone()
    none = torch.zeros(len(starts), dtype=torch.int32)
    acceptance = Acceptance(
        emitted_tokens=none, emitted_logprobs=none, num_accepted=none, bonus_tokens=none, next_context_lens=starts
    )
    rows: Rows[Tensor] = ops.token_blocks(acceptance, fill=0).rows
    return rows


def attended(
    ops: Any,
    gqa: Gqa,
    sinks: Tensor | None = None,
    *,
    is_block: bool = False,
    dtype: torch.dtype = torch.float32,
    rounds: bool = False,
) -> tuple[Tensor, Tensor]:
    """Of rows over pages that hold other requests' NaN, and the pages. With `rounds` what pages get is bfloat16."""
    generator, cache = torch.Generator().manual_seed(1), make_cache(dtype)

    def kept(x: Tensor) -> Tensor:
        return x.bfloat16().float() if rounds else x

    rows = block_rows(ops) if is_block else ops.token_rows()
    context = ops._inputs.context_lens.tolist()
    for pages, length in zip(ops._inputs.page_table.tolist(), context, strict=True):
        for position in range(length):
            where = cache.tensor[pages[position // PAGE_SIZE], :, position % PAGE_SIZE]
            where.copy_(kept(torch.randn(where.shape, generator=generator)))
    qkv = torch.randn(len(rows.positions), HEADS + 2 * KV_HEADS, HEAD_DIM, generator=generator)
    q, k, v = qkv.split_with_sizes((HEADS, KV_HEADS, KV_HEADS), 1)
    k, v = (k, v) if is_block else (kept(k), kept(v))
    return ops.attend(q * 3, k, v, rows, cache, gqa, sinks), cache.tensor


def difference(x: Tensor, y: Tensor) -> float:
    return ((x - y).abs().max() / y.abs().max()).item()


CASES = {name: (mask, False) for name, mask in MASKS.items() if mask.is_causal}
CASES |= {f"block, {name}": (mask, True) for name, mask in MASKS.items()}


@pytest.mark.parametrize(("mask", "is_block"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("fields", [{}, {"scale": 0.05}, {"softcap": 5.0}, {"has_sinks": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # of the pages
def test_attention_is_that_of_pytorch(
    kernels: CpuKernels, mask: AttentionMask, is_block: bool, fields: dict[str, Any], dtype: torch.dtype
) -> None:
    gqa, sinks = make_gqa(mask, **fields), torch.randn(HEADS) if "has_sinks" in fields else None
    found, pages = attended(make_ops(kernels), gqa, sinks, is_block=is_block, dtype=dtype)
    rounds = dtype == torch.bfloat16
    expected, expected_pages = attended(make_ops(None), gqa, sinks, is_block=is_block, rounds=rounds)
    assert difference(found, expected) < 2e-6  # measured 9e-7
    torch.testing.assert_close(pages.float(), expected_pages, rtol=0, atol=0, equal_nan=True)


def test_k_and_v_are_rounded_as_pytorch_rounds(kernels: CpuKernels) -> None:
    halves = [1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8 - 2.0**-20, 3.4e38, -3.4e38, 1e-39, -1e-45, 0.0, -0.0]
    values = torch.tensor([*halves, torch.inf, -torch.inf, torch.nan]).repeat(100)[: KV_HEADS * HEAD_DIM]
    ops, cache = make_ops(kernels), make_cache(torch.bfloat16)
    rows = ops.token_rows()
    kv = values.view(1, KV_HEADS, HEAD_DIM).repeat(len(rows.positions), 1, 1)
    ops.attend(torch.zeros(len(kv), HEADS, HEAD_DIM), kv, kv, rows, cache, make_gqa(MASKS["causal"]))
    found = cache.tensor[ops._inputs.page_table[1, 0], :, 0].flatten(1)  # the request without a context
    expected = values.bfloat16().expand(2, -1)
    assert torch.equal(found.isnan(), expected.isnan()) and expected.isnan().any()
    assert torch.equal(found.nan_to_num(7).view(torch.int16), expected.nan_to_num(7).view(torch.int16))


def test_another_mask_or_sink_is_another_attention(kernels: CpuKernels) -> None:
    """The negative control of the comparison above."""
    expected, _ = attended(make_ops(None), make_gqa(MASKS["window"]))
    wider = AttentionMask(window=25)
    assert difference(attended(make_ops(kernels), make_gqa(wider))[0], expected) > 1e-3
    sinks = torch.zeros(HEADS)
    assert difference(attended(make_ops(kernels), make_gqa(MASKS["window"]), sinks)[0], expected) > 1e-3


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7, 13, 70, 300])
@pytest.mark.parametrize("shape", [(24, 40), (160, 33), (512, 384)])
def test_a_linear_layer_gives_float32_products(kernels: CpuKernels, shape: tuple[int, int], num_rows: int) -> None:
    weight, bias, x = torch.randn(shape).bfloat16().float(), torch.randn(shape[0]), torch.randn(num_rows, shape[1])
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    layer = panel_linear(Linear(weight=weight, bias=bias), kernels)
    assert layer is not None
    assert difference(layer(x), expected) < 2e-6  # measured 7e-7
    without_bias = panel_linear(Linear(weight=weight), kernels)
    assert without_bias is not None
    assert difference(without_bias(x), expected - bias) < 2e-6
    weight[shape[0] - 1, shape[1] - 1] += 1  # the negative control
    corrupted = panel_linear(Linear(weight=weight.bfloat16().float(), bias=bias), kernels)
    assert corrupted is not None
    assert difference(corrupted(x), expected) > 1e-4


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7, 13, 70, 300])
@pytest.mark.parametrize("shape", [(24, 40), (160, 34), (512, 384)])
def test_a_bfloat16_layer_rounds_the_sum_of_exact_products(
    kernels: CpuKernels, shape: tuple[int, int], num_rows: int
) -> None:
    if not kernels.has_bfloat16:
        pytest.skip(f"{kernels.path.name} has no bfloat16 products")
    weight, x = torch.randn(shape).bfloat16(), torch.randn(num_rows, shape[1]).bfloat16()
    bias = torch.randn(shape[0]).bfloat16()
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    layer = panel_linear(Linear(weight=weight, bias=bias), kernels)
    assert layer is not None
    found = layer(x)
    assert found.dtype == torch.bfloat16
    # Half a unit in the last place of 8 bits, and what sums in float32 lose.
    assert ((found.double() - expected).abs() <= expected.abs() * 2.0**-8 + 1e-5 * expected.abs().max()).all()
    for start, stop in ((0, 1), (num_rows // 2, num_rows)):
        assert torch.equal(layer(x[start:stop]), found[start:stop])
    weight[shape[0] - 1, shape[1] - 1] += 1  # the negative control
    corrupted = panel_linear(Linear(weight=weight, bias=bias), kernels)
    assert corrupted is not None
    assert difference(corrupted(x)[:, -1].double(), expected[:, -1]) > 1e-2


@pytest.mark.parametrize("num_rows", [1, 5, 13])
@pytest.mark.parametrize("shape", [(24, 40), (160, 34), (70, 2)])
def test_a_drafters_layer_rounds_its_inputs_where_that_is_faster(
    kernels: CpuKernels, shape: tuple[int, int], num_rows: int
) -> None:
    weight, x, bias = torch.randn(shape).bfloat16().float(), torch.randn(num_rows, shape[1]), torch.randn(shape[0])
    layer = panel_linear(Linear(weight=weight, bias=bias), kernels, rounds_inputs=True)
    assert layer is not None
    given = x.bfloat16().float() if kernels.has_bfloat16 else x
    expected = torch.nn.functional.linear(given.double(), weight.double(), bias.double())
    assert difference(layer(x), expected) < 2e-6
    assert (difference(layer(x), torch.nn.functional.linear(x, weight, bias)) > 1e-4) is kernels.has_bfloat16


def test_bfloat16_is_left_to_onednn_where_that_is_faster(kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    even, odd = Linear(weight=torch.randn(32, 40).bfloat16()), Linear(weight=torch.randn(32, 41).bfloat16())
    for has_bfloat16, flags in itertools.product((False, True), ((), ("amx_bf16",))):
        monkeypatch.setattr(build, "_cpu_flags", lambda flags=flags: frozenset(flags))
        given = replace(kernels, has_bfloat16=has_bfloat16)
        assert (panel_linear(even, given) is not None) is (has_bfloat16 and not flags)
        assert panel_linear(odd, given) is None


def test_the_library_that_is_loaded_has_the_best_instructions_of_this_cpu() -> None:
    flags = build._cpu_flags()
    sets = {
        "avx512bf16": "avx512_bf16",
        "avx512vnni": "avx512_vnni",
        "avx512": "avx512vl",
        "avx2": "avx2",
        "neondot": "asimddp",
        "neon": "asimd",
    }
    best = next(name for name, flag in sets.items() if flag in flags)
    assert FOUND.path.name.startswith(f"cpu-kernels-{best}-")
    assert FOUND.has_bfloat16 is (best == "avx512bf16")


def test_weights_that_bfloat16_cannot_hold_are_left_to_pytorch(kernels: CpuKernels) -> None:
    weight = torch.randn(24, 40).bfloat16().float()
    weight[23, 39] += 2.0**-20
    assert panel_linear(Linear(weight=weight), kernels) is None


@pytest.mark.parametrize("width", [64, 384, 41])
def test_norm_and_activation_are_those_of_pytorch(kernels: CpuKernels, width: int) -> None:
    ops, plain = make_ops(kernels), make_ops(None)
    x, weight = torch.randn(5, 2 * width) * 30, torch.randn(2 * width)
    assert difference(ops.rms_norm(x, weight, 1e-6), plain.rms_norm(x, weight, 1e-6)) < 1e-6  # measured 1.2e-7
    assert difference(ops.rms_norm(x, weight, 1.0), plain.rms_norm(x, weight, 1e-6)) > 1e-5
    assert difference(ops.silu_mul(x), plain.silu_mul(x)) < 1e-6  # measured 1.2e-7
    assert difference(ops.silu_mul(x), plain.silu_mul(x.flip(1))) > 0.1
    extremes = torch.tensor([[-torch.inf, -200.0, -90.0, 0.0, 90.0, 200.0, torch.inf, torch.nan] * 8])
    both = torch.cat((extremes, torch.ones_like(extremes)), dim=1)
    torch.testing.assert_close(ops.silu_mul(both), plain.silu_mul(both), equal_nan=True)


def test_copies_of_rows_are_those_of_pytorch(kernels: CpuKernels) -> None:
    ops, plain = make_ops(kernels), make_ops(None)
    table, rows = torch.randn(40, 37), torch.tensor([[3, 39], [0, 3]], dtype=torch.int32)
    x = torch.randn(6, 3 * 37)
    parts = x.split(37, dim=1)  # views
    blocks = torch.randn(3 * (K + 1), 37)
    for name, call in {
        "embedding": lambda ops: ops.embedding(table, rows.flatten(), 6.25),
        "gather_rows": lambda ops: ops.gather_rows(table, rows),
        "scale": lambda ops: ops.scale(x, 0.3),
        "concat": lambda ops: ops.concat([parts[2], parts[0]]),
        "add": lambda ops: ops.add(parts[1], parts[0]),
        "add to heads": lambda ops: ops.add(x.view(6, 3, 37), x.view(6, 3, 37)),
        "add in columns": lambda ops: ops.add(x.t(), x.t()),
        "concat tokens": lambda ops: ops.concat([rows, rows]),
        "gather tokens": lambda ops: ops.gather_rows(rows, rows[1, :1]),
        "embedding of bfloat16": lambda ops: ops.embedding(
            table.bfloat16() if ops is not plain else table.bfloat16().float(), rows.flatten(), 6.25
        ),
        "without_first": lambda ops: ops.without_first(blocks),
        "without_first of one": lambda ops: ops.without_first(blocks[: K + 1]),
    }.items():
        assert torch.equal(call(ops), call(plain)), name


@pytest.mark.parametrize("rotary", [ROTARY, PARTIAL], ids=["heads", "parts of heads"])
@pytest.mark.parametrize("norm", [None, torch.randn(HEADS, HEAD_DIM)], ids=["no norm", "norm"])
def test_heads_are_normed_and_rotated_as_in_pytorch(kernels: CpuKernels, norm: Tensor | None, rotary: Rotary) -> None:
    x, positions = torch.randn(4, HEADS + 1, HEAD_DIM), torch.tensor([3, 500, 0, 77], dtype=torch.int32)

    def heads(ops: Any, at: Tensor) -> Tensor:
        table = ops.rope_table(rotary, at)
        given = x.clone()[:, :HEADS]  # a view
        rotated: Tensor = ops.norm_rope(given, norm, 1e-6, table)
        return rotated

    expected = heads(make_ops(None), positions)
    assert difference(heads(make_ops(kernels), positions), expected) < 1e-6  # measured 1.2e-7
    assert difference(heads(make_ops(kernels), positions - positions.clamp(max=1)), expected) > 1e-3


@torch.inference_mode()
def test_parts_of_longer_rows_are_normed_and_rotated_by_kernels_alone(kernels: CpuKernels) -> None:
    whole, weight = torch.randn(5, HEADS + 2 * KV_HEADS, HEAD_DIM), torch.randn(HEAD_DIM)
    positions, programs = torch.tensor([3, 500, 0, 77, 9], dtype=torch.int32), Programs(kernels)

    def rotated(ops: Any) -> Tensor:
        part = whole.split_with_sizes((HEADS, KV_HEADS, KV_HEADS), 1)[1]
        table = ops.rope_table(ROTARY, positions)
        found: Tensor = ops.rope(ops.rms_norm(part, weight, 1e-6), table)
        return ops.concat([found.flatten(1), ops.rope(part, table).flatten(1)])  # type: ignore[no-any-return]

    ops = make_ops(kernels)
    for _ in range(3):
        found = programs.run("key", lambda: rotated(ops))
        assert difference(found, rotated(make_ops(None))) < 1e-6
    assert list(programs._programs) == ["key"]


def test_the_context_of_drafts_is_stored_as_in_pytorch(kernels: CpuKernels) -> None:
    width = 2 * KV_HEADS * HEAD_DIM
    kv, norm = torch.randn(sum(n for n, _ in STEP), 2 * width), torch.randn(HEAD_DIM)

    def pages(ops: Any, num_rejected: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        rows = ops.token_rows()
        limits = ops._inputs.context_lens + torch.tensor([n for n, _ in STEP], dtype=torch.int32) - num_rejected
        table = ops.rope_table(ROTARY, rows.positions)
        layers = [
            KvDestination(cache=make_cache(dtype), k_norm=k_norm, eps=1e-6, rope=table) for k_norm in (norm, None)
        ]
        ops.store_kv(kv, layers, rows, limits)
        return [layer.cache.tensor for layer in layers]

    for found, expected in zip(pages(make_ops(kernels), 1), pages(make_ops(None), 1), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=3e-6, equal_nan=True)  # measured 1e-6
    rounded = pages(make_ops(kernels), 1, torch.bfloat16)
    for found, expected in zip(rounded, pages(make_ops(None), 1), strict=True):
        torch.testing.assert_close(found.float(), expected, rtol=2.0**-8, atol=3e-6, equal_nan=True)
    more = pages(make_ops(kernels), 0)[0].isnan().sum()
    assert more < pages(make_ops(None), 1)[0].isnan().sum()


def test_what_is_not_finite_stays_in_its_row(kernels: CpuKernels) -> None:
    layer = panel_linear(Linear(weight=torch.randn(64, 64).bfloat16().float()), kernels)
    assert layer is not None
    x = torch.randn(9, 64)
    x[4, 3] = torch.nan
    ops = make_ops(kernels)
    for values in (layer(x), ops.rms_norm(x, torch.ones(64), 1e-6), ops.silu_mul(torch.cat((x, x), dim=1))):
        assert values.isnan().any(dim=1).nonzero().flatten().tolist() == [4]


def test_a_row_has_the_same_bits_alone_and_among_others(kernels: CpuKernels) -> None:
    weight = torch.randn(160, 384).bfloat16().float()
    layer = panel_linear(Linear(weight=weight, bias=torch.randn(160)), kernels)
    assert layer is not None
    x = torch.randn(300, 384)
    together = layer(x)
    for start, stop in ((0, 1), (5, 7), (9, 12), (20, 24), (33, 46), (100, 300)):
        assert torch.equal(layer(x[start:stop]), together[start:stop])
    gate_up = torch.randn(7, 82)
    ops = make_ops(kernels)
    assert torch.equal(ops.silu_mul(gate_up[3:4]), ops.silu_mul(gate_up)[3:4])


def test_threads_change_no_bit(kernels: CpuKernels) -> None:
    def results() -> tuple[Tensor, Tensor]:
        ops = make_ops(kernels)
        torch.manual_seed(0)
        layer = panel_linear(Linear(weight=torch.randn(1000, 400).bfloat16().float()), kernels)
        assert layer is not None
        return layer(torch.randn(9, 400)), attended(ops, make_gqa(MASKS["causal"]))[0]

    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = results()
        torch.set_num_threads(3)
        assert all(torch.equal(*pair) for pair in zip(alone, results(), strict=True))
    finally:
        torch.set_num_threads(num_threads)


def reason_of(call: Callable[[], object]) -> str:
    with pytest.raises(UnavailableError) as raised:
        call()
    return str(raised.value)


def test_a_machine_without_the_kernels_says_why(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with monkeypatch.context() as context:
        context.setattr(build, "_cpu_flags", lambda: frozenset({"sse2"}))
        assert "this CPU has no" in reason_of(library_path)
    with monkeypatch.context() as context:
        context.setattr(build.platform, "machine", lambda: "riscv64")
        assert "riscv64" in reason_of(library_path)
    with monkeypatch.context() as context:
        context.setattr(build.shutil, "which", lambda _: None)
        assert "g++" in reason_of(library_path)
    with monkeypatch.context() as context:
        (tmp_path / "false").write_text("#!/bin/sh\necho 'error: out of luck' >&2; exit 1\n")
        (tmp_path / "false").chmod(0o755)
        context.setenv("CXX", str(tmp_path / "false"))
        assert "out of luck" in reason_of(library_path)
    assert list((tmp_path / "dflash-trt").iterdir()) == []  # nothing half made


def test_a_corrupted_library_is_named(tmp_path) -> None:
    (tmp_path / "library.so").write_bytes(b"no library")
    assert "library.so cannot be loaded" in reason_of(lambda: load_kernels(tmp_path / "library.so"))
    source = tmp_path / "other.cpp"
    source.write_text('extern "C" int dflash_trt_cpu_version() { return -1; }\n')
    subprocess.run([build._compiler(), "-shared", "-fPIC", source, "-o", tmp_path / "other.so"], check=True)
    assert "cannot be loaded" in reason_of(lambda: load_kernels(tmp_path / "other.so"))


def test_a_cache_filled_elsewhere_needs_no_compiler(monkeypatch) -> None:
    path = library_path()
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    assert library_path() == path


@pytest.fixture
def asked_anew() -> Iterator[None]:
    cpu_kernels.cache_clear()
    yield
    cpu_kernels.cache_clear()


@pytest.mark.usefixtures("asked_anew")
def test_the_reason_is_logged_once(monkeypatch, caplog) -> None:
    def fail() -> None:
        raise UnavailableError("there is no C++ compiler")

    monkeypatch.setattr(library, "library_path", fail)
    assert [cpu_kernels(), cpu_kernels()] == [NoKernels("there is no C++ compiler")] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "the CPU kernels are not used, and PyTorch takes up to twice as long: there is no C++ compiler"
    ]
    assert caplog.records[0].levelname == "WARNING"


@pytest.mark.usefixtures("asked_anew")
def test_a_cpu_without_kernels_is_no_warning(monkeypatch, caplog) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    with caplog.at_level("INFO"):
        assert isinstance(cpu_kernels(), NoKernels)
    assert [(record.levelname, "riscv64" in record.getMessage()) for record in caplog.records] == [("INFO", True)]
