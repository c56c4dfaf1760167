"""Ends a text at the first of several stop strings to be complete, however the text is cut into pieces."""

from collections.abc import Sequence


class StopStrings:
    """One per request. Text that may be the beginning of a stop string is held until that is decided."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.is_found = False

    def push(self, text: str) -> str:
        """The part of the text so far that is sure to stay. The stop string and what follows it never come out."""
        if not self._stop:
            return text
        assert not self.is_found, "the text has ended"
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            self.is_found, self._held = True, ""
            _, start = min(found)  # the one that ends first; of those, the longest
            return text[:start]
        num_held = self._num_undecided(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """The held text, at an end for another reason."""
        text, self._held = self._held, ""
        return text

    def _num_undecided(self, text: str) -> int:
        """Length of the longest end of `text` that is a beginning of a stop string."""
        longest = min(max(map(len, self._stop)) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stop)), 0)
