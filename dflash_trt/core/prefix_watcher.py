"""Prefix cache events for a router."""

from typing import Protocol


class PrefixWatcher(Protocol):
    """Told of each page that is cached and evicted, in the engine's thread: it must be quick."""

    def stored(self, page_id: int, parent_page_id: int | None, token_ids: tuple[int, ...], salt: str) -> None:
        """A page is cached with these tokens, which follow its parent's; None means the start of a prompt."""
        ...

    def removed(self, page_id: int) -> None: ...
