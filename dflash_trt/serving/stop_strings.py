"""Ends a text at the first complete stop string, however the text is cut into pieces.

An Aho-Corasick automaton: each character is read once, whatever the number of stop strings.
"""

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """One per request. Text that may be the beginning of a stop string is held until that is decided."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._automaton = _compiled(tuple(stop)) if stop else None
        self._state = 0
        self._held = ""
        self.is_found = False

    def push(self, text: str) -> str:
        """The part of the text so far that is final. The stop string and later text are never returned."""
        if self._automaton is None:
            return text
        assert not self.is_found, "the text has ended"
        end, self._state = self._automaton.read(text, self._state)
        if end is not None:
            kept, self._held, self.is_found = self._held + text[:end], "", True
            return kept[: len(kept) - self._automaton.matched[self._state]]
        text = self._held + text
        num_kept = len(text) - self._automaton.depth[self._state]
        self._held = text[num_kept:]
        return text[:num_kept]

    def would_end(self, text: str) -> bool:
        """True if `push(text)` would find the first stop string."""
        if self._automaton is None or self.is_found:
            return False
        return self._automaton.read(text, self._state)[0] is not None

    def flush(self) -> str:
        """The held text, at an end for another reason."""
        text, self._held = self._held, ""
        return text


class _Automaton:
    """A state is the longest suffix of the text that begins a stop string; 0 is the empty suffix.

    `depth` is each state's length, and `matched` the length of the longest stop string it ends with (0 without one).
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.depth = [0]
        self.matched = [0]
        self._next: dict[tuple[int, str], int] = {}
        self._shorter = [0]  # the state of the next shorter such end
        self._first = {string[:1] for string in stop}
        self._add(stop)
        self._link()

    def read(self, text: str, state: int) -> tuple[int | None, int]:
        """Index after the first stop string in `text` (None without one), and the state there."""
        if not state and self._first.isdisjoint(text):
            return None, 0
        for index, character in enumerate(text):
            state = self._after(state, character)
            if self.matched[state]:
                return index + 1, state
        return None, state

    def _after(self, state: int, character: str) -> int:
        while (following := self._next.get((state, character))) is None:
            if state == 0:
                return 0
            state = self._shorter[state]
        return following

    def _add(self, stop: Sequence[str]) -> None:
        for string in stop:
            state = 0
            for character in string:
                following = self._next.setdefault((state, character), len(self.depth))
                if following == len(self.depth):
                    self.depth.append(self.depth[state] + 1)
                    self.matched.append(0)
                    self._shorter.append(0)
                state = following
            self.matched[state] = len(string)

    def _link(self) -> None:
        """Shorter states first: what a state falls back to is complete by then."""
        for (state, character), following in sorted(self._next.items(), key=lambda edge: self.depth[edge[1]]):
            if state:
                self._shorter[following] = self._after(self._shorter[state], character)
            self.matched[following] = self.matched[following] or self.matched[self._shorter[following]]


@lru_cache(maxsize=16)
def _compiled(stop: tuple[str, ...]) -> _Automaton:
    """Requests tend to repeat the same stop strings."""
    return _Automaton(stop)
