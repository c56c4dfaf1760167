"""K as users write it: a number, or a number for each batch size from which it holds (`1:7,16:5`, or a mapping)."""

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Final, Literal

from dflash_trt.core.frozen import MAX_INT32

# Usual costs and acceptance: what a choice of K starts from before anything is measured.
USUAL_RATE: Final = 0.75  # of drafts that are accepted after an accepted one
NUM_FIXED_ROWS: Final = {"cpu": 10.0, "cuda": 200.0}  # rows that cost as much as a step without any
DRAFTER_FRACTION: Final = 0.25  # cost of drafting, relative to the target's at the same rows

CpuWeights = Literal["float", "int8", "four_bits"]  # as the CPU kernels multiply most of a target's
# The best of `bench throughput` for the demo, where a cold start is no slower than without a drafter
# (docs/benchmarks.md). In four bits the demo's drafts lose, and those of a model that fits in no cache gain.
_ON_A_CPU: Final[dict[CpuWeights, dict[int, int]]] = {
    "float": {1: 5, 2: 3, 8: 0},
    "int8": {1: 5, 4: 4},
    "four_bits": {1: 3, 2: 2, 4: 0},
}


def usual_draft_lengths(
    most: int, max_batch_size: int, device: Literal["cpu", "cuda"], *, weights: CpuWeights = "float"
) -> dict[int, int]:
    """K by the number of requests from which it holds: the most tokens for the cost of a step, as these usually are.

    A GPU prepares graphs for each K: it takes as many as the drafter makes for a request alone, then half of them, a
    quarter and so on. `weights` matter on a CPU.
    """
    if device == "cpu":
        found = {size: min(most, length) for size, length in _ON_A_CPU[weights].items() if size <= max_batch_size}
    else:
        sizes = (1 << power for power in range(max_batch_size.bit_length()))
        found = {1: most} | {size: _best_of_halves(most, size) for size in sizes if size > 1}
    changes: dict[int, int] = {}
    for size, length in found.items():
        if length != next(reversed(changes.values()), None):
            changes[size] = length
    return changes


def _best_of_halves(most: int, size: int) -> int:
    def speed(length: int) -> float:
        num_emitted = sum(USUAL_RATE**i for i in range(length + 1))
        num_rows = NUM_FIXED_ROWS["cuda"] + size * (length + 1)
        return num_emitted / (num_rows * (1 + DRAFTER_FRACTION * (length > 0)))

    return max((most >> halvings for halvings in range(most.bit_length() + 1)), key=speed)


def draft_lengths(value: object) -> dict[int, int] | None:
    """K by ascending batch size, from 1 on; a single number is K for every batch size.

    Keys of a JSON mapping are texts. Raises ValueError, with what was expected.
    """
    if value is None:
        return None
    try:
        pairs = [(_integer(size), _integer(length)) for size, length in _pairs(value)]
    except ValueError:
        raise ValueError(f"K of 0 to {MAX_INT32}, or pairs REQUESTS:K such as 1:7,16:5") from None
    lengths = dict(sorted(pairs))
    if len(lengths) < len(pairs):
        raise ValueError("each number of requests once")
    if min(lengths, default=0) != 1:
        raise ValueError("numbers of requests from 1 on with their K, such as 1:7,16:5,64:3")
    return lengths


def lengths_text(lengths: Mapping[int, int]) -> str:
    """As it is read again."""
    if lengths.keys() == {1}:
        return str(lengths[1])
    return ",".join(f"{size}:{length}" for size, length in lengths.items())


def _pairs(value: object) -> Iterable[tuple[object, object]]:
    """Raises ValueError for a text of other parts."""
    if isinstance(value, Mapping):
        return value.items()
    if not isinstance(value, str) or ":" not in value:
        return [(1, value)]
    return [(size, length) for size, length in (pair.split(":") for pair in value.split(","))]


def _integer(value: object) -> int:
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    number = int(value) if is_integer or isinstance(value, str) else -1  # type: ignore[call-overload]
    if not 0 <= number <= MAX_INT32:
        raise ValueError
    return int(number)
