"""The tree of cached prefixes: the tokens of each full page, and the eviction order of idle pages.

The page pool counts owners. A page holds target and draft K/V, so a hit restores both; layers with a window may have
pages of their own (`window_pages.py`), which come and go. What leaves the device may stay in the host's tier
(`host_tier.py`): a node is in the tree as long as its page is in either.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from dflash_trt.core.prefix_watcher import PrefixWatcher


class PrefixNode:
    """One full page: these `token_ids`, after the tokens of all its ancestors, under the root of `salt`.

    `page_id` is its page on the device, where its ancestors have theirs, too. `snapshot_id` is the recurrent state
    after its last token, if cached. `window_pages` has one entry per group of layers with a window: the page of the
    same tokens, if cached. `host_id` and `host_snapshot_id` are its places in the host's tier; bit g of `host_groups`
    says that the page of group g is there. `key` names it in a store, once somebody has asked for it.
    """

    __slots__ = (
        "block_id",
        "children",
        "host_groups",
        "host_id",
        "host_snapshot_id",
        "key",
        "page_id",
        "parent",
        "salt",
        "snapshot_id",
        "token_ids",
        "window_pages",
    )

    def __init__(
        self, token_ids: tuple[int, ...], *, block_id: int, parent: "PrefixNode | None", salt: str, num_windows: int = 0
    ) -> None:
        self.token_ids = token_ids
        self.block_id = block_id
        self.page_id: int | None = None
        self.parent = parent
        self.salt = salt
        self.children: dict[tuple[int, ...], PrefixNode] = {}
        self.snapshot_id: int | None = None
        self.window_pages: list[int | None] = [None] * num_windows
        self.host_id: int | None = None
        self.host_groups = 0
        self.host_snapshot_id: int | None = None
        self.key: bytes | None = None

    def is_on_host(self, group: int) -> bool:
        """True if the host's tier has its page of this group."""
        return bool(self.host_groups >> group & 1)


