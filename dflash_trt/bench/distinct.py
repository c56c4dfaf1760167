"""A measure of repetition in texts."""

from collections.abc import Sequence


def distinct_fraction(token_ids: Sequence[int], *, length: int = 4) -> float:
    """Different n-grams of a text over all its n-grams; 1 for a text too short to have any."""
    grams = [tuple(token_ids[i : i + length]) for i in range(len(token_ids) - length + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
