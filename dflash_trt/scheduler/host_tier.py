"""The host's tier: places in host memory for pages and snapshots of prefixes that leave the device.

A page that is evicted is copied to a place, and one that a request needs again is copied back, both before the step of
the next plan and in the order in which they were decided. So a place or a page may be used anew at once: whatever wrote
to it before is done.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from dflash_trt.core.step_plan import NO_PAGE_COPIES, SNAPSHOTS, PageCopies
from dflash_trt.scheduler.prefix_tree import PrefixNode, PrefixTree


class _Places:
    """Ids 0 .. num_places - 1, free or of a node."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.free = list(range(num_places - 1, -1, -1))
        self.nodes: OrderedDict[int, PrefixNode] = OrderedDict()  # least recently used first; without the pinned ones

    def touch(self, place: int) -> None:
        """It was used now."""
        if place in self.nodes:
            self.nodes.move_to_end(place)

    def check_integrity(self, owned: Iterable[int]) -> None:
        assert sorted(owned) == sorted(self.nodes), "the tree has other places than the host's tier"
        assert sorted([*self.free, *self.nodes]) == list(range(self.num_places)), "a place has two owners, or none"


class HostTier:
    """Places of nodes, least recently used first out. A place has room for a node's pages of all groups.

    With 0 places nothing is kept.
    """

    def __init__(self, tree: PrefixTree, *, num_pages: int = 0, num_snapshots: int = 0) -> None:
        self._tree = tree
        self._pages, self._snapshots = _Places(num_pages), _Places(num_snapshots)
        self._copies: list[tuple[bool, int, int, int]] = []  # rows of PageCopies
        self.num_offloaded_pages = 0
        self.num_onboarded_pages = 0

    @property
    def num_pages(self) -> int:
        return self._pages.num_places

    @property
    def num_kept(self) -> int:
        """Places of nodes."""
        return len(self._pages.nodes)

    # Copies

    def offload(self, node: PrefixNode, group: int, page_id: int) -> None:
        """Keep a node's page of a group, which leaves the device, if there is a place for it."""
        if not self.num_pages or (node.host_id is None and not self._give_place(node)):
            return
        assert node.host_id is not None
        self._pages.touch(node.host_id)
        if node.is_on_host(group):
            return
        node.host_groups |= 1 << group
        self._copies.append((False, group, page_id, node.host_id))

    def onboard(self, node: PrefixNode, group: int, page_id: int) -> None:
        """Fill a page on the device from the host's, which stays."""
        assert node.host_id is not None and node.is_on_host(group)
        self._copies.append((True, group, page_id, node.host_id))

    def offload_snapshot(self, node: PrefixNode, snapshot_id: int) -> None:
        """Keep a node's snapshot, if there is a place for it."""
        places = self._snapshots
        if node.host_snapshot_id is not None:
            places.touch(node.host_snapshot_id)
            return
        if not (places.free or places.nodes):
            return
        if not places.free:
            self._drop_snapshot(next(iter(places.nodes.values())))
        node.host_snapshot_id = places.free.pop()
        places.nodes[node.host_snapshot_id] = node
        self._copies.append((False, SNAPSHOTS, snapshot_id, node.host_snapshot_id))

    def onboard_snapshot(self, node: PrefixNode, snapshot_id: int) -> None:
        assert node.host_snapshot_id is not None
        self._copies.append((True, SNAPSHOTS, snapshot_id, node.host_snapshot_id))

    def take_copies(self) -> PageCopies:
        """The copies that the next step makes first."""
        if not self._copies:
            return NO_PAGE_COPIES
        copies, self._copies = self._copies, []
        is_onboard, groups, ids, host_ids = np.array(copies, np.int64).T
        taken = PageCopies(is_onboard=is_onboard.astype(bool), groups=groups, ids=ids, host_ids=host_ids)
        self._count(taken, 1)
        return taken

    def take_back(self, copies: PageCopies) -> None:
        """Those of a step that did not run."""
        columns = (copies.is_onboard, copies.groups, copies.ids, copies.host_ids)
        self._copies[:0] = zip(*(column.tolist() for column in columns), strict=True)
        self._count(copies, -1)

    # Places

    @contextmanager
    def pinned(self, path: Sequence[PrefixNode]) -> Iterator[None]:
        """Keep these nodes' places from others; afterwards they are the most recently used, their end first."""
        for node in path:
            self._pages.nodes.pop(_key(node.host_id), None)
            self._snapshots.nodes.pop(_key(node.host_snapshot_id), None)
        try:
            yield
        finally:
            for node in reversed(path):
                if node.host_id is not None:
                    self._pages.nodes[node.host_id] = node
                    self._pages.touch(node.host_id)
                if node.host_snapshot_id is not None:
                    self._snapshots.nodes[node.host_snapshot_id] = node
                    self._snapshots.touch(node.host_snapshot_id)

    def forget(self, node: PrefixNode) -> None:
        """Forget a node that is nowhere else, and its continuations."""
        for removed in self._tree.remove(node):
            self._drop_pages(removed)
            self._drop_snapshot(removed)

    def clear(self) -> None:
        """Forget everything, copies included: the memory is gone."""
        self._copies = []
        for node in self._tree.nodes():
            self._drop_pages(node)
            self._drop_snapshot(node)
            if node.page_id is None and (node.parent is None or node.parent.page_id is not None):
                self._tree.remove(node)

    def check_integrity(self) -> None:
        """Assert that each place is free, or its node's."""
        nodes = self._tree.nodes()
        self._pages.check_integrity(node.host_id for node in nodes if node.host_id is not None)
        self._snapshots.check_integrity(node.host_snapshot_id for node in nodes if node.host_snapshot_id is not None)
        assert all((node.host_id is None) == (node.host_groups == 0) for node in nodes), "a place without pages"

    # Inside

    def _count(self, copies: PageCopies, sign: int) -> None:
        is_page = copies.groups != SNAPSHOTS
        self.num_onboarded_pages += sign * int((is_page & copies.is_onboard).sum())
        self.num_offloaded_pages += sign * int((is_page & ~copies.is_onboard).sum())

    def _give_place(self, node: PrefixNode) -> bool:
        """Give a node a place, that of the least recently used one if none is free; False if all are pinned."""
        places = self._pages
        if not places.free:
            oldest = next(iter(places.nodes.values()), None)
            if oldest is None:
                return False
            if oldest.page_id is None:
                self.forget(oldest)
            else:
                self._drop_pages(oldest)
        node.host_id = places.free.pop()
        places.nodes[node.host_id] = node
        return True

    def _drop_pages(self, node: PrefixNode) -> None:
        if node.host_id is not None:
            self._pages.nodes.pop(node.host_id, None)
            self._pages.free.append(node.host_id)
            node.host_id, node.host_groups = None, 0

    def _drop_snapshot(self, node: PrefixNode) -> None:
        if node.host_snapshot_id is not None:
            self._snapshots.nodes.pop(node.host_snapshot_id, None)
            self._snapshots.free.append(node.host_snapshot_id)
            node.host_snapshot_id = None


def _key(place: int | None) -> int:
    """Of no place, a key that is never there."""
    return -1 if place is None else place
