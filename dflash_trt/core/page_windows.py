"""Page groups of layers that read a window of the last tokens, and a request's pages in one."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class PageWindow:
    """A group of layers with pages of their own, `num_pages` of them.

    A row at position p reads positions from p - window + 1 on, so a request keeps the pages of these only. Kernels read
    keys in blocks, and may load pages before a window without using them: entries of the page table there name
    `blank_page`, one page more, which stays as it is allocated, zeros. A weight of 0 would not hide the NaN of another
    request.
    """

    window: int
    num_pages: int

    @property
    def blank_page(self) -> int:
        return self.num_pages


MAX_KEY_BLOCK: Final = 128  # keys that a kernel loads together


def num_pages_for(num_positions: int, page_size: int) -> int:
    """Pages that hold `num_positions` positions from the first on."""
    return -(-num_positions // page_size)


def decode_pages(window: int, page_size: int, max_draft_len: int) -> int:
    """Most pages of a decoding request: a window, and the verify blocks of two uncommitted steps."""
    num_positions = window - 1 + 2 * (max_draft_len + 1)
    return (num_positions + page_size - 2) // page_size + 1
