"""Layouts of a CPU's weights: which layer gets which, and that none changes a product."""

import pytest
import torch

from dflash_trt.backends.torch import linear as torch_linear
from dflash_trt.backends.torch.linear import HalfLinear, apply_linear, pack_for_cpu
from dflash_trt.network.ops import Linear

if "fbgemm" not in torch.backends.quantized.supported_engines:
    pytest.skip("float16 weights need FBGEMM, which this PyTorch is built without", allow_module_level=True)

GENERATOR = torch.Generator().manual_seed(0)
BFLOAT16 = torch.randn(24, 40, generator=GENERATOR).bfloat16().float() / 16
BIAS = torch.randn(24, generator=GENERATOR)


def error(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> float:
    """Largest difference from a product in float64, relative to the largest product."""
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = apply_linear(x, pack_for_cpu(Linear(weight=weight, bias=bias)))
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("num_rows", [1, 3, 8, 70])
def test_weights_in_float16_give_float32_products(num_rows: int) -> None:
    x = torch.randn(num_rows, 40, generator=GENERATOR)
    assert error(x, BFLOAT16, BIAS) < 5e-7  # measured 1.1e-7
    wrong = pack_for_cpu(Linear(weight=BFLOAT16 * 1.001))  # the negative control, not in bfloat16
    assert not isinstance(wrong, HalfLinear)
    assert error(x, (BFLOAT16 * 1.001).half().float()) < 5e-7
    assert (apply_linear(x, wrong) - x @ BFLOAT16.t()).abs().max() > 1e-4


def test_no_rows_give_no_rows() -> None:
    assert apply_linear(torch.empty(0, 40), pack_for_cpu(Linear(weight=BFLOAT16))).shape == (0, 24)


@pytest.mark.parametrize("factor", [2.0**-100, 2.0**-10, 1.0, 2.0**100])
def test_the_size_of_a_layers_weights_does_not_matter(factor: float) -> None:
    layer = pack_for_cpu(Linear(weight=BFLOAT16 * factor))
    assert isinstance(layer, HalfLinear)
    x = torch.randn(8, 40, generator=GENERATOR)
    assert error(x, BFLOAT16 * factor) < 5e-7


def test_tiny_weights_beside_large_ones_are_kept() -> None:
    weight = BFLOAT16.clone()
    weight[0, 0] = 2.0**-17 * 1.9921875  # float16 alone would round its last bits away
    layer = pack_for_cpu(Linear(weight=weight))
    assert isinstance(layer, HalfLinear)
    x = torch.zeros(1, 40)
    x[0, 0] = 1.0
    assert apply_linear(x, layer)[0, 0] == weight[0, 0]


@pytest.mark.parametrize(
    "weight",
    [
        torch.randn(24, 40, generator=GENERATOR),
        BFLOAT16.clone().index_fill_(0, torch.tensor([3]), 2.0**-60),
        (BFLOAT16 * 2.0**100).index_fill_(0, torch.tensor([3]), 2.0**-100),
        BFLOAT16.clone().index_fill_(0, torch.tensor([3]), torch.inf),
        BFLOAT16.clone().index_fill_(0, torch.tensor([3]), torch.nan),
    ],
    ids=["24 significant bits", "a span beyond float16", "a span beyond float32", "an infinity", "a NaN"],
)
def test_weights_that_float16_cannot_hold_stay_in_float32(weight: torch.Tensor) -> None:
    assert not isinstance(pack_for_cpu(Linear(weight=weight)), HalfLinear)


def test_large_layers_and_bfloat16_engines_keep_their_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not isinstance(pack_for_cpu(Linear(weight=BFLOAT16.bfloat16())), HalfLinear)
    monkeypatch.setattr(torch_linear, "_MAX_HALF_WEIGHTS", BFLOAT16.numel() - 1)
    assert not isinstance(pack_for_cpu(Linear(weight=BFLOAT16)), HalfLinear)
