"""Prefix cache events of ranks that cache prefixes of their own, as those of one cache."""

from collections import Counter
from itertools import count

from dflash_trt.core.prefix_watcher import PrefixWatcher

_Key = tuple[int | None, tuple[int, ...], str]  # the parent's id for the watcher, tokens and salt


class SharedPrefixes:
    """Tells `watcher` of a block when the first rank caches it, and when the last one has forgotten it."""

    def __init__(self, watcher: PrefixWatcher) -> None:
        self._watcher = watcher
        self._ids: dict[_Key, int] = {}
        self._keys: dict[int, _Key] = {}
        self._num_ranks = Counter[int]()  # that have the block
        self._numbers = count()

    def of_rank(self) -> PrefixWatcher:
        """The watcher of a rank's cache."""
        return _OfRank(self)

    def stored(self, key: _Key) -> int:
        """Returns the block's id."""
        if key not in self._ids:
            block_id = self._ids[key] = next(self._numbers)
            self._keys[block_id] = key
            self._watcher.stored(block_id, *key)
        self._num_ranks[self._ids[key]] += 1
        return self._ids[key]

    def removed(self, block_id: int) -> None:
        self._num_ranks[block_id] -= 1
        if not self._num_ranks[block_id]:
            del self._num_ranks[block_id], self._ids[self._keys.pop(block_id)]
            self._watcher.removed(block_id)


class _OfRank:
    """Implements PrefixWatcher."""

    def __init__(self, shared: SharedPrefixes) -> None:
        self._shared = shared
        self._ids: dict[int, int] = {}  # this rank's ids -> the watcher's

    def stored(self, block_id: int, parent_id: int | None, token_ids: tuple[int, ...], salt: str) -> None:
        parent = None if parent_id is None else self._ids[parent_id]
        self._ids[block_id] = self._shared.stored((parent, token_ids, salt))

    def removed(self, block_id: int) -> None:
        self._shared.removed(self._ids.pop(block_id))
