"""A look at the pages while an engine is opened: does a step write where the executor will read?

A plugin gets its pages by address, so nothing that TensorRT says about an engine shows whether K/V arrive. Here the
pages are filled with a value, a few tokens run, twice at different pages, and every pool is compared: exactly the rows
of these tokens have changed, and both times to the same. Slots of recurrent states are looked at in the same way, each
part of them. What K/V and states should be is not known here; `scripts/gpu_check` compares tokens with another backend.
"""

from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from dflash_trt.backends.sequence_batch import sequence_batch
from dflash_trt.backends.tensorrt.buffers import EngineState
from dflash_trt.core.batch import plan_of
from dflash_trt.core.errors import EngineDirError
from dflash_trt.core.step_plan import StepExecutor, StepPlan, num_pages_for

CANARY: Final = 40.0  # exact in every type that pages have
_CHUNK_BYTES: Final = 64 << 20  # looked at at once: the pools fill the device
_TOLERANCE: Final = 0.02  # relative to the largest value: steps of equal rows may round differently


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a sequence: its slot, and the first of its consecutive pages in every page group."""

    slot: int
    first_pages: tuple[int, ...]


class PagedExecutor(StepExecutor, Protocol):
    """An executor whose pages and slots can be seen."""

    state: EngineState


def check_pages(executor: PagedExecutor) -> str:
    """Run the canary on an idle executor, and zero its state. Returns a description of the comparison.

    Raises:
        EngineDirError: a pool whose rows are not written, are written elsewhere, or differ between two equal runs.
    """
    limits = executor.limits
    num_tokens = min(
        limits.page_size + 1, limits.max_num_tokens, limits.max_seq_len, limits.num_pages * limits.page_size
    )
    num_pages = num_pages_for(num_tokens, limits.page_size)
    pools = (limits.num_pages, *(group.num_pages for group in limits.page_windows))
    slots = (0, limits.max_batch_size - 1) if executor.state.slots else (0, 0)
    places = dict.fromkeys((
        Place(slots[0], (0,) * len(pools)),
        Place(slots[1], tuple(num_pool_pages - num_pages for num_pool_pages in pools)),
    ))  # fmt: skip
    contents = [_written(executor, place, num_tokens) for place in places]
    executor.state.fill(0.0)
    for name, first in contents[0].items():
        for again in contents[1:]:
            if not torch.allclose(first, again[name], rtol=0, atol=_TOLERANCE * float(first.abs().max())):
                raise _refusal(name, "the same from the same tokens at another place", "something else")
    return f"{num_tokens} tokens in each of {len(contents[0])} pools, at {len(contents)} places"


def _written(executor: PagedExecutor, place: Place, num_tokens: int) -> dict[str, Tensor]:  # float32
    """State that prefill chunks of these tokens write: rows, [num_tokens, ...] by state, and slot parts.

    Recurrent states get the last token in a step of its own: it stays a record, the rest are folded.
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
                page_windows=limits.page_windows,
            )
            executor.submit(_moved(plan_of(chunk, max_pages=limits.max_pages), place, limits.max_pages)).result()
    rows = {}
    for name, pages in state.pages.items():
        by_parts = pages if pages.dim() > 3 else pages[:, None]  # K and V; of latents and other rows there is one
        rows[name] = _rows_of(name, by_parts, place.first_pages[state.group_of(name)], num_tokens)
    padding = limits.max_batch_size
    return rows | {name: _part_of(name, tensor, place.slot, padding=padding) for name, tensor in state.slots.items()}


def _moved(plan: StepPlan, place: Place, max_pages: int) -> StepPlan:
    """The only row of a plan, in another place than slot 0 and the first pages."""
    updates = plan.page_updates
    first_pages = np.array(place.first_pages)[updates.columns // max_pages]
    updates = replace(updates, slots=updates.slots + place.slot, page_ids=updates.page_ids + first_pages)
    return replace(plan, rows=replace(plan.rows, slot_ids=plan.rows.slot_ids + place.slot), page_updates=updates)


def _part_of(name: str, tensor: Tensor, slot: int, *, padding: int) -> Tensor:
    """A part of a slot that was written, after checking that no other slot was, except that of `padding`.

    Returns a whole state, or the first row of other parts.
    """
    canary = torch.full_like(tensor[:1].flatten()[:1], CANARY).view(torch.uint8)
    others = [index for index in range(len(tensor)) if index not in (slot, padding)]
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


def _rows_of(name: str, pages: Tensor, first_page: int, num_tokens: int) -> Tensor:
    kind = "rows" if pages.shape[1] == 1 else "rows of K and V"
    is_written = _is_written(pages)
    place = slice(first_page, first_page + num_pages_for(num_tokens, pages.shape[2]))
    own = is_written[place].transpose(0, 1).flatten(1)  # [parts, positions]
    others = int(is_written.sum()) - int(own.sum())
    if others:
        raise _refusal(name, "no page of others to be written", f"{others} {kind} written there")
    if not bool(own[:, :num_tokens].all()) or bool(own[:, num_tokens:].any()):
        found = f"{int(own[:, :num_tokens].sum())} of them and {int(own[:, num_tokens:].sum())} others"
        raise _refusal(name, f"{len(own) * num_tokens} {kind} to be written", found)
    rows = pages[place].transpose(0, 1).flatten(1, 2)[:, :num_tokens]
    return rows.float()


def _is_written(pages: Tensor) -> Tensor:  # bool [pages, parts, page_size]
    """Rows that are no longer full of canaries; by bytes, since PyTorch compares no float8."""
    canary = torch.full_like(pages[:1, :1, :1], CANARY).view(torch.uint8)
    chunks = torch.split(pages.view(torch.uint8), max(1, _CHUNK_BYTES // pages[0].nbytes))
    return torch.cat([(chunk != canary).flatten(3).any(3) for chunk in chunks])


def _refusal(name: str, expected: str, found: str) -> EngineDirError:
    hint = (
        "The engine does not write its state where it is read, so its tokens would be wrong. "
        "Rebuild the plugin library and the engine, or build with --backend torch, and report this message."
    )
    where = "slots" if name.partition(".")[0].endswith("_state") else "pages"
    return EngineDirError.about(f"{where} of {name}", expected=expected, found=found, hint=hint)
