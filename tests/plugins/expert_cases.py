"""Inputs of `Experts` nodes for every form of weights, and the kernels that a library needs for them."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from dflash_trt.formats.int4 import Int4, Int4Weight
from dflash_trt.formats.mxfp4 import Mxfp4, Mxfp4Weight
from dflash_trt.formats.nvfp4 import Nvfp4Weight, Nvfp4WeightOnly
from dflash_trt.kernels.experts_launch import ACTIVATIONS
from dflash_trt.kernels.launch_rules import FP8, FP8_BLOCK, INT4, MXFP4, NVFP4, PLAIN
from dflash_trt.kernels.packed_matrix import PackedMatrix
from dflash_trt.kernels.programs import EXPERTS
from dflash_trt.kernels.routing_launch import KINDS
from plugins.aot.experts_variants import ExpertsKernels, MatrixKernels
from tests.kernels.packed_weights import FORMS, make_weight


@dataclass(frozen=True, kw_only=True)
class ExpertsCase:
    """`num_here` experts of `num_experts` from `first_expert` on are those of the rank."""

    form: str
    num_rows: int = 5
    num_experts: int = 8
    num_chosen: int = 3
    hidden_size: int = 64
    ffn_size: int = 96
    first_expert: int = 0
    num_here: int = 8
    routing: Literal["softmax_top_k", "top_k_softmax", "sigmoid_top_k"] = "softmax_top_k"
    normalizes: bool = True
    has_choice_bias: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    routing_scale: float = 1.0
    activation: Literal["silu", "clamped_swiglu", "gelu_tanh"] = "silu"
    scales_inputs: bool = False
    has_factors: bool = False  # of experts, in the rows of down
    input_scales: tuple[float, ...] = ()
    has_bias: bool = False
    has_fixed_tiles: bool = False

    def kernels(self) -> ExpertsKernels:
        def matrix(*, is_down: bool) -> MatrixKernels:
            num_scales = len(set(self.input_scales))
            return MatrixKernels(
                form=FORMS[self.form],
                has_row_scale=self.form in ("fp8", "nvfp4", "int8") or (is_down and self.has_factors),
                num_input_scales=min(1, num_scales) if is_down else num_scales,
                has_bias=self.has_bias,
            )

        return ExpertsKernels(
            num_experts=self.num_experts,
            num_here=self.num_here,
            num_chosen=self.num_chosen,
            hidden_size=self.hidden_size,
            ffn_size=self.ffn_size,
            routing=self.routing,
            normalizes=self.normalizes,
            has_choice_bias=self.has_choice_bias,
            num_groups=self.num_groups,
            num_chosen_groups=self.num_chosen_groups,
            activation=self.activation,
            scales_inputs=self.scales_inputs,
            gate_up=matrix(is_down=False),
            down=matrix(is_down=True),
            max_rows=self.num_rows,
        )

    def node(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Named inputs and fields, new tensors each time."""
        random = torch.Generator().manual_seed(5)
        inputs = {
            "x": torch.randn(self.num_rows, self.hidden_size, generator=random),
            "logits": torch.randn(self.num_rows, self.num_experts, generator=random) * 2,
        }
        size = self.num_experts if self.has_choice_bias else 1
        inputs["choice_bias"] = torch.randn(size, generator=random)
        fields: dict[str, float] = {
            "first_expert": self.first_expert,
            "num_chosen": self.num_chosen,
            "routing": KINDS[self.routing],
            "normalizes": int(self.normalizes),
            "has_choice_bias": int(self.has_choice_bias),
            "num_groups": self.num_groups,
            "num_chosen_groups": self.num_chosen_groups,
            "activation": ACTIVATIONS[self.activation],
            "scales_inputs": int(self.scales_inputs),
            "has_fixed_tiles": int(self.has_fixed_tiles),
            "routing_scale": self.routing_scale,
            "limit": 0.7,
            "alpha": 1.702,
        }
        ffn, hidden = self.ffn_size, self.hidden_size
        sizes = {"gate_up": (2 * ffn, hidden, (ffn, ffn)), "down": (hidden, ffn, (hidden,))}
        for seed, (prefix, (out_size, in_size, segments)) in enumerate(sizes.items()):
            matrix = make_weight(
                self.form,
                (self.num_here, out_size, in_size),
                segments=segments,
                input_scales=self.input_scales[: len(segments)],
                has_bias=self.has_bias,
                seed=seed,
            ).packed
            if prefix == "down" and self.has_factors:
                factors = torch.rand(self.num_here, 1, generator=random) + 0.5
                matrix = replace(matrix, row_scale=factors.expand(self.num_here, out_size).contiguous())
            inputs |= {f"{prefix}_{name}": tensor for name, tensor in _inputs(matrix).items()}
            fields |= {
                f"{prefix}_form": matrix.form,
                f"{prefix}_has_row_scale": int(matrix.row_scale is not None),
                f"{prefix}_has_input_scale": int(matrix.input_scale is not None),
                f"{prefix}_has_bias": int(matrix.bias is not None),
            }
        return {name: inputs[name] for name in EXPERTS.input_names}, fields


