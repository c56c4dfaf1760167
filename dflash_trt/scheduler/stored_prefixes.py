"""Prefixes in a store outside of the engine: which of a request's blocks to ask for, and what becomes of transfers.

A block is a node of the prefix tree, its pages of all groups or its snapshot. Its key is a hash of the tokens up to its
end, of the salt, and of what the store is for (`root`), so that it means the same to every engine that asks. The places
of the host's tier are where blocks come from and go to; whoever moves the bytes does it beside the steps.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from dflash_trt.scheduler.host_places import HostPlaces
from dflash_trt.scheduler.page_store import PageStore
from dflash_trt.scheduler.prefix_tree import PrefixNode


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A node's pages, those of the page groups whose bits `groups` has, or its snapshot."""

    key: bytes
    is_state: bool
    groups: int = 0

    @property
    def name(self) -> tuple[bytes, bool]:
        return self.key, self.is_state


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """A block and its place in the host's tier, which nobody else gets until the transfer has ended."""

    block: Block
    place: int


class StoredPrefixes:
    """The scheduler's side of a store. `root` is a hash of what its blocks depend on, beside tokens and salt.

    `publishes_all` sends every block of a prompt there once it is computed, for others that wait for it; else what
    leaves the device, and what a second request begins with.
    """

    def __init__(self, store: PageStore, root: bytes, *, publishes_all: bool = False) -> None:
        self._store = store
        self._root = root
        self._host = store.host
        self._host.note_arrivals(publishes_all=publishes_all)
        self.num_saved = 0
        self.num_loaded = 0

    @property
    def page_size(self) -> int:
        return self._store.page_size

    @property
    def publishes_all(self) -> bool:
        return self._host.publishes_all

    @property
    def num_places(self) -> int:
        """For pages."""
        return self._host.num_pages

    def num_blocks(self, token_ids: Sequence[int]) -> int:
        """Number of blocks that a prompt may begin with: a request computes its last token."""
        return (len(token_ids) - 1) // self.page_size

    def keys(self, token_ids: Sequence[int], *, salt: str) -> list[bytes]:
        """Of these blocks; in any thread, as it takes some 10 ms for a prompt of 32,768 tokens."""
        keys, key = [], self._salted(salt)
        for index in range(self.num_blocks(token_ids)):
            key = _key_after(key, token_ids[index * self.page_size : (index + 1) * self.page_size])
            keys.append(key)
        return keys

    def num_known(self, token_ids: Sequence[int], *, salt: str) -> int:
        """Number of these blocks that need no store: a request can begin after them."""
        return len(self._store.with_state(self._store.match(token_ids, salt=salt)))

    # To a store

    @property
    def has_arrivals(self) -> bool:
        """There are some that `arrivals` has not returned, or copies that may bring some."""
        return self._host.has_arrivals

    def arrivals(self, most: int) -> list[tuple[PrefixNode, Block]]:
        """Blocks that have come to the host's tier, or have now pages of more groups there; at most so many at once."""
        found: list[tuple[PrefixNode, Block]] = []
        while taken := self._host.take_arrivals(most - len(found)):
            found += [
                (node, Block(key=self._key_of(node), is_state=is_state, groups=0 if is_state else node.host_groups))
                for node, is_state in taken
                if is_state or node.is_on_host(0)
            ]
        return found

    def begin_saving(self, node: PrefixNode, block: Block) -> Transfer:
        """Hold the place of an arrival until `end_saving`."""
        place = node.host_snapshot_id if block.is_state else node.host_id
        assert place is not None
        self._places(block).hold(place, node)
        return Transfer(block=block, place=place)

    def end_saving(self, transfer: Transfer, *, is_saved: bool) -> None:
        self._places(transfer.block).let_go(transfer.place)
        self.num_saved += is_saved

    # From a store

    def begin_loading(
        self, token_ids: Sequence[int], found: Sequence[Sequence[Block]], *, start: int, salt: str
    ) -> list[Transfer]:
        """Places for the blocks that a store has, by index from `start`, as far as a request could begin after them.

        Fewer where places are short. Of snapshots the last one only.
        """
        path = self._store.match(token_ids, salt=salt)
        chosen: list[tuple[Block | None, Block | None]] = []  # pages and snapshot
        for index, blocks in enumerate(found, start=start):
            pages = next((block for block in blocks if not block.is_state and block.groups & 1), None)
            state = next((block for block in blocks if block.is_state), None)
            if pages is None and index >= len(path):
                break
            chosen.append((None if index < len(path) else pages, state))
        while chosen and self._store.needs_state and chosen[-1][1] is None:
            chosen.pop()
        wanted = [pages for pages, _ in chosen if pages is not None]
        states = [chosen[-1][1]] if chosen and chosen[-1][1] is not None else []
        transfers: list[Transfer] = []
        for is_state, blocks in ((False, wanted), (True, states)):
            places = self._host.reserve(len(blocks), is_state=is_state, path=path)
            transfers += [Transfer(block=block, place=place) for block, place in zip(blocks, places, strict=False)]
        return transfers

    def end_loading(
        self,
        token_ids: Sequence[int],
        keys: Sequence[bytes],
        transfers: Sequence[Transfer],
        *,
        salt: str,
        has_come: Callable[[Transfer], bool],
    ) -> None:
        """Cache the blocks that have come, as far as they follow cached ones, and free the places of the others."""
        pages, states = (
            {transfer.block.key: transfer for transfer in transfers if transfer.block.is_state is kind}
            for kind in (False, True)
        )
        path, node = self._store.match(token_ids, salt=salt), None
        size, cached = self._store.page_size, set[tuple[bytes, bool]]()
        for index, key in enumerate(keys):
            page, state = pages.get(key), states.get(key)
            if index < len(path):
                node = path[index]
            elif page is None or not has_come(page):
                break
            else:
                tokens = token_ids[index * size : (index + 1) * size]
                node = self._store.add_on_host(node, tokens, page.place, page.block.groups, salt=salt)
                cached.add(page.block.name)
            if state is not None and has_come(state):
                self._host.fill_snapshot(node, state.place)
                cached.add(state.block.name)
        for transfer in transfers:
            if transfer.block.name not in cached:
                self._places(transfer.block).let_go(transfer.place)
        self.num_loaded += len(cached)

    def _places(self, block: Block) -> HostPlaces:
        return self._host.snapshots if block.is_state else self._host.pages

    def _salted(self, salt: str) -> bytes:
        return sha256(self._root + salt.encode()).digest()

    def _key_of(self, node: PrefixNode) -> bytes:
        """Kept in the node: the next one asks for it."""
        above = []
        while node.key is None:
            above.append(node)
            if node.parent is None:
                break
            node = node.parent
        key = self._salted(node.salt) if node.key is None else node.key
        for each in reversed(above):
            key = each.key = _key_after(key, each.token_ids)
        return key


def _key_after(key: bytes, token_ids: Sequence[int]) -> bytes:
    return sha256(key + array("i", token_ids).tobytes()).digest()
