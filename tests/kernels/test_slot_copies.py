"""Copies between slots: of every tensor, all bytes of one slot and no others."""

import pytest
import torch
from torch import Tensor

from dflash_trt.kernels import slot_copies_launch as launch
from dflash_trt.kernels.slot_copies_launch import SlotCopies
from plugins.aot.variant import KernelVariant
from tests.kernels.small_kernel_variants import slot_copy_variants
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


def test_a_slot_is_copied_whole_and_the_others_stay(device: torch.device) -> None:
    tensors = make_tensors(device)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    copies = SlotCopies(list(tensors.values()))
    copies.copy(3, 1)
    copies.copy(0, 0)
    for name, tensor in tensors.items():
        assert torch.equal(tensor[1], before[name][3]) and not torch.equal(tensor[1], before[name][1]), name
        assert torch.equal(tensor[[0, 2, 3]], before[name][[0, 2, 3]]), name


def test_tensors_at_multiples_of_16_bytes_are_copied_so(device: torch.device) -> None:
    groups = {group.word: len(group.blocks) for group in SlotCopies(list(make_tensors(device).values()))._groups}
    assert groups == {16: 3, 4: 1, 2: 1}


@pytest.mark.parametrize("tensor", [torch.zeros(4, 3, dtype=torch.uint8), torch.zeros(4, 4).t()])
def test_slots_that_the_kernel_would_misread_are_refused(tensor: Tensor, device: torch.device) -> None:
    with pytest.raises(ValueError, match="slots: expected contiguous ones of an even number of bytes"):
        SlotCopies([tensor.to(device)])


@pytest.mark.parametrize("variant", slot_copy_variants(), ids=lambda variant: variant.name)
def test_the_variants_are_what_is_launched(variant: KernelVariant, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorded(monkeypatch, launch, "copy_slot_kernel")
    word = variant.constexprs["WORD"]
    slots = torch.zeros(2, launch.BLOCK + (4 if word == 16 else 5), min(word, 4) // 2, dtype=torch.int16)
    SlotCopies([slots]).copy(1, 0)
    assert_is_launched_as(variant, recorder, {"num_blocks": 2})