CASES = {
    "MXFP4 of gpt-oss": ExpertsCase(
        form="mxfp4", routing="top_k_softmax", normalizes=False, activation="clamped_swiglu", has_bias=True
    ),
    "NVFP4, weight only": ExpertsCase(form="nvfp4"),
    "INT4": ExpertsCase(form="int4"),
    "INT8": ExpertsCase(form="int8", activation="clamped_swiglu", has_bias=True),
    "INT8, tiles of 64, half of the experts": ExpertsCase(form="int8", num_rows=120, num_here=4, first_expert=4),
    "scaled inputs in INT8": ExpertsCase(
        form="int8", routing="sigmoid_top_k", normalizes=False, scales_inputs=True, num_chosen=2
    ),
    "FP8 blocks": ExpertsCase(form="fp8_block"),
    "FP8 activations": ExpertsCase(form="fp8", input_scales=(0.02, 0.02)),
    "FP8, scales of gate and up": ExpertsCase(form="fp8", input_scales=(0.02, 0.01)),
    "unquantized, weights as they are": ExpertsCase(form="plain", normalizes=False),
    "sigmoids and a bias of the choice": ExpertsCase(
        form="plain", routing="sigmoid_top_k", has_choice_bias=True, routing_scale=2.5
    ),
    "groups of experts": ExpertsCase(
        form="plain", routing="sigmoid_top_k", has_choice_bias=True, num_groups=4, num_chosen_groups=2
    ),
    "GELU, factors of experts": ExpertsCase(form="plain", activation="gelu_tanh", has_factors=True),
    "scaled inputs": ExpertsCase(
        form="plain", routing="sigmoid_top_k", normalizes=False, scales_inputs=True, has_bias=True
    ),
    "scaled inputs in FP8": ExpertsCase(
        form="fp8",
        routing="sigmoid_top_k",
        normalizes=False,
        scales_inputs=True,
        num_chosen=1,
        input_scales=(0.02, 0.02),
    ),
    "half of the experts": ExpertsCase(form="plain", num_here=4, first_expert=4),
    "tiles of 32": ExpertsCase(form="plain", num_rows=60),
    "tiles of 64": ExpertsCase(form="plain", num_rows=120),
    "fixed tiles": ExpertsCase(form="plain", num_rows=120, has_fixed_tiles=True),
}


def decoded(x: dict[str, Tensor], settings: dict[str, float], prefix: str) -> Tensor:  # float32 [E, out, in]
    """Numbers of a node's weight, with its own scales and not those of its inputs."""
    codes, scale, form = x[f"{prefix}_codes"], x[f"{prefix}_block_scale"], settings[f"{prefix}_form"]
    values = _decoded(int(form), codes, scale, x[f"{prefix}_block_rows"], x["x"].dtype)
    if settings[f"{prefix}_has_row_scale"]:
        values = values * x[f"{prefix}_row_scale"][..., None]
    if settings[f"{prefix}_has_input_scale"]:
        values = values / input_scale_of_rows(x, prefix, values.shape[1])[..., None]
    return values


def input_scale_of_rows(x: dict[str, Tensor], prefix: str, num_rows: int) -> Tensor:  # float32 [E, out]
    scale = x[f"{prefix}_input_scale"]
    return scale.repeat_interleave(num_rows // scale.shape[1], dim=1)


def _decoded(form: int, codes: Tensor, scale: Tensor, block_rows: Tensor, dtype: torch.dtype) -> Tensor:
    stored = codes.view(torch.uint8)
    if form == PLAIN:
        return codes.view(dtype).float()
    if form == FP8:
        return codes.view(torch.float8_e4m3fn).float()
    if form == FP8_BLOCK:
        of_rows = scale.view(torch.float32)[:, block_rows.long()]
        return codes.view(torch.float8_e4m3fn).float() * of_rows[..., torch.arange(codes.shape[-1]) // 128]
    if form == MXFP4:
        return Mxfp4().unscaled(Mxfp4Weight(segments=(), codes=stored, block_scale=scale.view(torch.uint8)), _WIDE)
    if form == NVFP4:
        blocks = scale.view(torch.float8_e4m3fn)
        none: Any = None
        weight = Nvfp4Weight(segments=(), codes=stored, block_scale=blocks, weight_scale=none)
        return Nvfp4WeightOnly().unscaled(weight, _WIDE)
    assert form == INT4
    return Int4().unscaled(Int4Weight(segments=(), codes=stored, block_scale=scale.view(torch.bfloat16)), _WIDE)


_WIDE = torch.float32


def _inputs(matrix: PackedMatrix) -> dict[str, Tensor]:
    def or_one(tensor: Tensor | None, dtype: torch.dtype, rank: int) -> Tensor:
        return torch.zeros((1,) * rank, dtype=dtype) if tensor is None else tensor

    return {
        "codes": _bytes(matrix.codes),
        "block_scale": _bytes(or_one(matrix.block_scale, torch.int8, 3)),
        "block_rows": or_one(matrix.block_rows, torch.int32, 1),
        "row_scale": or_one(matrix.row_scale, torch.float32, 2),
        "input_scale": or_one(matrix.input_scale, torch.float32, 2),
        "bias": or_one(matrix.bias, torch.float32, 2),
    }


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int8)
