"""Tiles of block scales as PyTorch's own tests make them, and its `scaled_mm` of them where no GPU runs it."""

import ast
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from dflash_trt.formats.nvfp4 import e2m1_values

SCALED_MM = F.scaled_mm


def to_blocked(matrix: Tensor) -> Tensor:
    """PyTorch's reference, read from its test helpers: to import them takes a package that only its tests need."""
    path = Path(torch.__file__).parent / "testing" / "_internal" / "common_quantized.py"
    names = ("ceil_div", "to_blocked")
    tree = ast.parse(path.read_text())
    body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert len(body) == len(names)
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(body=body, type_ignores=[]), str(path), "exec"), scope)
    blocked: Tensor = scope["to_blocked"](matrix)
    return blocked


def row_by_row(tiled: Tensor, num_rows: int) -> Tensor:
    """The inverse of `to_blocked` for so many rows and whole tiles."""
    padded_rows = -(-num_rows // 128) * 128
    num_blocks = tiled.numel() // padded_rows
    places = to_blocked(torch.arange(padded_rows * num_blocks).view(padded_rows, num_blocks))
    rows = torch.empty_like(tiled)
    rows[places.to(tiled.device)] = tiled
    return rows.view(padded_rows, num_blocks)[:num_rows]


def scaled_mm_on_a_cpu(mat_a: Tensor, mat_b: Tensor, **options: Any) -> Tensor:
    """PyTorch's checks of the arguments, and its definition of the product: a CPU takes no block scales."""
    out = torch.empty(checked(mat_a, mat_b, **options).shape, dtype=options["output_dtype"])
    (a_blocks, a_scale), (b_blocks, b_scale) = options["scale_a"], options["scale_b"]
    a, b = values(mat_a, a_blocks), values(mat_b.t(), b_blocks)
    product = (a @ b.T) * (a_scale.double() * b_scale.double())
    if options["bias"] is not None:
        product += options["bias"].double()
    return out.copy_(product)


def checked(*matrices: Tensor, **options: Any) -> Tensor:
    """A tensor of no content, made by PyTorch where it accepts the call."""

    def on_meta(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return [on_meta(item) for item in value] if isinstance(value, list) else value

    return SCALED_MM(*map(on_meta, matrices), **{name: on_meta(value) for name, value in options.items()})


def values(codes: Tensor, block_scale: Tensor) -> Tensor:  # float64 [rows, in]
    numbers = e2m1_values(codes.view(torch.uint8)).double()
    scales = row_by_row(block_scale.view(torch.uint8), len(codes)).view(torch.float8_e4m3fn).double()
    return (numbers.view(*scales.shape, 16) * scales[..., None]).flatten(1)
