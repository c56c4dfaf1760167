"""A look at the pages while an engine is opened: does a step write where the executor will read?

A plugin gets its pages by address, so nothing that TensorRT says about an engine shows whether K/V arrive. Here the
pages are filled with a value, a few tokens run, twice at different pages, and every pool is compared: exactly the rows
of these tokens have changed, and both times to the same. Slots of recurrent states are looked at in the same way, each
part of them. What K/V and states should be is not known here; `self_test` compares tokens with another backend.
"""

from dataclasses import replace
from typing import Final, Protocol

import torch
from torch import Tensor

from dflash_trt.backends.sequence_batch import sequence_batch
from dflash_trt.backends.tensorrt.buffers import EngineState
from dflash_trt.core.batch import plan_of
from dflash_trt.core.errors import EngineDirError
from dflash_trt.core.step_plan import StepExecutor, StepPlan

CANARY: Final = 40.0  # exact in every type that pages have
_CHUNK_BYTES: Final = 64 << 20  # looked at at once: the pools fill the device
_TOLERANCE: Final = 0.02  # of the largest value: steps of equal rows may round differently


class PagedExecutor(StepExecutor, Protocol):
    """An executor whose pages and slots can be seen."""

    state: EngineState


def check_pages(executor: PagedExecutor) -> str:
    """Run the canary on an executor that serves nobody, and zero its state. What was compared, in words.

    Raises:
        EngineDirError: a pool whose rows are not written, are written elsewhere, or differ between two equal runs.
    """
    limits = executor.limits
    num_tokens = min(
        limits.page_size + 1, limits.max_num_tokens, limits.max_seq_len, limits.num_pages * limits.page_size
    )
    num_pages = -(-num_tokens // limits.page_size)
    pages = [range(first, first + num_pages) for first in (0, limits.num_pages - num_pages)]
    slots = (0, limits.max_batch_size - 1) if executor.state.slots else (0, 0)
    places = dict.fromkeys(zip(pages, slots, strict=True))
    contents = [_written(executor, place, slot, num_tokens) for place, slot in places]
    executor.state.fill(0.0)
    for name, first in contents[0].items():
        for again in contents[1:]:
            if not torch.allclose(first, again[name], rtol=0, atol=_TOLERANCE * float(first.abs().max())):
                raise _refusal(name, "the same from the same tokens at another place", "something else")
    return f"{num_tokens} tokens in each of {len(contents[0])} pools, at {len(contents)} places"


def _written(executor: PagedExecutor, place: range, slot: int, num_tokens: int) -> dict[str, Tensor]:  # float32
    """What prefill chunks of these tokens leave at these pages, [num_tokens, ...] by state, and in this slot.

    Recurrent states get the last token in a step of its own: its record is left, the rest are folded.
    """
    limits, state = executor.limits, executor.state
    state.fill(CANARY)
    first = num_tokens - 1 if state.slots and num_tokens > 1 else num_tokens
    for start, end in ((0, first), (first, num_tokens)):
        if start < end:
            chunk = sequence_batch(
                [1 + i % 2 for i in range(start, end)],
                page_size=limits.page_size,
                context_len=start,
                num_draft_tokens=limits.max_draft_len,
                first_page=place.start,
            )
            executor.submit(_in_slot(plan_of(chunk), slot)).result()
    rows = {name: _rows_of(name, pages[: limits.num_pages], place, num_tokens) for name, pages in state.pages.items()}
    return rows | {name: _part_of(name, tensor, slot) for name, tensor in state.slots.items()}


def _in_slot(plan: StepPlan, slot: int) -> StepPlan:
    """The only row of a plan, in another slot."""
    updates = replace(plan.page_updates, slots=plan.page_updates.slots + slot)
    return replace(plan, rows=replace(plan.rows, slot_ids=plan.rows.slot_ids + slot), page_updates=updates)


def _part_of(name: str, tensor: Tensor, slot: int) -> Tensor:
    """A part of a slot in which something has been written, as nowhere else but for the last slot, which is padding's.

    Of a state all, of other parts the first row.
    """
    canary = torch.full_like(tensor[:1].flatten()[:1], CANARY).view(torch.uint8)
    others = [index for index in range(len(tensor) - 1) if index != slot]
    num_written = sum(bool((tensor[index].reshape(-1, 1).view(torch.uint8) != canary).any()) for index in others)
    if num_written:
        raise _refusal(name, "no slot of others to be written", f"{num_written} of them")
    own = tensor[slot]
    looked_at = own if name.endswith(".state") or own.dim() == 0 else own[0]
    is_written = (looked_at.reshape(-1, 1).view(torch.uint8) != canary).any(1)
    if not bool(is_written.all()):
        found = f"{int(is_written.sum())} of them"
        raise _refusal(name, f"{is_written.numel()} values of slot {slot} to be written", found)
    return own.float()


def _rows_of(name: str, pages: Tensor, place: range, num_tokens: int) -> Tensor:
    if pages.dim() == 3:  # latents, which have no V
        pages = pages[:, None]
    is_written = _is_written(pages)
    own = is_written[place.start : place.stop].transpose(0, 1).flatten(1)  # [2, positions]; of latents [1, positions]
    others = int(is_written.sum()) - int(own.sum())
    if others:
        raise _refusal(name, "no page of others to be written", f"{others} rows written there")
    if not bool(own[:, :num_tokens].all()) or bool(own[:, num_tokens:].any()):
        found = f"{int(own[:, :num_tokens].sum())} of them and {int(own[:, num_tokens:].sum())} others"
        raise _refusal(
            name,
            f"{own.shape[0] * num_tokens} rows of {'K and V' if len(own) == 2 else 'latents'} to be written",
            found,
        )
    rows = pages[place.start : place.stop].transpose(0, 1).flatten(1, 2)[:, :num_tokens]
    return rows.float()


def _is_written(pages: Tensor) -> Tensor:  # bool [pages, 2 or 1, page_size]
    """Rows that are no longer full of canaries; by bytes, since PyTorch compares no float8."""
    canary = torch.full_like(pages[:1, :1, :1], CANARY).view(torch.uint8)
    chunks = torch.split(pages.view(torch.uint8), max(1, _CHUNK_BYTES // pages[0].nbytes))
    return torch.cat([(chunk != canary).flatten(3).any(3) for chunk in chunks])


def _refusal(name: str, expected: str, found: str) -> EngineDirError:
    hint = (
        "The engine does not write its state where it is read, so its tokens would be wrong. "
        "Rebuild the plugin library and the engine, or build with --plugins layers (slow), and report this message."
    )
    where = "slots" if name.partition(".")[0].endswith("_state") else "pages"
    return EngineDirError.about(f"{where} of {name}", expected=expected, found=found, hint=hint)
