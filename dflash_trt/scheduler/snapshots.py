"""Ids of recurrent state snapshots, which let requests share a prefix. The executor owns their memory.

A snapshot is free, reserved for a step that saves it, or owned by the prefix tree node whose last token it follows.
Requests that begin with it hold it until their slots are filled from it; others may be evicted for new ones.
"""

from collections import OrderedDict
from collections.abc import Iterable

from dflash_trt.scheduler.host_tier import HostTier
from dflash_trt.scheduler.prefix_tree import PrefixNode


class SnapshotStore:
    """Ids 0 .. num_snapshots - 1."""

    def __init__(self, num_snapshots: int, host: HostTier) -> None:
        self._host = host
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._reserved: set[int] = set()
        self._nodes: OrderedDict[int, PrefixNode] = OrderedDict()  # by id, least recently used first
        self._num_holders = [0] * num_snapshots

    @property
    def num_snapshots(self) -> int:
        return len(self._num_holders)

    @property
    def num_kept(self) -> int:
        """Snapshots of nodes."""
        return len(self._nodes)

    @property
    def num_in_use(self) -> int:
        """Snapshots that steps save, or requests hold."""
        return len(self._reserved) + sum(count > 0 for count in self._num_holders)

    def reserve(self) -> int | None:
        """A snapshot id to save to, evicting the least recently used one if needed; None if all are in use."""
        if not self._free:
            idle = next((snapshot_id for snapshot_id in self._nodes if not self._num_holders[snapshot_id]), None)
            if idle is None:
                return None
            self.detach(self._nodes[idle])
        snapshot_id = self._free.pop()
        self._reserved.add(snapshot_id)
        return snapshot_id

    def release_reserved(self, snapshot_id: int) -> None:
        """Free a reserved one."""
        self._reserved.remove(snapshot_id)
        self._free.append(snapshot_id)

    def attach(self, snapshot_id: int, node: PrefixNode) -> None:
        """Give a reserved one, which is saved, to its node; a node that has one keeps that."""
        if node.snapshot_id is not None:
            self.release_reserved(snapshot_id)
            return
        self._reserved.remove(snapshot_id)
        self._nodes[snapshot_id] = node
        node.snapshot_id = snapshot_id

    def has(self, node: PrefixNode) -> bool:
        """True if a request can begin with the snapshot of a node: it is on the device, or can come back."""
        if node.snapshot_id is not None or node.host_snapshot_id is None:
            return node.snapshot_id is not None
        return bool(self._free) or any(not self._num_holders[snapshot_id] for snapshot_id in self._nodes)

    def detach(self, node: PrefixNode) -> None:
        """Take its snapshot from a node, if it has one, to the host's tier."""
        if node.snapshot_id is None:
            return
        assert not self._num_holders[node.snapshot_id], "a snapshot is evicted before it is read"
        self._host.offload_snapshot(node, node.snapshot_id)
        del self._nodes[node.snapshot_id]
        self._free.append(node.snapshot_id)
        node.snapshot_id = None

    def retain(self, node: PrefixNode) -> int:
        """Keep the snapshot of a node from eviction; return its id. One in the host's tier comes back first."""
        if node.snapshot_id is None and (snapshot_id := self.reserve()) is not None:
            self._host.onboard_snapshot(node, snapshot_id)
            self.attach(snapshot_id, node)
        assert node.snapshot_id is not None, "no snapshot for a node that has one"
        self._nodes.move_to_end(node.snapshot_id)
        self._num_holders[node.snapshot_id] += 1
        return node.snapshot_id

    def release(self, snapshot_id: int) -> None:
        assert self._num_holders[snapshot_id] > 0, f"snapshot {snapshot_id} is released more often than it was held"
        self._num_holders[snapshot_id] -= 1

    def check_integrity(self, of_nodes: Iterable[int]) -> None:
        """Assert that each id is in one place, and that the tree's ids are known."""
        places = sorted([*self._free, *self._reserved, *self._nodes])
        assert places == list(range(self.num_snapshots)), "a snapshot is in two places, or in none"
        assert sorted(of_nodes) == sorted(self._nodes), "the tree has other snapshots than the store"
        assert all(node.snapshot_id == snapshot_id for snapshot_id, node in self._nodes.items())
        held = {snapshot_id for snapshot_id, count in enumerate(self._num_holders) if count}
        assert held <= self._nodes.keys(), "a snapshot is held that no node has"
