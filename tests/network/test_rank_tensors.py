"""Weights of a rank by name: slices of a linear are the rows that they stand for, in every form."""

import pytest
import torch
from torch import Tensor

from dflash_trt.formats.base import QuantizedWeight
from dflash_trt.formats.registry import dequantize
from dflash_trt.network.ops import Linear
from dflash_trt.network.rank_tensors import RankTensors
from tests.quantize.test_pack import SEGMENTS, quantized, random_weight


def rows_by_name(tensor: Tensor, start: int, stop: int) -> Tensor:
    return tensor[start:stop]


def matrix_of(linear: Linear[Tensor]) -> Tensor:
    return dequantize(linear.weight) if isinstance(linear.weight, QuantizedWeight) else linear.weight


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("weight_format", [None, "fp8", "nvfp4", "nvfp4_w4a16"])
def test_a_slice_of_a_linear_is_its_rows_and_knows_where_they_were(weight_format: str | None, has_bias: bool) -> None:
    weight = random_weight()
    plain = {"kv_bias": torch.arange(96.0)} if has_bias else {}
    stored = {} if weight_format is None else {"kv": quantized(weight, weight_format)}
    tensors = RankTensors(plain=plain | ({} if stored else {"kv": weight}), slice_rows=rows_by_name, quantized=stored)
    whole = tensors.linear("kv")
    edges = [0, *torch.tensor(SEGMENTS).cumsum(0).tolist()]
    for start, stop in ((a, b) for a in edges for b in edges if a < b):
        part = tensors.rows_of(whole, start, stop)
        assert torch.equal(matrix_of(part), matrix_of(whole)[start:stop])
        assert (part.name, part.first_row) == ("kv", start)
        assert part.bias is None if whole.bias is None else torch.equal(part.bias, whole.bias[start:stop])
