"""Pages of a group of layers that read a window of the last tokens: allocated, cached, evicted.

A prefix tree node may have such a page in addition to its own. Window pages may be evicted on their own: a request can
begin after a prefix as long as the pages of its last window are there, on the device or in the host's tier.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from dflash_trt.core.step_plan import PageWindow
from dflash_trt.scheduler.host_tier import HostTier
from dflash_trt.scheduler.pages import PagePool
from dflash_trt.scheduler.prefix_tree import PrefixNode


class WindowPages:
    """One group. `index` is its place in `PrefixNode.window_pages`."""

    def __init__(self, window: PageWindow, host: HostTier, *, index: int, page_size: int) -> None:
        self.window = window.window
        self._host = host
        self._index = index
        self._page_size = page_size
        self._pool = PagePool(window.num_pages)
        self._nodes: dict[int, PrefixNode] = {}  # by page id
        self._idle: OrderedDict[int, bool] = OrderedDict()  # page ids, least recently used first; True: may come back

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def _group(self) -> int:
        """The page group; the first one keeps all positions."""
        return self._index + 1

    @property
    def num_in_use(self) -> int:
        """Pages held by requests."""
        return self.num_pages - self._pool.num_free - len(self._idle)

    def first_page(self, num_tokens: int) -> int:
        """Index of the first page that rows after `num_tokens` committed tokens read."""
        return max(0, num_tokens - self.window + 1) // self._page_size

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages, evicting idle ones if too few are free.

        Raises:
            CapacityError: too few are free or idle.
        """
        while self._pool.num_free < count and self._idle:
            page_id = next(iter(self._idle))
            self.drop(self._nodes[page_id])
        return self._pool.allocate(count)

    def release(self, page_ids: Sequence[int], *, are_next: bool = False) -> None:
        """Release a request's pages; cached ones become idle, and with `are_next` the next to be evicted, for good."""
        for page_id in page_ids:
            if self._pool.release(page_id) == 1 and page_id in self._nodes:
                self._idle[page_id] = not are_next
                if are_next:
                    self._idle.move_to_end(page_id, last=False)

    def covers(self, path: Sequence[PrefixNode]) -> list[bool]:
        """For each node, True if a request can begin after it: the pages of the window before are cached."""
        found, run = [], 0  # nodes in sequence that have their page
        for length, node in enumerate(path, start=1):
            is_there = node.window_pages[self._index] is not None or node.is_on_host(self._group)
            run = run + 1 if is_there else 0
            found.append(run >= length - self.first_page(length * self._page_size))
        return found

    def retain(self, nodes: Sequence[PrefixNode]) -> list[int]:
        """Retain the pages of some nodes, which have them or are pinned: those in the host's tier come back first.

        Raises:
            CapacityError: too few pages are free or idle for these.
        """
        away = []
        for node in nodes:
            page_id = node.window_pages[self._index]
            if page_id is None:
                away.append(node)
                continue
            self._idle.pop(page_id, None)
            self._pool.retain(page_id)
        for node, page_id in zip(away, self.allocate(len(away)), strict=True):
            assert node.is_on_host(self._group), "a request begins after a prefix without its window"
            self._host.onboard(node, self._group, page_id)
            self.insert(node, page_id)
        return [page_id for node in nodes if (page_id := node.window_pages[self._index]) is not None]

    def insert(self, node: PrefixNode, page_id: int) -> int:
        """Cache the caller's page with `node`; if the node has one, the caller uses that. Returns the page."""
        known = node.window_pages[self._index]
        if known is None:
            node.window_pages[self._index], self._nodes[page_id] = page_id, node
            self._pool.retain(page_id)
            return page_id
        if known != page_id:
            self.retain([node])
            self._pool.release(page_id)
        return known

    def drop(self, node: PrefixNode) -> None:
        """Take its page from a node, if it has one, to the host's tier; no request holds it."""
        page_id = node.window_pages[self._index]
        if page_id is None:
            return
        assert page_id in self._idle, f"page {page_id} is evicted while a request reads it"
        if self._idle.pop(page_id):
            self._host.offload(node, self._group, page_id)
        node.window_pages[self._index] = None
        del self._nodes[page_id]
        self._pool.release(page_id)

    def cached_page_ids(self) -> list[int]:
        return list(self._nodes)

    def check_integrity(self, holdings: Iterable[Sequence[int]]) -> None:
        """Assert that exactly the requests of `holdings` and the nodes hold pages."""
        assert all(node.window_pages[self._index] == page_id for page_id, node in self._nodes.items())
        self._pool.check_integrity([*holdings, list(self._nodes)])
        idle = {page_id for page_id in self._nodes if self._pool.num_owners(page_id) == 1}
        assert idle == self._idle.keys(), "unused cached pages and idle pages differ"
