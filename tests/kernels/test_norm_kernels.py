"""Norms and the gated activation against their definitions, and against the network's own ops."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from dflash_trt.kernels import norm_launch
from dflash_trt.kernels.row_codes import FP8, NVFP4, NVFP4_TILED
from dflash_trt.kernels.row_codes_launch import RowCodes, quantize_rows
from tests.kernels import reference_norm
from tests.kernels.block_scales import row_by_row
from tests.kernels_on import DEVICE

SIZES = [1, 16, 96, 257, 1024]


def random(*shape, dtype, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2).to(DEVICE, dtype)


def tolerance(dtype):
    """One unit in the last place of the output, for sums in another order."""
    return {"rtol": 2e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-10, "atol": 1e-6}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("hidden_size", SIZES)
def test_the_norm_is_the_network_s(hidden_size, dtype):
    x, weight = random(3, hidden_size, dtype=dtype), random(hidden_size, dtype=dtype, seed=1)
    normed = norm_launch.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(normed, reference_norm.rms_norm(x, weight, 1e-6), **tolerance(dtype))
    torch.testing.assert_close(normed, F.rms_norm(x, (hidden_size,), weight, 1e-6), **tolerance(dtype))


def test_the_norm_takes_columns_of_a_wider_tensor_and_heads():
    wide, weight = random(5, 40, dtype=torch.float32), random(16, dtype=torch.float32, seed=1)
    part = wide[:, 8:24]
    expected = reference_norm.rms_norm(part, weight, 1e-6)
    torch.testing.assert_close(norm_launch.rms_norm(part, weight, 1e-6), expected, **tolerance(torch.float32))
    heads = wide[:, :32].reshape(5, 2, 16)
    expected = reference_norm.rms_norm(heads, weight, 1e-6)
    torch.testing.assert_close(norm_launch.rms_norm(heads, weight, 1e-6), expected, **tolerance(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("hidden_size", SIZES)
def test_the_residual_sum_and_its_norm_come_from_one_launch(hidden_size, dtype):
    x, residual = random(4, hidden_size, dtype=dtype), random(4, hidden_size, dtype=dtype, seed=1)
    weight = random(hidden_size, dtype=dtype, seed=2)
    total, normed = norm_launch.add_rms_norm(x, residual, weight, 1e-5)
    expected_total, expected = reference_norm.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(normed, expected, **tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_columns", [1, 80, 2500])
def test_a_sigmoid_gates_columns_or_whole_rows(num_columns, dtype):
    x = random(3, num_columns, dtype=dtype)
    for gate in (random(3, num_columns, dtype=dtype, seed=1), random(3, 1, dtype=dtype, seed=2)):
        expected = x * gate.sigmoid()
        torch.testing.assert_close(norm_launch.sigmoid_mul(x, gate), expected, **tolerance(dtype))
        with pytest.raises(AssertionError):  # the negative control
            torch.testing.assert_close(norm_launch.sigmoid_mul(x, -gate), expected, **tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("ffn_size", [1, 80, 257, 5000])
def test_the_gated_activation_is_the_network_s(ffn_size, dtype):
    gate_up = random(3, 2 * ffn_size, dtype=dtype)
    gated = norm_launch.silu_mul(gate_up)
    # fp16: the activation itself is rounded, so two units of the product
    close = {"rtol": 2e-6, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 2**-9, "atol": 1e-6}
    torch.testing.assert_close(gated, reference_norm.silu_mul(gate_up), **close)
    gate, up = gate_up.chunk(2, dim=-1)
    torch.testing.assert_close(gated, F.silu(gate) * up, **close)
    expected = F.gelu(gate.double(), approximate="tanh").to(dtype) * up  # 1 + tanh loses digits in float32
    torch.testing.assert_close(norm_launch.gelu_mul(gate_up), expected, rtol=3 * close["rtol"], atol=close["atol"])
    assert not torch.allclose(gated, expected, atol=1e-2), "the negative control"


@pytest.mark.parametrize("form", [FP8, NVFP4, NVFP4_TILED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_codes_are_those_of_the_result_in_the_dtype_of_the_activations(dtype, form, exact_codes):
    """A row of the gate is two programs."""
    num_rows, hidden_size, ffn_size = 2, 192, 2048 + 64
    x, residual = random(num_rows, hidden_size, dtype=dtype), random(num_rows, hidden_size, dtype=dtype, seed=1)
    weight, scale = random(hidden_size, dtype=dtype, seed=2), torch.tensor([0.013], device=DEVICE)
    gate_up = random(num_rows, 2 * ffn_size, dtype=dtype, seed=3)
    runs = {
        "rms_norm": lambda **options: norm_launch.rms_norm(x, weight, 1e-6, **options),
        "add_rms_norm": lambda **options: norm_launch.add_rms_norm(x, residual, weight, 1e-6, **options)[1],
        "silu_mul": lambda **options: norm_launch.silu_mul(gate_up, **options),
        "gelu_mul": lambda **options: norm_launch.gelu_mul(gate_up, **options),
    }
    for name, run in runs.items():
        result = run()
        codes = RowCodes.allocate(form, scale, *result.shape)
        assert run(codes=codes) is codes.values
        assert same_codes(codes, quantize_rows(result, form, scale)), name
        assert not same_codes(codes, quantize_rows(result, form, scale * 1.05)), name
    codes = RowCodes.allocate(form, scale, *x.shape)
    total, _ = norm_launch.add_rms_norm(x, residual, weight, 1e-6, codes=codes)
    assert torch.equal(total, x + residual)


def same_codes(a, b):
    """Of tiles the rows that exist."""
    if a.block_scale is None or b.block_scale is None:
        return torch.equal(a.values.float(), b.values.float())
    scales = [scale_rows(codes.block_scale.float(), len(codes.values)) for codes in (a, b)]
    return torch.equal(a.values, b.values) and torch.equal(*scales)


def scale_rows(block_scale, num_rows):
    return block_scale if block_scale.dim() == 2 else row_by_row(block_scale, num_rows)


def test_a_wrong_epsilon_weight_or_order_is_noticed():
    """The negative controls of the tests above."""
    x, weight = random(3, 96, dtype=torch.float32), random(96, dtype=torch.float32, seed=1)
    normed = norm_launch.rms_norm(x, weight, 1e-6)
    changed = weight.clone()
    changed[50] *= 1.0001
    for wrong in (
        reference_norm.rms_norm(x, weight, 1e-4),
        reference_norm.rms_norm(x, changed, 1e-6),
        norm_launch.add_rms_norm(x, x.roll(1) * 1e-3, weight, 1e-6)[1],
    ):
        assert not torch.allclose(normed, wrong, **tolerance(torch.float32))
    swapped = torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)
    assert not torch.allclose(norm_launch.silu_mul(x), norm_launch.silu_mul(swapped), atol=1e-3)
