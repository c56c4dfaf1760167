"""Copies between rows: of every pair of tensors, all bytes of one row and no others."""

import pytest
import torch
from torch import Tensor

from dflash_trt.kernels import row_copies_launch as launch
from dflash_trt.kernels.row_copies_launch import RowCopies
from plugins.aot.variant import KernelVariant
from tests.kernels.small_kernel_variants import row_copy_variants
from tests.kernels.test_sampling_variants import assert_is_launched_as, recorded

SHAPES = {
    "whole blocks": ((4, 2 * launch.BLOCK), torch.float32),
    "a part of a block, of halves": ((4, launch.BLOCK + 8), torch.bfloat16),
    "numbers": ((4,), torch.int32),
    "an odd number of halves": ((4, 3, 7), torch.float16),
}


def make_tensors(device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randint(1, 100, shape, generator=generator).to(device, dtype)
        for name, (shape, dtype) in SHAPES.items()
    }


def of_one(tensors: list[Tensor]) -> RowCopies:
    """Between rows of the same tensors."""
    return RowCopies(tensors, tensors, device=tensors[0].device)


def test_a_row_is_copied_whole_and_the_others_stay(device: torch.device) -> None:
    tensors = make_tensors(device)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    copies = of_one(list(tensors.values()))
    copies.copy(3, 1)
    copies.copy(0, 0)
    for name, tensor in tensors.items():
        assert torch.equal(tensor[1], before[name][3]) and not torch.equal(tensor[1], before[name][1]), name
        assert torch.equal(tensor[[0, 2, 3]], before[name][[0, 2, 3]]), name


def test_rows_of_others_take_the_bytes_where_they_lie(device: torch.device) -> None:
    """As to places in host memory and back: parts of longer rows, with other distances."""
    tensors = make_tensors(device)
    sizes = [tensor[0].nbytes for tensor in tensors.values()]
    starts = [sum(-(-size // 16) * 16 for size in sizes[:index]) for index in range(len(sizes))]
    rows = torch.zeros((3, starts[-1] + 48), dtype=torch.uint8, device=device)
    places = [rows[:, start : start + size] for start, size in zip(starts, sizes, strict=True)]
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    RowCopies(list(tensors.values()), places, device=device).copy(3, 1)
    assert not rows[[0, 2]].any() and not rows[1, starts[-1] + sizes[-1] :].any()
    RowCopies(places, list(tensors.values()), device=device).copy(1, 0)
    for name, tensor in tensors.items():
        assert torch.equal(tensor[0], before[name][3]) and torch.equal(tensor[1:], before[name][1:]), name


def test_tensors_at_multiples_of_16_bytes_are_copied_so(device: torch.device) -> None:
    groups = {group.word: len(group.blocks) for group in of_one(list(make_tensors(device).values()))._groups}
    assert groups == {16: 3, 4: 1, 2: 1}


@pytest.mark.parametrize("tensor", [torch.zeros(4, 3, dtype=torch.uint8), torch.zeros(4, 4).t()])
def test_rows_that_the_kernel_would_misread_are_refused(tensor: Tensor, device: torch.device) -> None:
    with pytest.raises(ValueError, match="rows: expected contiguous ones of an even number of bytes"):
        of_one([tensor.to(device)])


@pytest.mark.parametrize("variant", row_copy_variants(), ids=lambda variant: variant.name)
def test_the_variants_are_what_is_launched(variant: KernelVariant, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorded(monkeypatch, launch, "copy_row_kernel")
    word = variant.constexprs["WORD"]
    slots = torch.zeros(2, launch.BLOCK + (4 if word == 16 else 5), min(word, 4) // 2, dtype=torch.int16)
    of_one([slots]).copy(1, 0)
    assert_is_launched_as(variant, recorder, {"num_blocks": 2})
