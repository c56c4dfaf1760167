"""Pages for requests: allocated, cached for their prefix after use, evicted for new ones.

The only user of the page pool (reference counts) and of the prefix tree (contents).
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from dflash_trt.core.prefix_watcher import PrefixWatcher
from dflash_trt.core.step_plan import PageWindow
from dflash_trt.scheduler.host_tier import HostTier
from dflash_trt.scheduler.pages import PagePool
from dflash_trt.scheduler.prefix_tree import PrefixNode, PrefixTree
from dflash_trt.scheduler.snapshots import SnapshotStore
from dflash_trt.scheduler.window_pages import WindowPages


class PageStore:
    """Pages, prefix tree and snapshots.

    With `keeps_prefixes` False a page is free once its request releases it. `num_snapshots` makes a prefix its pages
    and a snapshot of recurrent state; None means its pages only. Pages of layers with `windows` are in `windows`; a
    prefix needs the window pages of its last tokens. What is evicted goes to `host`, which has places for
    `num_host_pages` and `num_host_snapshots`.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        keeps_prefixes: bool = True,
        num_snapshots: int | None = None,
        windows: Sequence[PageWindow] = (),
        num_host_pages: int = 0,
        num_host_snapshots: int = 0,
    ) -> None:
        self.page_size = page_size
        self._pool = PagePool(num_pages)
        self._tree = PrefixTree(page_size, num_windows=len(windows))
        self.host = HostTier(self._tree, num_pages=num_host_pages, num_snapshots=num_host_snapshots)
        self.windows = [
            WindowPages(window, self.host, index=i, page_size=page_size) for i, window in enumerate(windows)
        ]
        self.keeps_prefixes = keeps_prefixes and num_snapshots != 0
        self.needs_state = num_snapshots is not None
        self.snapshots = SnapshotStore((num_snapshots or 0) if keeps_prefixes else 0, self.host)
        self.num_evicted_pages = 0

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def num_available(self) -> int:
        """Pages that can be allocated now: free ones, and idle cached ones."""
        return self._pool.num_free + self._tree.num_idle_pages

    @property
    def num_in_use(self) -> int:
        """Pages held by requests."""
        return self.num_pages - self.num_available

    @property
    def num_kept(self) -> int:
        """Pages of the prefix tree on the device, used or idle."""
        return self._tree.num_pages

    def watch(self, watcher: PrefixWatcher | None) -> None:
        """Tell `watcher` of every page that is cached or forgotten from now on."""
        self._tree.watcher = watcher

    def num_pages_for(self, num_positions: int) -> int:
        return -(-num_positions // self.page_size)

    def match(self, token_ids: Sequence[int], *, salt: str) -> list[PrefixNode]:
        """Cached pages with the K/V of a prefix of `token_ids`, at least one token less than all.

        Call `hold` before any other call that may evict them.
        """
        if not self.keeps_prefixes:
            return []
        return self._tree.match(token_ids, salt=salt, max_pages=(len(token_ids) - 1) // self.page_size)

    def with_state(self, path: list[PrefixNode]) -> list[PrefixNode]:
        """The part of a match after which a request can begin.

        It ends at the last node with the recurrent state and all window pages before it.
        """
        if not self.needs_state and not self.windows:
            return path
        is_covered = [window.covers(path) for window in self.windows]
        length = len(path)
        while length and not (
            all(covered[length - 1] for covered in is_covered)
            and (not self.needs_state or self.snapshots.has(path[length - 1]))
        ):
            length -= 1
        return path[:length]

    def num_idle_among(self, path: Sequence[PrefixNode]) -> int:
        """Number of idle pages in `path`, which are available until they are held."""
        return sum(node.page_id is not None and self._pool.num_owners(node.page_id) == 1 for node in path)

    def num_freed_by(self, holdings: Iterable[Sequence[int]]) -> int:
        """Number of pages that become available when these holders release them together."""
        released = Counter(page_id for page_ids in holdings for page_id in page_ids)
        return sum(
            self._pool.num_owners(page_id) - count == (page_id in self._tree) for page_id, count in released.items()
        )

    def retain(self, path: Sequence[PrefixNode]) -> list[int]:
        """Retain the pages of a match, which is pinned if some are in the host's tier: these come back first.

        Raises:
            CapacityError: `num_available` is smaller than that takes.
        """
        away = [node for node in path if node.page_id is None]
        for node in path[: len(path) - len(away)]:
            assert node.page_id is not None, "a page is on the device without its beginning"
            self._tree.mark_used(node.page_id)
            self._pool.retain(node.page_id)
        for node, page_id in zip(away, self.allocate(len(away)), strict=True):
            self._tree.place(node, page_id)
            self._pool.retain(page_id)  # for the tree
            self.host.onboard(node, 0, page_id)
        return [node.page_id for node in path if node.page_id is not None]

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages, evicting idle prefixes if too few are free.

        Raises:
            CapacityError: `num_available` is smaller.
        """
        while self._pool.num_free < count and self._tree.num_idle_pages:
            self._evict_oldest()
            self.num_evicted_pages += 1
        return self._pool.allocate(count)

    def insert(
        self, parent: PrefixNode | None, token_ids: Sequence[int], page_id: int, *, salt: str
    ) -> PrefixNode | None:
        """Cache the caller's full page below `parent`; None if prefix caching is disabled.

        If the same tokens are cached already, the caller's page is released, and the caller must continue with the
        node's (equal K/V). A step in flight may still read the old page, but steps run one after another, so no later
        step can overwrite it before.
        """
        if not self.keeps_prefixes:
            return None
        assert page_id not in self._tree, f"page {page_id} is kept already"
        node = self._tree.extend(parent, token_ids, page_id, salt=salt)
        if node.page_id != page_id:
            self.retain([node])
            self._pool.release(page_id)
        else:
            self._pool.retain(page_id)  # for the tree
        return node

    def publish(self, path: Sequence[PrefixNode]) -> None:
        """Copy what these nodes have on the device to the host's tier, for a store, if there is one.

        The path's pages are retained; of snapshots the last one is copied.
        """
        if not self.host.notes_arrivals:
            return
        for node in path:
            pages = (node.page_id, *node.window_pages)
            for group, page_id in enumerate(pages):
                if page_id is not None:
                    self.host.offload(node, group, page_id)
        if path and path[-1].snapshot_id is not None:
            self.host.offload_snapshot(path[-1], path[-1].snapshot_id)

    def add_on_host(
        self, parent: PrefixNode | None, token_ids: Sequence[int], place: int, groups: int, *, salt: str
    ) -> PrefixNode:
        """Cache a page below `parent` whose page groups are in a place of the host's tier."""
        node = self._tree.add(parent, token_ids, salt=salt)
        self.host.fill(node, place, groups)
        return node

    def release(self, page_ids: Sequence[int]) -> None:
        """Release a request's pages; cached ones become idle, the last position first."""
        for page_id in reversed(page_ids):
            if self._pool.release(page_id) == 1 and page_id in self._tree:
                self._tree.mark_idle(page_id)

    def forget_idle(self) -> int:
        """Forget all idle pages, and the host's; return the number of the idle ones."""
        count = self._tree.num_idle_pages
        for _ in range(count):
            self._evict_oldest()
        self.host.clear()
        return count

    def _evict_oldest(self) -> None:
        node, page_id = self._tree.take_oldest()
        self.host.offload(node, 0, page_id)
        for window in self.windows:
            window.drop(node)
        self.snapshots.detach(node)
        if not node.is_on_host(0):
            self.host.forget(node)
        self._pool.release(page_id)

    def check_integrity(self, holdings: Iterable[Sequence[int]]) -> None:
        """Assert that exactly the requests of `holdings` and the tree hold pages."""
        self._tree.check_integrity()
        self.host.check_integrity()
        self.snapshots.check_integrity(self._tree.snapshot_ids())
        self._pool.check_integrity([*holdings, self._tree.page_ids()])
        for index, window in enumerate(self.windows):
            assert sorted(window.cached_page_ids()) == sorted(self._tree.window_pages(index)), "an evicted node's page"
        idle = sum(self._pool.num_owners(page_id) == 1 for page_id in self._tree.page_ids())
        assert idle == self._tree.num_idle_pages, "unused cached pages and idle pages differ"
