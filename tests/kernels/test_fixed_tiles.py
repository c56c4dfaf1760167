"""The kernels of `--deterministic`: the bits of a row depend neither on its place nor on the rows beside it."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from dflash_trt.backends.cuda.experts import prepare_device_experts, run_device_experts
from dflash_trt.backends.cuda.linear import (
    ACTIVATIONS,
    WEIGHT_ONLY,
    DeviceInt8Weight,
    DevicePackedWeight,
    Plain,
    apply_device_linear,
    prepare_device_linear,
    prepare_fixed_linear,
)
from dflash_trt.backends.cuda.ops import TorchGpuOps
from dflash_trt.backends.torch.process_group import OneRank
from dflash_trt.formats.base import segment_amax
from dflash_trt.formats.registry import weight_format, weight_formats
from dflash_trt.kernels import attention_fixed, attention_launch, launch_rules, norm_launch, packed_linear_launch
from dflash_trt.kernels.attention_fixed import FixedSplits
from dflash_trt.kernels.attention_launch import AttentionOptions
from dflash_trt.kernels.attention_plan import Partition, fixed_tile, with_fixed_splits
from dflash_trt.kernels.head_product_launch import head_product
from dflash_trt.kernels.launching import MAX_REQUESTS, request_capacity
from dflash_trt.kernels.row_codes import FP8, NVFP4
from dflash_trt.kernels.row_codes_launch import RowCodes, quantize_rows
from dflash_trt.network.ops import Linear
from tests.kernels import reference_attention
from tests.kernels.attention_steps import Heads, Step, Tensors, make_tensors
from tests.kernels.rejection_drafts import with_rejection_sampling
from tests.kernels.test_device_experts import MOE, make_experts
from tests.kernels.test_sampling_kernels import VOCAB_SIZE, make_inputs, make_logits, run_kernels
from tests.kernels_on import DEVICE, moved
from tests.network.test_fixed_shapes import random

pytestmark = pytest.mark.usefixtures("rows_alike")
NUM_ROWS, IN, SEGMENTS = 70, 160, (48, 32)
ALONE = (6, 19, 37, 63, 64, 69)
AMONG = ((0, 70), (1, 20), (5, 70), (36, 38), (60, 70))  # in other places of a tile, or in another tile
FEW_ALONE, FEW_AMONG = (4, 8), ((0, 9), (4, 6), (7, 9))  # for kernels with a program for each row
FORMATS = sorted(name for name, known in weight_formats().items() if known.weight_type in (*ACTIVATIONS, *WEIGHT_ONLY))
FLOAT16_FORMATS = [name for name in FORMATS if name not in ("int4", "mxfp4")]  # block scales that float16 cannot hold


def changed_rows(
    compute: Callable[[Tensor], Tensor],
    x: Tensor,
    alone_rows: Sequence[int] = ALONE,
    slices: Sequence[tuple[int, int]] = AMONG,
) -> list[int]:
    """Rows whose result among others, in any of several places, is not what they have alone."""
    among = [(first, compute(x[first:last].clone()).cpu()) for first, last in slices]
    changed = []
    for row in alone_rows:
        alone = compute(x[row : row + 1].clone()).cpu()[0]
        results = [found[row - first] for first, found in among if first <= row < first + len(found)]
        assert len(results) >= 2
        if not all(torch.equal(_bytes(result), _bytes(alone)) for result in results):
            changed.append(row)
    return changed


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def make_linear(format_name: str | None, dtype: torch.dtype, input_amax: Sequence[float] = (4.0, 4.0)) -> Linear:
    weight, bias = random(sum(SEGMENTS), IN), random(sum(SEGMENTS), dtype=dtype).to(DEVICE)
    if format_name is None:
        return Linear(weight=weight.to(DEVICE, dtype), bias=bias)
    known = weight_format(format_name)
    ranges = segment_amax(weight, SEGMENTS)
    if known.shares_weight_scale:
        ranges = ranges.amax().expand(len(SEGMENTS)).clone()
    amax = torch.tensor(input_amax) if known.has_input_scale else None
    quantized = known.quantize(weight, segments=SEGMENTS, weight_amax=ranges, input_amax=amax)
    return Linear(weight=quantized.map_tensors(lambda _, tensor: tensor.to(DEVICE)), bias=bias)


@pytest.mark.parametrize(
    ("format_name", "dtype"),
    [
        *((name, torch.float32) for name in (None, *FORMATS)),
        *((name, torch.float16) for name in (None, *FLOAT16_FORMATS)),
    ],
)
@pytest.mark.usefixtures("exact_codes")
def test_a_linear_with_fixed_tiles_depends_on_no_other_row(format_name: str | None, dtype: torch.dtype) -> None:
    linear, x = make_linear(format_name, dtype), random(NUM_ROWS, IN, dtype=dtype).to(DEVICE)
    fixed, usual = prepare_fixed_linear(linear, dtype), prepare_device_linear(linear, dtype)
    assert isinstance(fixed.weight, DeviceInt8Weight if format_name == "int8" else DevicePackedWeight)
    assert changed_rows(lambda rows: apply_device_linear(Plain(rows), fixed), x) == []
    expected = apply_device_linear(Plain(x), usual)
    torch.testing.assert_close(
        apply_device_linear(Plain(x), fixed), expected, rtol=1e-3, atol=1e-4 if dtype == torch.float32 else 0.1
    )


def test_segments_whose_inputs_have_scales_of_their_own_keep_them(exact_codes: None) -> None:
    linear, x = make_linear("fp8", torch.float32, input_amax=(1.0, 4.0)), random(3, IN).to(DEVICE)
    expected = apply_device_linear(Plain(x), prepare_device_linear(linear, torch.float32))
    found = apply_device_linear(Plain(x), prepare_fixed_linear(linear, torch.float32))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_fixed_tiles_share_the_memory_of_the_weights() -> None:
    linear = make_linear(None, torch.float32)
    (matrix,) = prepare_fixed_linear(linear, torch.float32).weight.matrices
    assert matrix.codes.data_ptr() == linear.weight.data_ptr()


@pytest.mark.parametrize("format_name", ["fp8", "int4", "int8", "mxfp4", "nvfp4"])
def test_experts_with_fixed_tiles_depend_on_no_other_row(format_name: str, exact_codes: None) -> None:
    experts = prepare_device_experts(moved(make_experts(format_name)), has_fixed_tiles=True)
    hidden = experts.down.out_size
    x = random(NUM_ROWS, hidden + MOE.num_experts)

    def compute(rows: Tensor) -> Tensor:
        logits, inputs = rows[:, hidden:].clone(), rows[:, :hidden].clone()
        return run_device_experts(inputs.to(DEVICE), logits.to(DEVICE), experts, MOE)

    assert changed_rows(compute, x) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="no GPU has said whether its bits change, too")
@pytest.mark.parametrize("format_name", [None, "nvfp4_w4a16"])
def test_the_same_kernel_with_other_tiles_gives_other_bits(
    format_name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    usual = packed_linear_launch.tile_tokens
    monkeypatch.setattr(packed_linear_launch, "tile_tokens", lambda num_rows, **_: usual(num_rows))
    linear = prepare_fixed_linear(make_linear(format_name, torch.float32), torch.float32)
    assert changed_rows(lambda rows: apply_device_linear(Plain(rows), linear), random(NUM_ROWS, IN)) != []


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_product_of_heads_depends_on_no_other_row(dtype: torch.dtype, is_transposed: bool) -> None:
    heads, in_size, out_size = 3, 40, 24
    sizes = (out_size, in_size) if is_transposed else (in_size, out_size)
    factors = random(heads, 5 + sizes[0], sizes[1], dtype=dtype).to(DEVICE)[:, 5:]  # among other rows of the weight
    x = random(NUM_ROWS, heads, in_size, dtype=dtype).to(DEVICE)

    def compute(rows: Tensor) -> Tensor:
        out = rows.new_zeros(len(rows), heads, out_size + 8)  # next to what is rotated
        head_product(rows, factors, out[..., :out_size], is_transposed=is_transposed)
        return out

    assert changed_rows(compute, x) == []
    by_heads = factors.mT if is_transposed else factors
    expected = torch.einsum("nhi,hio->nho", x.double(), by_heads.double()).to(dtype)
    found = compute(x)
    torch.testing.assert_close(
        found[..., :out_size], expected, rtol=2e-3, atol=1e-2 if dtype == torch.float16 else 1e-4
    )
    assert not found[..., out_size:].any()


def test_without_fixed_tiles_they_follow_the_number_of_rows() -> None:
    """What a GPU would compute with for one row and for many."""
    assert packed_linear_launch.tile_tokens(1) != packed_linear_launch.tile_tokens(NUM_ROWS)
    few, many = (launch_rules.tile_tokens(num_entries=n, num_experts=8, widens_weights=0) for n in (2, 1000))
    assert few != many
    plain, fp8 = (make_linear(name, torch.float32) for name in (None, "fp8"))
    assert prepare_device_linear(plain, torch.float32) is plain, "PyTorch's GEMM"
    assert not isinstance(prepare_device_linear(fp8, torch.float32).weight, DevicePackedWeight), "PyTorch's FP8 GEMM"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", [None, FP8, NVFP4], ids=["as they are", "fp8", "nvfp4"])
def test_norms_gates_and_codes_depend_on_no_other_row(form: int | None, dtype: torch.dtype, exact_codes: None) -> None:
    hidden = 192
    x, weight = random(NUM_ROWS, 2 * hidden, dtype=dtype).to(DEVICE), random(hidden, dtype=dtype).to(DEVICE)

    def codes_of(num_rows: int) -> RowCodes | None:
        return None if form is None else RowCodes.allocate(form, torch.tensor([0.01], device=DEVICE), num_rows, hidden)

    def normed(rows: Tensor) -> Tensor:
        half, codes = rows[:, :hidden].contiguous(), codes_of(len(rows))
        return _found(norm_launch.rms_norm(half, weight, 1e-6, codes=codes), codes)

    def added(rows: Tensor) -> Tensor:
        (a, b), codes = (half.contiguous() for half in rows.chunk(2, dim=1)), codes_of(len(rows))
        return _found(norm_launch.add_rms_norm(a, b, weight, 1e-6, codes=codes)[1], codes)

    def gated(rows: Tensor) -> Tensor:
        codes = codes_of(len(rows))
        return _found(norm_launch.silu_mul(rows, codes=codes), codes)

    def quantized(rows: Tensor) -> Tensor:
        if form is None:
            return rows
        codes = quantize_rows(rows, form, torch.tensor([0.01], device=DEVICE))
        return _found(codes.values, codes)

    for compute in (normed, added, gated, quantized):
        assert changed_rows(compute, x, FEW_ALONE, FEW_AMONG) == [], compute


def _found(result: Tensor, codes: RowCodes | None) -> Tensor:
    parts = [result] if codes is None else [codes.values, *([] if codes.block_scale is None else [codes.block_scale])]
    return torch.cat([_bytes(part).view(len(part), -1) for part in parts], dim=1)


def test_the_sampler_depends_on_no_other_request() -> None:
    settings = [(0.0, 0, 1.0, 0.0, 1), (0.8, 0, 1.0, 0.0, 2), (1.0, 40, 0.9, 0.0, 3), (0.7, 0, 0.8, 0.05, 4)]
    logits, width = make_logits(3 * len(settings)), 3
    whole = with_rejection_sampling(
        make_inputs(settings, width=width), logits, draft_topk=8, draft_stream=torch.tensor([0, 0, 1, 1]).int()
    )
    together = run_kernels(logits, whole)
    for r in range(len(settings)):
        rows = slice(r * width, (r + 1) * width)
        mine = {item.name: getattr(whole, item.name)[r : r + 1] for item in fields(whole)}
        mine |= {"token_ids": whole.token_ids[rows], "positions": whole.positions[rows]}
        mine |= {
            "token_offsets": torch.tensor([0, width], dtype=torch.int32),
            "logit_rows": whole.logit_rows[r : r + 1] - r * width,
        }
        alone = run_kernels(logits[rows], replace(whole, **mine))
        assert torch.equal(alone.emitted_tokens[0], together.emitted_tokens[r])
        assert torch.equal(alone.emitted_logprobs[0], together.emitted_logprobs[r])
    assert int(together.emitted_tokens.max()) < VOCAB_SIZE
    assert together.num_accepted[2:].any()


STEPS = {
    "a chunk beside verify blocks": Step(rows=(2, 13, 3), contexts=(300, 500, 0)),
    "a window": Step(rows=(2, 13, 3), contexts=(300, 500, 0), options=AttentionOptions(window=150)),
    "sinks, 4 query heads of a K/V head": Step(
        rows=(2, 9, 3),
        contexts=(300, 290, 0),
        heads=Heads(num_heads=4, num_kv_heads=1),
        options=AttentionOptions(sinks=torch.tensor([0.5, -1.0, 2.0, 4.0])),
    ),
    "halves of heads of 512": Step(
        rows=(2, 13, 3),
        contexts=(300, 500, 0),
        heads=Heads(num_heads=8, num_kv_heads=1, head_dim=512),
        dtype=torch.float16,
    ),
    "FP8 pages": Step(
        rows=(2, 13, 3),
        contexts=(300, 500, 0),
        dtype=torch.float16,
        page_dtype=torch.float8_e4m3fn,
        options=AttentionOptions(k_scale=0.5, v_scale=1.5),
    ),
}


def attend(step: Step, tensors: Tensors, splits: FixedSplits) -> Tensor:
    tensors, heads = tensors.to(DEVICE), step.heads
    options = replace(step.options, split_length=splits.split_length)
    if options.sinks is not None:
        options = replace(options, sinks=options.sinks.to(DEVICE))
    workspace = splits.allocate_workspace(
        heads_per_kv=heads.num_heads // heads.num_kv_heads,
        kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        device=DEVICE,
    )
    attended = torch.full_like(tensors.q, torch.nan)
    for piece in splits.pieces(tensors.requests, len(tensors.q)):
        attention_launch.attend_pages(
            tensors.q[piece.rows],
            tensors.pages,
            piece.requests,
            options,
            workspace=workspace,
            num_verify_rows=3,
            plans=piece.plans,
            attended=attended[piece.rows],
        )
    return attended.cpu()


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_attention_in_pieces_is_that_of_the_whole_step(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces end within a request, and requests begin and end within a piece."""
    monkeypatch.setattr(launch_rules, "MIN_SPLIT_LENGTH", 128)
    monkeypatch.setattr(attention_fixed, "MIN_PIECE_ROWS", 1)
    tensors = make_tensors(step)
    num_keys = tensors.requests.page_table.shape[1] * step.page_size
    sizes = {"max_requests": len(step.rows), "max_keys": num_keys}
    whole, cut = (FixedSplits.of(max_rows=rows, **sizes) for rows in (len(tensors.q), 10))
    assert num_keys > 2 * whole.split_length, "several splits"
    found = attend(step, tensors, cut)
    assert torch.equal(found, attend(step, tensors, whole))
    want = reference_attention.attend_pages(tensors.q, tensors.pages, tensors.requests, step.options)
    assert float((found.float() - want.float()).abs().max()) <= (3e-6 if step.dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize("heads_per_kv", [1, 8, 64])
@pytest.mark.parametrize("num_requests", [1, 64, 2048, MAX_REQUESTS])
def test_every_piece_is_a_grid_of_cuda(num_requests: int, heads_per_kv: int) -> None:
    """65,535 programs along y at most, with 16 rows a request and any number of keys."""
    for num_keys in (300, 32_768, 131_072 + 96):
        splits = FixedSplits.of(max_requests=num_requests, max_rows=16 * num_requests, max_keys=num_keys)
        part = Partition(
            num_rows=splits.piece_rows,
            num_requests=num_requests,
            request_capacity=request_capacity(num_requests),
            has_block=False,
            tile=fixed_tile(heads_per_kv),
            heads_per_kv=heads_per_kv,
            key_block=64,
            max_lag=num_keys,
            window_step=1,
            num_slots=0,
        )
        assert with_fixed_splits(part, splits.split_length, num_keys=num_keys).num_items < 65_536


def test_splits_and_pieces_are_sizes_of_the_engine() -> None:
    splits = FixedSplits.of(max_requests=64, max_rows=512, max_keys=32_768)
    assert (splits.split_length, splits.piece_rows) == (4096, 512)
    assert FixedSplits.of(max_requests=1, max_rows=8, max_keys=600).split_length == 256
    requests = make_tensors(Step(rows=(2, 3), contexts=(4, 5))).requests
    (piece,) = splits.pieces(requests, 5)
    assert piece.requests is requests, "a graph of verify blocks launches nothing for its piece"


class FourRanks(OneRank):
    """Addends of all ranks, in one process."""

    num_ranks = 4

    def __init__(self, addends: Sequence[Tensor]) -> None:
        self.addends = addends

    def all_gather_columns(self, x: Tensor) -> Tensor:
        assert x is self.addends[0]
        return torch.cat(list(self.addends), dim=1)


def test_sums_over_ranks_have_one_order_and_are_rounded_once() -> None:
    addends = [random(5, 96, dtype=torch.float16) * 10**rank for rank in range(4)]
    ops = object.__new__(TorchGpuOps)
    ops._ranks, ops._splits = FourRanks(addends), FixedSplits.of(max_requests=1, max_rows=8, max_keys=600)
    in_order = addends[0].float() + addends[1].float() + addends[2].float() + addends[3].float()
    assert torch.equal(ops.all_reduce(addends[0]), in_order.half())
    backwards = addends[3] + addends[2] + addends[1] + addends[0]  # the negative control, rounded each time
    assert not torch.equal(ops.all_reduce(addends[0]), backwards)