class PrefixTree:
    """A trie with one page per edge, one root per salt.

    A request that uses a node uses all its ancestors, and releases the deepest first. So a node becomes idle before its
    parent, and the oldest idle node, the next to be evicted, is a leaf among those on the device.
    """

    def __init__(self, page_size: int, *, num_windows: int = 0) -> None:
        self._page_size = page_size
        self._num_windows = num_windows
        self._roots: dict[str, dict[tuple[int, ...], PrefixNode]] = {}
        self._nodes: dict[int, PrefixNode] = {}  # on the device, by page id
        self._idle: OrderedDict[int, None] = OrderedDict()  # page ids, least recently used first
        self._num_blocks = 0
        self.watcher: PrefixWatcher | None = None

    @property
    def num_pages(self) -> int:
        """Pages on the device."""
        return len(self._nodes)

    @property
    def num_idle_pages(self) -> int:
        return len(self._idle)

    def __contains__(self, page_id: int) -> bool:
        return page_id in self._nodes

    def match(self, token_ids: Sequence[int], *, salt: str, max_pages: int) -> list[PrefixNode]:
        """Nodes of the longest cached prefix of `token_ids`, at most `max_pages`."""
        path: list[PrefixNode] = []
        children = self._roots.get(salt, {})
        while len(path) < max_pages:
            start = len(path) * self._page_size
            node = children.get(tuple(token_ids[start : start + self._page_size]))
            if node is None:
                break
            path.append(node)
            children = node.children
        return path

    def extend(self, parent: PrefixNode | None, token_ids: Sequence[int], page_id: int, *, salt: str) -> PrefixNode:
        """Find or add the node for `token_ids` below `parent`; None means the root of `salt`.

        An existing node that has a page keeps it; compare `page_id`.
        """
        node = self.add(parent, token_ids, salt=salt)
        if node.page_id is None:
            self.place(node, page_id)
        return node

    def add(self, parent: PrefixNode | None, token_ids: Sequence[int], *, salt: str) -> PrefixNode:
        """The same, without a page: it needs one, or a place in the host's tier."""
        assert len(token_ids) == self._page_size, "only full pages are kept"
        children = self._roots.setdefault(salt, {}) if parent is None else parent.children
        key = tuple(token_ids)
        node = children.get(key)
        if node is None:
            node = children[key] = PrefixNode(
                key, block_id=self._num_blocks, parent=parent, salt=salt, num_windows=self._num_windows
            )
            self._num_blocks += 1
            if self.watcher is not None:
                self.watcher.stored(node.block_id, None if parent is None else parent.block_id, key, salt)
        return node

    def place(self, node: PrefixNode, page_id: int) -> None:
        """Give a node a page on the device."""
        assert node.page_id is None
        node.page_id = page_id
        self._nodes[page_id] = node

    def mark_used(self, page_id: int) -> None:
        self._idle.pop(page_id, None)

    def mark_idle(self, page_id: int) -> None:
        """Mark a page that only the tree holds, so that it may be evicted."""
        assert page_id in self._nodes and page_id not in self._idle
        self._idle[page_id] = None

    def take_oldest(self) -> tuple[PrefixNode, int]:
        """Take its page from the node whose idle page was least recently used; return both."""
        page_id, _ = self._idle.popitem(last=False)
        node = self._nodes.pop(page_id)
        assert all(child.page_id is None for child in node.children.values()), (
            f"page {page_id} is evicted before its continuations"
        )
        node.page_id = None
        return node, page_id

    def remove(self, node: PrefixNode) -> list[PrefixNode]:
        """Forget a node without a page on the device, and so its continuations; return all of them."""
        siblings = self._roots[node.salt] if node.parent is None else node.parent.children
        del siblings[node.token_ids]
        if node.parent is None and not siblings:
            del self._roots[node.salt]
        removed = list(_walk([node]))
        for each in removed:
            assert each.page_id is None, f"page {each.page_id} is forgotten while it is on the device"
            if self.watcher is not None:
                self.watcher.removed(each.block_id)
        return removed

    def page_ids(self) -> list[int]:
        return list(self._nodes)

    def snapshot_ids(self) -> list[int]:
        """Snapshot ids of all nodes that have one."""
        return [node.snapshot_id for node in self._nodes.values() if node.snapshot_id is not None]

    def window_pages(self, index: int) -> list[int]:
        """Window pages of this group, of all nodes that have one."""
        pages = (node.window_pages[index] for node in self._nodes.values())
        return [page_id for page_id in pages if page_id is not None]

    def nodes(self) -> list[PrefixNode]:
        """All nodes, in no order."""
        return list(_walk(node for children in self._roots.values() for node in children.values()))

    def check_integrity(self) -> None:
        """Assert that pages on the device are those of nodes, and that no idle node has a child in use."""
        nodes = self.nodes()
        on_device = {node.page_id: node for node in nodes if node.page_id is not None}
        assert on_device == self._nodes, "some cached pages cannot be reached from a root"
        assert all(self._roots.values()), "a root without pages"
        for node in nodes:
            assert node.page_id is not None or node.is_on_host(0), f"block {node.block_id} is in no tier"
            has_parent = node.parent is None or node.parent.page_id is not None
            assert node.page_id is None or has_parent, f"page {node.page_id} is on the device without its beginning"
        order = {page_id: rank for rank, page_id in enumerate(self._idle)}
        for page_id, rank in order.items():
            assert page_id in self._nodes, f"idle page {page_id} is not kept"
            for child in self._nodes[page_id].children.values():
                if child.page_id is None:
                    continue
                assert child.page_id in order, f"page {page_id} is idle but its continuation {child.page_id} is not"
                assert order[child.page_id] < rank, f"page {child.page_id} would be evicted after its parent"


def _walk(nodes: Iterable[PrefixNode]) -> Iterator[PrefixNode]:
    pending = list(nodes)
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.children.values())
