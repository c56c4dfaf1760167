"""Reference counts of pages. The prefix tree knows their tokens, the executor their memory."""

from collections import Counter
from collections.abc import Iterable, Sequence

from dflash_trt.core.errors import CapacityError


class PagePool:
    """Reference-counted page ids 0 .. num_pages - 1. A page without owners is free."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise CapacityError.about(
                "page pool", expected="at least 1 page", found=str(num_pages), hint="Raise the K/V memory budget."
            )
        self._num_owners = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the lowest id is handed out first

    @property
    def num_pages(self) -> int:
        return len(self._num_owners)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_owners(self, page_id: int) -> int:
        return self._num_owners[page_id]

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages with one owner each.

        Raises:
            CapacityError: fewer are free; none is allocated then.
        """
        if count > len(self._free):
            raise CapacityError.about(
                "page pool",
                expected=f"{count} free pages",
                found=str(len(self._free)),
                hint="Preempt a request, or raise the K/V memory budget.",
            )
        page_ids = [self._free.pop() for _ in range(count)]
        for page_id in page_ids:
            self._num_owners[page_id] = 1
        return page_ids

    def retain(self, page_id: int) -> None:
        """Add an owner to a page that has one."""
        assert self._num_owners[page_id] > 0, f"page {page_id} is free and cannot be shared"
        self._num_owners[page_id] += 1

    def release(self, page_id: int) -> int:
        """Remove an owner; return the number of the others. At 0 the page is free."""
        assert self._num_owners[page_id] > 0, f"page {page_id} is released more often than it was retained"
        self._num_owners[page_id] -= 1
        if self._num_owners[page_id] == 0:
            self._free.append(page_id)
        return self._num_owners[page_id]

    def check_integrity(self, holdings: Iterable[Sequence[int]]) -> None:
        """Assert that the owners are exactly those in `holdings`, and that all other pages are free."""
        held = Counter(page_id for page_ids in holdings for page_id in page_ids)
        for page_id, num_owners in enumerate(self._num_owners):
            assert num_owners == held[page_id], f"page {page_id} has {num_owners} owners, {held[page_id]} claim it"
        free = sorted(self._free)
        assert free == [page_id for page_id, owners in enumerate(self._num_owners) if owners == 0], (
            "the free list does not hold exactly the pages without owners"
        )
