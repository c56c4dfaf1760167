"""Copies between a GPU's pages and places in host memory: all bytes, in order, of every page group and of snapshots."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_trt.backends.cuda.host_memory import PageLockedMemory
from dflash_trt.backends.host_memory import HostMemory
from dflash_trt.core.batch import ScheduledRequest, StepBatch, StepSampling, plan_of
from dflash_trt.core.step_plan import SNAPSHOTS, PageCopies
from tests.factories import make_target, make_zlab_drafter
from tests.kernels.test_step_on_kernels import NUM_DRAFT_TOKENS, make_executors
from tests.scheduler.driver import make_limits

NUM_PAGES, NUM_SLOTS, NUM_PLACES = 6, 5, 3
FIRST_SLOT = 2


def make_state(device: torch.device) -> tuple[list[tuple[int, Tensor]], list[Tensor]]:
    """Pages of two groups, of several types and sizes, and slots."""
    generator = torch.Generator().manual_seed(1)

    def made(num: int, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(1, 100, (num, *shape), generator=generator).to(device, dtype)

    pages = [
        (0, made(NUM_PAGES, 2, 4, 3, 8, dtype=torch.bfloat16)),
        (1, made(NUM_PAGES, 2, 4, 1, 8, dtype=torch.float32)),
        (0, made(NUM_PAGES, 4, 5, dtype=torch.float16)),
        (0, made(NUM_PAGES, 2, 4, 3, 8, dtype=torch.float8_e4m3fn)),
    ]
    return pages, [made(NUM_SLOTS, 2, 3, dtype=torch.float32), made(NUM_SLOTS, dtype=torch.int32)]


def random_copies(num_copies: int) -> PageCopies:
    """Of what is there: a place is read after it was written to."""
    dice = np.random.default_rng(2)
    rows, written = [], set[tuple[int, int]]()
    while len(rows) < num_copies:
        group, place = int(dice.integers(-1, 2)), int(dice.integers(NUM_PLACES))
        is_onboard = bool(dice.integers(2)) and (group, place) in written
        if not is_onboard:
            written.add((group, place))
        rows.append((is_onboard, group, int(dice.integers(FIRST_SLOT if group == SNAPSHOTS else NUM_PAGES)), place))
    is_onboard, groups, ids, host_ids = (np.array(column) for column in zip(*rows, strict=True))
    return PageCopies(is_onboard=is_onboard, groups=groups, ids=ids, host_ids=host_ids)


@pytest.mark.parametrize("is_windowed", [False, True])
@pytest.mark.parametrize("kind", [HostMemory, PageLockedMemory])
def test_any_copies_in_order_move_all_bytes_and_no_others(
    kind: type[HostMemory], is_windowed: bool, device: torch.device
) -> None:
    """Where all layers have a window, the first page group has none."""
    pages, slots = make_state(device)
    expected_pages, expected_slots = make_state(torch.device("cpu"))
    if is_windowed:
        pages, expected_pages = pages[1:2], expected_pages[1:2]
    places = {"num_host_pages": NUM_PLACES, "num_host_snapshots": NUM_PLACES}
    limits = make_limits(max_batch_size=FIRST_SLOT - 1, **places)
    if kind is PageLockedMemory:
        memory: HostMemory = PageLockedMemory(pages, limits, slots=slots, device=device)
    else:
        memory = HostMemory(pages, limits, slots=slots)
    copies, kept = random_copies(80), dict[tuple[int, int], list[Tensor]]()
    memory.copy(copies)
    for is_onboard, group, row, place in zip(
        *(column.tolist() for column in (copies.is_onboard, copies.groups, copies.ids, copies.host_ids)), strict=True
    ):
        row += FIRST_SLOT if group == SNAPSHOTS else 0
        tensors = expected_slots if group == SNAPSHOTS else [tensor for g, tensor in expected_pages if g == group]
        if is_onboard:
            for tensor, content in zip(tensors, kept[group, place], strict=True):
                tensor[row] = content
        else:
            kept[group, place] = [tensor[row].clone() for tensor in tensors]
    assert copies.is_onboard.any() and len(list(copies.runs())) < len(copies)
    for found, expected in zip(
        [*(tensor for _, tensor in pages), *slots], [*(t for _, t in expected_pages), *expected_slots], strict=True
    ):
        assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))


def test_a_step_makes_its_copies_before_it_writes(tmp_path: Path, device: torch.device) -> None:
    """What a page had is at its place, though the step writes to the page; and it is on another page, too."""
    few_heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    target = make_target(tmp_path / "target", **few_heads)
    drafter = make_zlab_drafter(
        tmp_path / "drafter", target_dir=target, num_layers=1, target_layer_ids=(0,), block_size=NUM_DRAFT_TOKENS + 1
    )
    for executor in make_executors((target, drafter), device, host_bytes=1 << 16):
        caches = [tensor for _, tensor in executor._state.paged]
        for index, tensor in enumerate(caches):
            tensor[5].fill_(index + 1.5)
        rows = np.array([(False, 0, 5, 2), (True, 0, 7, 2)])
        is_onboard, groups, ids, host_ids = rows.T
        copies = PageCopies(is_onboard=is_onboard.astype(bool), groups=groups, ids=ids, host_ids=host_ids)
        row = ScheduledRequest(
            request_id="r", token_ids=(1, 2, 3), context_len=0, num_candidates=0, page_ids=(5,), sampling=StepSampling()
        )
        plan = plan_of(StepBatch(requests=(row,), num_draft_tokens=NUM_DRAFT_TOKENS))
        executor.submit(replace(plan, page_copies=copies)).result()
        for index, tensor in enumerate(caches):
            assert (tensor[7] == index + 1.5).all() and not (tensor[5] == index + 1.5).all()
        executor.close()
