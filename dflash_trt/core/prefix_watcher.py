"""Prefix cache events for a router."""

from typing import Protocol


class PrefixWatcher(Protocol):
    """Told of each block of tokens that is cached and forgotten, in the engine's thread: it must be quick."""

    def stored(self, block_id: int, parent_id: int | None, token_ids: tuple[int, ...], salt: str) -> None:
        """A block is cached with these tokens, which follow its parent's; None means the start of a prompt."""
        ...

    def removed(self, block_id: int) -> None:
        """It is in no tier any more."""
        ...
