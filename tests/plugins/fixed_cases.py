"""Nodes of engines that are built with `deterministic`: the kernels that a library needs, their inputs, and rows alone.

`alone` are the inputs of a step that has some of the rows only: the law is that their results have the same bits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash_trt.backends.cuda.packed import packed_matrix
from dflash_trt.formats.int8 import Int8Weight
from dflash_trt.formats.registry import weight_format
from dflash_trt.kernels import attention_plan
from dflash_trt.network.ops import Linear
from plugins.aot.attention_variants import attention_variants
from plugins.aot.experts_variants import MatrixKernels
from plugins.aot.gated_delta_variants import DeltaKernels
from plugins.aot.latent_variants import LatentKernels
from plugins.aot.linear_variants import Int8LinearKernels, LinearKernels, norm_variants
from plugins.aot.variant import KernelVariant
from tests.plugins.delta_cases import state_spec
from tests.plugins.latent_cases import CASES as LATENT_CASES
from tests.plugins.node_inputs import NodeInputs, StepCase

Inputs = dict[str, Tensor]
Fields = dict[str, float]
IN, OUT, NUM_ROWS = 64, 48, 70
SPLIT_LENGTH, LATENT_SPLIT_LENGTH = 128, 16  # one key block each
STEP = StepCase(num_tokens=(3, 2, 70), context_lens=(150, 300, 5), width=3)
FORMATS = (None, "fp8", "nvfp4_w4a16", "int4")
LATENTS = "a long context beside a prompt"


@dataclass(frozen=True, kw_only=True)
class FixedCase:
    """A node, how its inputs are made, and the rows of one request or one row."""

    node: str
    make: Callable[[], tuple[Inputs, Fields, object]]  # the last owns memory of pages
    rows: slice
    alone: Callable[[Inputs], Inputs]


def variants(max_requests: int) -> Iterator[KernelVariant]:
    for name in FORMATS:
        yield from _linear_kernels(name).variants("float32")
    yield from Int8LinearKernels(out_size=OUT, in_size=IN, has_bias=True).variants("float32")
    yield from norm_variants(torch.float32, max_columns=IN)
    geometry = {"dtype": torch.float32, "page_dtype": torch.float32, "head_dim": 16, "has_block": False}
    tile = attention_plan.fixed_tile(STEP.heads // STEP.kv_heads, (16, 64))
    yield from attention_variants(**geometry, max_requests=max_requests, tiles=(tile,), is_split_fixed=True)
    yield from DeltaKernels.of(state_spec(), max_requests=max_requests, is_in_order=True).variants("float32")
    yield from latent_kernels().variants("float32")


def latent_kernels() -> LatentKernels:
    return replace(LATENT_CASES[LATENTS].kernels("float32"), is_split_fixed=True)


def cases() -> dict[str, FixedCase]:
    of_row = {"rows": slice(37, 38), "alone": lambda x: x | {"x": x["x"][37:38].clone()}}
    linears = {
        f"Linear, {name or 'unquantized'}": FixedCase(node="Linear", make=lambda name=name: _linear(name), **of_row)
        for name in FORMATS
    }
    return linears | {
        "Int8Linear": FixedCase(node="Int8Linear", make=_int8_linear, **of_row),
        "RmsNorm": FixedCase(node="RmsNorm", make=_norm, **of_row),
        "HeadProduct": FixedCase(node="HeadProduct", make=_head_product, **of_row),
        "AttendInSplits": FixedCase(node="AttendInSplits", make=_attention, rows=slice(0, 3), alone=_first_request),
        "AttendLatentsInSplits": FixedCase(
            node="AttendLatentsInSplits", make=_latents, rows=slice(0, 2), alone=_first_request
        ),
    }


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _weight(name: str | None) -> Linear[Tensor]:
    weight, bias = _random(OUT, IN), _random(OUT, seed=1)
    if name is None:
        return Linear(weight=weight, bias=bias)
    known = weight_format(name)
    amax = torch.tensor([4.0]) if known.has_input_scale else None
    largest = weight.abs().amax().reshape(1)
    return Linear(weight=known.quantize(weight, segments=(OUT,), weight_amax=largest, input_amax=amax), bias=bias)


def _linear_kernels(name: str | None) -> LinearKernels:
    matrix = packed_matrix(_weight(name))
    weight = MatrixKernels(
        form=matrix.form,
        has_row_scale=matrix.row_scale is not None,
        num_input_scales=int(matrix.input_scale is not None),
        has_bias=True,
    )
    return LinearKernels(out_size=OUT, in_size=IN, weight=weight)


def _linear(name: str | None) -> tuple[Inputs, Fields, object]:
    matrix = packed_matrix(_weight(name))

    def or_one(tensor: Tensor | None, dtype: torch.dtype, rank: int) -> Tensor:
        return torch.zeros((1,) * rank, dtype=dtype) if tensor is None else tensor

    inputs = {
        "x": _random(NUM_ROWS, IN, seed=2),
        "codes": matrix.codes.view(torch.int8),
        "block_scale": or_one(matrix.block_scale, torch.int8, 2).view(torch.int8),
        "block_rows": or_one(matrix.block_rows, torch.int32, 1),
        "row_scale": or_one(matrix.row_scale, torch.float32, 1),
        "input_scale": or_one(matrix.input_scale, torch.float32, 1),
        "bias": matrix.bias,
    }
    flags = {f"has_{name}": int(getattr(matrix, name) is not None) for name in ("row_scale", "input_scale", "bias")}
    return inputs, {"form": matrix.form, **flags}, matrix


def _int8_linear() -> tuple[Inputs, Fields, object]:
    linear = _weight("int8")
    assert isinstance(linear.weight, Int8Weight)
    inputs = {"x": _random(NUM_ROWS, IN, seed=2), "codes": linear.weight.codes}
    inputs |= {"weight_scale": linear.weight.weight_scale, "bias": linear.bias}
    return inputs, {"has_bias": 1}, None


def _norm() -> tuple[Inputs, Fields, object]:
    return {"x": _random(NUM_ROWS, IN), "weight": _random(IN, seed=1)}, {"eps": 1e-6}, None


def _head_product() -> tuple[Inputs, Fields, object]:
    kernels = latent_kernels()
    heads = 3
    x = _random(NUM_ROWS, heads, kernels.nope_dim)
    return {"x": x, "factor": _random(heads, kernels.nope_dim, kernels.latent_dim, seed=1)}, {}, None


def _attention() -> tuple[Inputs, Fields, object]:
    made = NodeInputs(STEP, torch.device("cpu"))
    inputs, fields = made.attend_pages()
    return inputs, fields | {"split_length": SPLIT_LENGTH}, made


def _latents() -> tuple[Inputs, Fields, object]:
    inputs, fields, pages = LATENT_CASES[LATENTS].node()
    return inputs, fields | {"split_length": LATENT_SPLIT_LENGTH}, pages


def _first_request(x: Inputs) -> Inputs:
    stop = int(x["token_offsets"][1])
    by_row = {name: x[name][:stop].clone() for name in ("q", "k", "v", "own", "positions") if name in x}
    by_row |= {"q_nope": x["q_nope"][:, :stop].clone()} if "q_nope" in x else {}
    by_request = {name: x[name][:1].clone() for name in ("context_lens", "page_table")}
    return x | by_row | by_request | {"token_offsets": x["token_offsets"][:2].clone()}
