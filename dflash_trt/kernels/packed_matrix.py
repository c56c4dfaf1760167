"""A weight for the kernels of `packed_product.py`: the codes of its format, and prepared scales."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dflash_trt.kernels.launch_rules import FP8, FP8_BLOCK, INT4, INT8, MXFP4, NVFP4, PLAIN
from dflash_trt.kernels.launching import FLOATS, check, check_tensor

BLOCK_IN: Final = 128  # an FP8 block has one scale for as many columns
_CODES: Final[dict[int, tuple[torch.dtype, ...]]] = {
    PLAIN: FLOATS,
    FP8: (torch.float8_e4m3fn,),
    FP8_BLOCK: (torch.float8_e4m3fn,),
    INT8: (torch.int8,),
}
_BLOCK_SCALES: Final = {FP8_BLOCK: (torch.float32,), MXFP4: (torch.uint8,), NVFP4: (torch.float8_e4m3fn,), INT4: FLOATS}
_BLOCK_COLUMNS: Final = {MXFP4: 32, NVFP4: 16, INT4: 32}
FORMS: Final = (PLAIN, FP8, FP8_BLOCK, MXFP4, NVFP4, INT4, INT8)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedMatrix:
    """One matrix [out, in], or one for each expert [E, out, in]."""

    form: int  # index into FORMS
    codes: Tensor  # [..., out, in], or uint8 [..., out, in / 2]
    block_scale: Tensor | None = None
    block_rows: Tensor | None = None  # int32 [out]: rows of the `block_scale` of FP8 blocks
    row_scale: Tensor | None = None  # float32 [..., out], the scales of weights and inputs together
    input_scale: Tensor | None = None  # float32 [..., 1 or 2]: of all rows, or of gate and up rows
    bias: Tensor | None = None  # F [..., out]

    @property
    def out_size(self) -> int:
        return self.codes.shape[-2]

    @property
    def in_size(self) -> int:
        return self.codes.shape[-1] * (2 if self.form in _BLOCK_COLUMNS else 1)

    @property
    def splits_input(self) -> bool:
        """True if gate and up rows see activations that are quantized with scales of their own."""
        return self.input_scale is not None and self.input_scale.shape[-1] == 2

    @property
    def codes_argument(self) -> Tensor:
        """As a kernel reads it: GPUs before SM89 have no FP8, and need none to dequantize it."""
        return _bytes(self.codes) if self.input_scale is None else self.codes

    @property
    def block_scale_argument(self) -> Tensor:
        """Any tensor stands in for one that is not read."""
        if self.block_scale is None:
            return self.codes_argument
        return _bytes(self.block_scale) if self.input_scale is None else self.block_scale

    def check(self) -> None:
        """Raises ValueError for tensors that the kernels would misread."""
        *experts, out_size, _ = self.codes.shape
        check_tensor("codes", self.codes, dtype=_CODES.get(self.form, (torch.uint8,)), shape=self.codes.shape)
        if self.form in _BLOCK_SCALES:
            assert self.block_scale is not None
            blocks = [*experts, *self._block_shape()]
            check_tensor("block_scale", self.block_scale, dtype=_BLOCK_SCALES[self.form], shape=blocks)
        if self.form == FP8_BLOCK:
            assert self.block_rows is not None
            check_tensor("block_rows", self.block_rows, dtype=torch.int32, shape=[out_size])
        if self.row_scale is not None:
            check_tensor("row_scale", self.row_scale, dtype=torch.float32, shape=[*experts, out_size])
        if self.input_scale is not None:
            check_tensor("input_scale", self.input_scale, dtype=torch.float32, shape=[*experts, None])
        if self.bias is not None:
            check_tensor("bias", self.bias, dtype=FLOATS, shape=[*experts, out_size])
        grain = _BLOCK_COLUMNS.get(self.form, 1)
        hint = "Build with another format for this layer."
        is_whole = self.in_size % grain == 0
        check(is_whole, "input features", expected=f"a multiple of {grain}", found=self.in_size, hint=hint)

    @property
    def num_block_rows(self) -> int:
        return 0 if self.block_scale is None else self.block_scale.shape[-2]

    def _block_shape(self) -> tuple[int | None, int]:
        if self.form == FP8_BLOCK:
            return None, -(-self.in_size // BLOCK_IN)
        return self.out_size, self.in_size // _BLOCK_COLUMNS[self.form]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
