"""How the kernels of `int8_linear.py` are launched. Allocates their outputs."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dflash_trt.kernels import launch_rules
from dflash_trt.kernels.int8_linear import entry_codes_kernel, int8_linear_kernel, token_codes_kernel
from dflash_trt.kernels.launching import FLOATS, check_tensor

BLOCK: Final = 1024  # columns that a program of codes holds at once
TILES: Final = {  # output features of a tile by its tokens: for few rows and for many
    launch_rules.MIN_INT8_TOKENS: 64,
    launch_rules.MID_INT8_TOKENS: 64,
    launch_rules.FULL_INT8_TOKENS: 64,
    launch_rules.MAX_INT8_TOKENS: 128,
}
BLOCK_IN: Final = 128
NUM_STAGES: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Matrix:
    codes: Tensor  # int8 [out, in]
    weight_scale: Tensor  # float32 [out]
    bias: Tensor | None = None  # F [out]

    def check(self) -> None:
        """Raises ValueError for tensors that the kernel would misread."""
        num_rows = self.codes.shape[0]
        check_tensor("codes", self.codes, dtype=torch.int8, shape=[None, None])
        check_tensor("weight_scale", self.weight_scale, dtype=torch.float32, shape=[num_rows])
        if self.bias is not None:
            check_tensor("bias", self.bias, dtype=FLOATS, shape=[num_rows])


def int8_linear(x: Tensor, matrix: Int8Matrix) -> Tensor:  # F [N, in] -> F [N, out]
    """x @ weight.T + bias, with x rounded to codes of its rows; a row's bits depend on the row alone."""
    num_out, num_in = matrix.codes.shape
    check_tensor("x", x, dtype=x.dtype, shape=[None, num_in])
    codes, scales = token_codes(x)
    out = torch.empty((len(x), num_out), dtype=x.dtype, device=x.device)
    tokens, features = tile_of(len(x))
    int8_linear_kernel[(-(-len(x) // tokens), -(-num_out // features))](
        codes,
        scales,
        matrix.codes,
        matrix.weight_scale,
        scales if matrix.bias is None else matrix.bias,
        out,
        len(x),
        **int8_linear_constants(matrix, tile=(tokens, features)),
        num_warps=num_warps(features),
        num_stages=NUM_STAGES,
        enable_fp_fusion=False,
    )
    return out


def token_codes(x: Tensor) -> tuple[Tensor, Tensor]:  # F [N, in] -> int8 [N, in], float32 [N]
    """As `formats.int8.token_codes`."""
    num_rows, num_columns = x.shape
    codes = torch.empty((num_rows, num_columns), dtype=torch.int8, device=x.device)
    scales = torch.empty(num_rows, device=x.device)
    token_codes_kernel[(num_rows,)](
        x, codes, scales, num_columns, BLOCK=BLOCK, num_warps=4, num_stages=1, enable_fp_fusion=False
    )
    return codes, scales


def entry_codes(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of x[n] * weights[n, choice]: F [N, in], float32 [N, num_chosen] -> int8 [N * num_chosen, in], float32."""
    num_columns = x.shape[1]
    codes = torch.empty((weights.numel(), num_columns), dtype=torch.int8, device=x.device)
    scales = torch.empty(weights.numel(), device=x.device)
    entry_codes_kernel[(weights.numel(),)](
        x,
        weights,
        codes,
        scales,
        num_columns,
        num_chosen=weights.shape[1],
        BLOCK=BLOCK,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=False,
    )
    return codes, scales


def tile_of(num_rows: int) -> tuple[int, int]:
    """Tokens and output features."""
    tokens = launch_rules.int8_tile_tokens(num_rows=num_rows)
    return tokens, TILES[tokens]


def num_warps(features: int) -> int:
    """A warpgroup multiplies 64 features at once."""
    return features // 16


def int8_linear_constants(matrix: Int8Matrix, *, tile: tuple[int, int]) -> dict[str, int]:
    num_out, num_in = matrix.codes.shape
    return {
        "IN": num_in,
        "OUT_SIZE": num_out,
        "HAS_BIAS": matrix.bias is not None,
        "TOKENS": tile[0],
        "OUT": tile[1],
        "BLOCK_IN": BLOCK_IN,
    }
