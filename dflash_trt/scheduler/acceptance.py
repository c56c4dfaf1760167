"""Acceptance rates by draft position.

Position i (0-based) is reached when drafts 0 .. i - 1 were accepted and draft i was a candidate.
"""


class AcceptanceCounts:
    """Counts per position. With `decay` below 1, counts decay by it with each verify block."""

    def __init__(self, max_draft_len: int, *, decay: float = 1.0) -> None:
        self._decay = decay
        self.num_reached = [0.0] * max_draft_len
        self.num_accepted = [0.0] * max_draft_len

    def add(self, num_candidates: int, num_accepted: int, *, weight: int = 1) -> None:
        """Count one verify block, or `weight` of them."""
        if self._decay < 1.0:
            for position in range(num_candidates):
                self.num_reached[position] *= self._decay
                self.num_accepted[position] *= self._decay
        for position in range(min(num_accepted + 1, num_candidates)):
            self.num_reached[position] += weight
            self.num_accepted[position] += weight * (position < num_accepted)

    def rates(self) -> tuple[float | None, ...]:
        """Accepted / reached per position; None for positions never reached."""
        return tuple(
            accepted / reached if reached else None
            for accepted, reached in zip(self.num_accepted, self.num_reached, strict=True)
        )
