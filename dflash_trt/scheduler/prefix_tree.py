"""The tree of cached prefixes: the tokens of each full page, and the eviction order of idle pages.

The page pool counts owners. A page holds target and draft K/V, so a hit restores both; layers with a window may have
pages of their own (`window_pages.py`), which come and go.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from dflash_trt.core.prefix_watcher import PrefixWatcher


class PrefixNode:
    """One full page: these `token_ids`, after the tokens of all its ancestors, under the root of `salt`.

    `snapshot_id` is the recurrent state after its last token, if cached. `window_pages` has one entry per group of
    layers with a window: the page of the same tokens, if cached.
    """

    __slots__ = ("children", "page_id", "parent", "salt", "snapshot_id", "token_ids", "window_pages")

    def __init__(
        self, token_ids: tuple[int, ...], page_id: int, *, parent: "PrefixNode | None", salt: str, num_windows: int = 0
    ) -> None:
        self.token_ids = token_ids
        self.page_id = page_id
        self.parent = parent
        self.salt = salt
        self.children: dict[tuple[int, ...], PrefixNode] = {}
        self.snapshot_id: int | None = None
        self.window_pages: list[int | None] = [None] * num_windows


class PrefixTree:
    """A trie with one page per edge, one root per salt.

    A request that uses a node uses all its ancestors, and releases the deepest first. So a node becomes idle before its
    parent, and the oldest idle node, the next to be evicted, is a leaf.
    """

    def __init__(self, page_size: int, *, num_windows: int = 0) -> None:
        self._page_size = page_size
        self._num_windows = num_windows
        self._roots: dict[str, dict[tuple[int, ...], PrefixNode]] = {}
        self._nodes: dict[int, PrefixNode] = {}  # by page id
        self._idle: OrderedDict[int, None] = OrderedDict()  # page ids, least recently used first
        self.watcher: PrefixWatcher | None = None

    @property
    def num_pages(self) -> int:
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

        An existing node keeps its own page; compare `page_id`.
        """
        assert len(token_ids) == self._page_size, "only full pages are kept"
        children = self._roots.setdefault(salt, {}) if parent is None else parent.children
        key = tuple(token_ids)
        node = children.get(key)
        if node is None:
            node = PrefixNode(key, page_id, parent=parent, salt=salt, num_windows=self._num_windows)
            children[key] = self._nodes[page_id] = node
            if self.watcher is not None:
                self.watcher.stored(page_id, None if parent is None else parent.page_id, key, salt)
        return node

    def mark_used(self, page_id: int) -> None:
        self._idle.pop(page_id, None)

    def mark_idle(self, page_id: int) -> None:
        """Mark a page that only the tree holds, so that it may be evicted."""
        assert page_id in self._nodes and page_id not in self._idle
        self._idle[page_id] = None

    def evict_oldest(self) -> PrefixNode:
        """Evict the least recently used idle page; return its node."""
        page_id, _ = self._idle.popitem(last=False)
        node = self._nodes.pop(page_id)
        assert not node.children, f"page {page_id} is evicted before its continuations"
        siblings = self._roots[node.salt] if node.parent is None else node.parent.children
        del siblings[node.token_ids]
        if node.parent is None and not siblings:
            del self._roots[node.salt]
        if self.watcher is not None:
            self.watcher.removed(page_id)
        return node

    def page_ids(self) -> list[int]:
        return list(self._nodes)

    def snapshot_ids(self) -> list[int]:
        """Snapshot ids of all nodes that have one."""
        return [node.snapshot_id for node in self._nodes.values() if node.snapshot_id is not None]

    def window_pages(self, index: int) -> list[int]:
        """Window pages of this group, of all nodes that have one."""
        pages = (node.window_pages[index] for node in self._nodes.values())
        return [page_id for page_id in pages if page_id is not None]

    def check_integrity(self) -> None:
        """Assert that the nodes are exactly those reachable, and that no idle node has a child in use."""
        reachable = {node.page_id: node for node in self._walk()}
        assert reachable == self._nodes, "some cached pages cannot be reached from a root"
        assert all(self._roots.values()), "a root without pages"
        order = {page_id: rank for rank, page_id in enumerate(self._idle)}
        for page_id, rank in order.items():
            assert page_id in self._nodes, f"idle page {page_id} is not kept"
            for child in self._nodes[page_id].children.values():
                assert child.page_id in order, f"page {page_id} is idle but its continuation {child.page_id} is not"
                assert order[child.page_id] < rank, f"page {child.page_id} would be evicted after its parent"

    def _walk(self) -> Iterator[PrefixNode]:
        pending = [node for children in self._roots.values() for node in children.values()]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())
