"""The host's tier: places in host memory for pages and snapshots of prefixes that leave the device.

A page that is evicted is copied to a place, and one that a request needs again is copied back, both before the step of
the next plan and in the order in which they were decided. So a place or a page may be used anew at once: whatever wrote
to it before is done.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from dflash_trt.core.step_plan import NO_PAGE_COPIES, SNAPSHOTS, PageCopies
from dflash_trt.scheduler.host_places import HostPlaces
from dflash_trt.scheduler.prefix_tree import PrefixNode, PrefixTree


class HostTier:
    """Places of nodes, least recently used first out. A place has room for a node's pages of all groups.

    With 0 places nothing is kept.
    """

    def __init__(self, tree: PrefixTree, *, num_pages: int = 0, num_snapshots: int = 0) -> None:
        self._tree = tree
        self.pages, self.snapshots = HostPlaces(num_pages), HostPlaces(num_snapshots)
        self._copies: list[tuple[bool, int, int, int]] = []  # rows of PageCopies
        self._arrivals: dict[tuple[bool, int], None] | None = None  # is a snapshot, place; in order
        self.publishes_all = False  # for a store: what is computed, too
        self.num_offloaded_pages = 0
        self.num_onboarded_pages = 0

    @property
    def num_pages(self) -> int:
        return self.pages.num_places

    @property
    def num_kept(self) -> int:
        """Places of nodes."""
        return self.pages.num_of_nodes

    # Copies

    def offload(self, node: PrefixNode, group: int, page_id: int) -> None:
        """Keep a node's page of a group, which leaves the device, if there is a place for it."""
        if not self.num_pages or (node.host_id is None and not self._give_place(node)):
            return
        assert node.host_id is not None
        self.pages.touch(node.host_id)
        if node.is_on_host(group):
            return
        node.host_groups |= 1 << group
        self._copy(False, group, page_id, node.host_id)

    def onboard(self, node: PrefixNode, group: int, page_id: int) -> None:
        """Fill a page on the device from the host's, which stays."""
        assert node.host_id is not None and node.is_on_host(group)
        self._copy(True, group, page_id, node.host_id)

    def offload_snapshot(self, node: PrefixNode, snapshot_id: int) -> None:
        """Keep a node's snapshot, if there is a place for it."""
        places = self.snapshots
        if node.host_snapshot_id is not None:
            places.touch(node.host_snapshot_id)
            return
        if not (places.free or places.nodes):
            return
        if not places.free:
            self._drop_snapshot(next(iter(places.nodes.values())))
        node.host_snapshot_id = places.free.pop()
        places.give(node.host_snapshot_id, node)
        self._copy(False, SNAPSHOTS, snapshot_id, node.host_snapshot_id)

    def onboard_snapshot(self, node: PrefixNode, snapshot_id: int) -> None:
        assert node.host_snapshot_id is not None
        self._copy(True, SNAPSHOTS, snapshot_id, node.host_snapshot_id)

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

    def settle(self, copies: PageCopies) -> None:
        """Those of a step that is committed."""
        columns = (copies.is_onboard.tolist(), copies.groups.tolist(), copies.host_ids.tolist())
        for is_onboard, group, place in zip(*columns, strict=True):
            self._places_of(group == SNAPSHOTS).end_copy(place)
            if self._arrivals is not None and not is_onboard:
                self._arrivals[group == SNAPSHOTS, place] = None

    # Transfers to and from a store

    @property
    def is_waited_for(self) -> bool:
        """Somebody may wait for the copies, though there is nothing else to do."""
        return self.publishes_all and bool(self._copies)

    def note_arrivals(self, *, publishes_all: bool = False) -> None:
        """Note from now on what `take_arrivals` returns."""
        self._arrivals, self.publishes_all = {}, publishes_all

    @property
    def notes_arrivals(self) -> bool:
        return self._arrivals is not None

    @property
    def has_arrivals(self) -> bool:
        """There are some, or copies that may bring some."""
        return bool(self._arrivals) or not (self.pages.are_quiet and self.snapshots.are_quiet)

    def take_arrivals(self, most: int) -> list[tuple[PrefixNode, bool]]:
        """Nodes whose pages, or with True whose snapshots, have come to their places for good; at most so many."""
        found: list[tuple[PrefixNode, bool]] = []
        while self._arrivals and len(found) < most:
            is_state, place = next(iter(self._arrivals))
            del self._arrivals[is_state, place]
            places = self._places_of(is_state)
            node = places.nodes.get(place)
            if node is not None and places.is_quiet(place):
                found.append((node, is_state))
        return found

    def reserve(self, count: int, *, is_state: bool, path: Sequence[PrefixNode]) -> list[int]:
        """At most `count` places for a transfer to write to, none of those of `path`."""
        places, found = self._places_of(is_state), list[int]()
        with self.pinned(path):
            while len(found) < count:
                place = places.take_quiet()
                if place is not None:
                    found.append(place)
                elif not self._make_room(is_state):
                    break
        return found

    def fill(self, node: PrefixNode, place: int, groups: int) -> None:
        """A transfer has written a node's pages of these groups to a reserved place; a node that has one keeps that."""
        if node.host_id is not None:
            self.pages.let_go(place)
            return
        node.host_id, node.host_groups = place, groups
        self.pages.give(place, node)

    def fill_snapshot(self, node: PrefixNode, place: int) -> None:
        """The same for its snapshot."""
        if node.host_snapshot_id is not None:
            self.snapshots.let_go(place)
            return
        node.host_snapshot_id = place
        self.snapshots.give(place, node)

    # Places

    @contextmanager
    def pinned(self, path: Sequence[PrefixNode]) -> Iterator[None]:
        """Keep these nodes' places from others; afterwards they are the most recently used, their end first."""
        for node in path:
            self.pages.nodes.pop(_key(node.host_id), None)
            self.snapshots.nodes.pop(_key(node.host_snapshot_id), None)
        try:
            yield
        finally:
            for node in reversed(path):
                if node.host_id is not None:
                    self.pages.give_back(node.host_id, node)
                if node.host_snapshot_id is not None:
                    self.snapshots.give_back(node.host_snapshot_id, node)

    def forget(self, node: PrefixNode) -> None:
        """Forget a node that is nowhere else, and its continuations."""
        for removed in self._tree.remove(node):
            self._drop_pages(removed)
            self._drop_snapshot(removed)

    def clear(self) -> None:
        """Forget everything, copies and transfers included: the memory is gone."""
        self._copies = []
        for places in (self.pages, self.snapshots):
            places.forget_copies()
        for node in self._tree.nodes():
            self._drop_pages(node)
            self._drop_snapshot(node)
            if node.page_id is None and (node.parent is None or node.parent.page_id is not None):
                self._tree.remove(node)
        for places in (self.pages, self.snapshots):
            places.forget_transfers()

    def check_integrity(self) -> None:
        """Assert that each place is free, or its node's."""
        nodes = self._tree.nodes()
        self.pages.check_integrity(node.host_id for node in nodes if node.host_id is not None)
        self.snapshots.check_integrity(node.host_snapshot_id for node in nodes if node.host_snapshot_id is not None)
        assert all((node.host_id is None) == (node.host_groups == 0) for node in nodes), "a place without pages"

    # Inside

    def _copy(self, is_onboard: bool, group: int, device_id: int, place: int) -> None:
        self._copies.append((is_onboard, group, device_id, place))
        self._places_of(group == SNAPSHOTS).begin_copy(place)

    def _places_of(self, is_state: bool) -> HostPlaces:
        return self.snapshots if is_state else self.pages

    def _make_room(self, is_state: bool) -> bool:
        """Free the place that was used longest ago and that no step touches; False if there is none."""
        places = self._places_of(is_state)
        oldest = next((node for place, node in places.nodes.items() if places.is_quiet(place)), None)
        if oldest is None:
            return False
        if is_state:
            self._drop_snapshot(oldest)
        elif oldest.page_id is None:
            self.forget(oldest)
        else:
            self._drop_pages(oldest)
        return True

    def _count(self, copies: PageCopies, sign: int) -> None:
        is_page = copies.groups != SNAPSHOTS
        self.num_onboarded_pages += sign * int((is_page & copies.is_onboard).sum())
        self.num_offloaded_pages += sign * int((is_page & ~copies.is_onboard).sum())

    def _give_place(self, node: PrefixNode) -> bool:
        """Give a node a place, that of the least recently used one if none is free; False if all are pinned."""
        places = self.pages
        if not places.free:
            oldest = next(iter(places.nodes.values()), None)
            if oldest is None:
                return False
            if oldest.page_id is None:
                self.forget(oldest)
            else:
                self._drop_pages(oldest)
        node.host_id = places.free.pop()
        places.give(node.host_id, node)
        return True

    def _drop_pages(self, node: PrefixNode) -> None:
        if node.host_id is not None:
            self.pages.leave(node.host_id)
            node.host_id, node.host_groups = None, 0

    def _drop_snapshot(self, node: PrefixNode) -> None:
        if node.host_snapshot_id is not None:
            self.snapshots.leave(node.host_snapshot_id)
            node.host_snapshot_id = None


def _key(place: int | None) -> int:
    """Of no place, a key that is never there."""
    return -1 if place is None else place
