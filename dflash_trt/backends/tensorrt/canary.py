"""A look at the pages while an engine is opened: does a step write where the executor will read?

A plugin gets its pages by address, so nothing that TensorRT says about an engine shows whether K/V arrive. Here the
pages are filled with a value, a few tokens run, twice at different pages, and every pool is compared: exactly the rows
of these tokens have changed, and both times to the same. What K/V should be is not known here; `self_test` compares
tokens with another backend.
"""

from typing import Final, Protocol

import torch
from torch import Tensor

from dflash_trt.backends.sequence_batch import sequence_batch
from dflash_trt.backends.tensorrt.buffers import EngineState
from dflash_trt.core.batch import run_batch
from dflash_trt.core.errors import EngineDirError
from dflash_trt.core.step_plan import StepExecutor

CANARY: Final = 40.0  # exact in every type that pages have
_CHUNK_BYTES: Final = 64 << 20  # looked at at once: the pools fill the device
_TOLERANCE: Final = 0.02  # of the largest value: steps of equal rows may round differently


class PagedExecutor(StepExecutor, Protocol):
    """An executor whose pages can be seen."""

    state: EngineState


def check_pages(executor: PagedExecutor) -> str:
    """Run the canary on an executor that serves nobody, and zero its pages. What was compared, in words.

    Raises:
        EngineDirError: a pool whose rows are not written, are written elsewhere, or differ between two equal runs.
    """
    limits = executor.limits
    num_tokens = min(
        limits.page_size + 1, limits.max_num_tokens, limits.max_seq_len, limits.num_pages * limits.page_size
    )
    num_pages = -(-num_tokens // limits.page_size)
    places = [range(first, first + num_pages) for first in (0, limits.num_pages - num_pages)]
    contents = [_written(executor, place, num_tokens) for place in dict.fromkeys(places)]
    executor.state.fill(0.0)
    for name, first in contents[0].items():
        for again in contents[1:]:
            if not torch.allclose(first, again[name], rtol=0, atol=_TOLERANCE * float(first.abs().max())):
                raise _refusal(name, "the same K/V from the same tokens at other pages", "different ones")
    return f"{num_tokens} tokens in each of {len(contents[0])} pools, at {len(contents)} places"


def _written(executor: PagedExecutor, place: range, num_tokens: int) -> dict[str, Tensor]:  # float32 [num_tokens, ...]
    """Rows of K and V that a prefill chunk of these tokens leaves at these pages, by state."""
    limits, tokens = executor.limits, [1 + i % 2 for i in range(num_tokens)]
    executor.state.fill(CANARY)
    chunk = sequence_batch(
        tokens, page_size=limits.page_size, num_draft_tokens=limits.max_draft_len, first_page=place.start
    )
    run_batch(executor, chunk)
    return {
        name: _rows_of(name, pages[: limits.num_pages], place, num_tokens)
        for name, pages in executor.state.pages.items()
    }


def _rows_of(name: str, pages: Tensor, place: range, num_tokens: int) -> Tensor:
    is_written = _is_written(pages)
    own = is_written[place.start : place.stop].transpose(0, 1).flatten(1)  # [2, positions]
    others = int(is_written.sum()) - int(own.sum())
    if others:
        raise _refusal(name, "no page of others to be written", f"{others} rows of K or V written there")
    if not bool(own[:, :num_tokens].all()) or bool(own[:, num_tokens:].any()):
        found = f"{int(own[:, :num_tokens].sum())} of them and {int(own[:, num_tokens:].sum())} others"
        raise _refusal(name, f"{2 * num_tokens} rows of K and V to be written", found)
    rows = pages[place.start : place.stop].transpose(0, 1).flatten(1, 2)[:, :num_tokens]
    return rows.float()


def _is_written(pages: Tensor) -> Tensor:  # bool [pages, 2, page_size]
    """Rows that are no longer full of canaries; by bytes, since PyTorch compares no float8."""
    canary = torch.full_like(pages[:1, :1, :1], CANARY).view(torch.uint8)
    chunks = torch.split(pages.view(torch.uint8), max(1, _CHUNK_BYTES // pages[0].nbytes))
    return torch.cat([(chunk != canary).flatten(3).any(3) for chunk in chunks])


def _refusal(name: str, expected: str, found: str) -> EngineDirError:
    hint = (
        "The engine does not write its K/V where they are read, so its tokens would be wrong. "
        "Rebuild the plugin library and the engine, or build with --plugins layers (slow), and report this message."
    )
    return EngineDirError.about(f"pages of {name}", expected=expected, found=found, hint=hint)
