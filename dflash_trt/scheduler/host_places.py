"""Places of the host's tier: who has each, and which of them no step touches."""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from dflash_trt.scheduler.prefix_tree import PrefixNode


class HostPlaces:
    """Ids 0 .. num_places - 1: free, of a node, or held by a transfer to or from a store.

    Copies of steps are ordered by the steps, and transfers by nothing. So a transfer takes no place that a copy of an
    uncommitted step reads or writes, and nobody gets its place before it has ended.
    """

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.free = list(range(num_places - 1, -1, -1))
        self.nodes: OrderedDict[int, PrefixNode] = OrderedDict()  # least recently used first; without pinned ones
        self._held: dict[int, PrefixNode | None] = {}  # None: its node is gone, or is not made yet
        self._num_copies: Counter[int] = Counter()  # of uncommitted steps

    @property
    def num_of_nodes(self) -> int:
        return len(self.nodes) + sum(node is not None for node in self._held.values())

    def touch(self, place: int) -> None:
        """It was used now."""
        if place in self.nodes:
            self.nodes.move_to_end(place)

    def give(self, place: int, node: PrefixNode) -> None:
        """A place that is nobody's, or a transfer's, is a node's, the most recently used one."""
        self._held.pop(place, None)
        self.nodes[place] = node

    def give_back(self, place: int, node: PrefixNode) -> None:
        """Of a pinned node."""
        if place in self._held:
            self._held[place] = node
        else:
            self.nodes[place] = node
            self.touch(place)

    def leave(self, place: int) -> None:
        """Its node is gone."""
        if place in self._held:
            self._held[place] = None
        else:
            self.nodes.pop(place, None)  # a pinned one is in neither
            self.free.append(place)

    # Copies of steps

    def begin_copy(self, place: int) -> None:
        self._num_copies[place] += 1

    def end_copy(self, place: int) -> None:
        self._num_copies[place] -= 1
        if not self._num_copies[place]:
            del self._num_copies[place]

    def forget_copies(self) -> None:
        self._num_copies.clear()

    @property
    def are_quiet(self) -> bool:
        """No copy of an uncommitted step touches any."""
        return not self._num_copies

    def is_quiet(self, place: int) -> bool:
        """No copy of an uncommitted step touches it."""
        return place not in self._num_copies

    # Transfers

    def hold(self, place: int, node: PrefixNode) -> None:
        """A node's place is read by a transfer."""
        assert self.is_quiet(place)
        del self.nodes[place]
        self._held[place] = node

    def take_quiet(self) -> int | None:
        """A free place for a transfer to write to, if there is one."""
        place = next((place for place in reversed(self.free) if self.is_quiet(place)), None)
        if place is not None:
            self.free.remove(place)
            self._held[place] = None
        return place

    def let_go(self, place: int) -> None:
        """A transfer has ended."""
        node = self._held.pop(place)
        if node is None:
            self.free.append(place)
        else:
            self.nodes[place] = node

    def forget_transfers(self) -> None:
        """The memory is gone; whoever held a place does not let it go any more."""
        self.free += self._held
        self._held.clear()

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Assert that each place is free, a transfer's or its node's; `owned` are those of the tree."""
        of_nodes = [*self.nodes, *(place for place, node in self._held.items() if node is not None)]
        assert sorted(owned) == sorted(of_nodes), "the tree has other places than the host's tier"
        places = sorted([*self.free, *self.nodes, *self._held])
        assert places == list(range(self.num_places)), "a place has two owners, or none"
