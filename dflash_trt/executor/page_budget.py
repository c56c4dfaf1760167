"""How many pages fit: target and draft K/V are planned together, from one memory budget.

The drafter's context lives in the same pages as the target's, so nothing of it is ever outside the budget.
"""

from dataclasses import dataclass
from pathlib import Path

from dflash_trt.core.errors import CapacityError, problem
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model_spec import DecoderSpec, DraftSpec, TargetSpec

DEFAULT_FREE_MEMORY_FRACTION = 0.5  # of a CPU's free memory; other programs live there too


@dataclass(frozen=True, kw_only=True, slots=True)
class PagePlan:
    """Sizes of this rank's K/V pages. `num_pages` never exceeds what max_batch_size full sequences need."""

    page_size: int  # token positions
    num_pages: int
    target_bytes_per_token: int
    draft_bytes_per_token: int
    max_seq_len: int

    @property
    def bytes_per_token(self) -> int:
        return self.target_bytes_per_token + self.draft_bytes_per_token

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def total_bytes(self) -> int:
        return self.num_tokens * self.bytes_per_token

    @property
    def num_full_sequences(self) -> int:
        """Requests of max_seq_len that fit at the same time."""
        return self.num_pages // -(-self.max_seq_len // self.page_size)


def plan_pages(
    *,
    target: TargetSpec,
    draft: DraftSpec | None,
    mapping: Mapping,
    element_bytes: int,
    page_size: int,
    max_batch_size: int,
    max_seq_len: int,
    budget_bytes: int,
) -> PagePlan:
    """Raises CapacityError when the budget does not hold one sequence of max_seq_len."""
    target_bytes = kv_bytes_per_token(target, mapping, element_bytes)
    draft_bytes = kv_bytes_per_token(draft, mapping, element_bytes) if draft else 0
    pages_per_sequence = -(-max_seq_len // page_size)
    page_bytes = page_size * (target_bytes + draft_bytes)
    num_pages = min(budget_bytes // page_bytes, max_batch_size * pages_per_sequence)
    if num_pages < pages_per_sequence:
        needed_bytes = pages_per_sequence * page_bytes
        raise CapacityError(
            problem(
                "K/V pages",
                expected=f"room for one sequence of max_seq_len {max_seq_len} ({needed_bytes} bytes)",
                found=f"a budget of {budget_bytes} bytes",
                mend="Give more K/V memory, or build with a smaller max_seq_len.",
            )
        )
    return PagePlan(
        page_size=page_size,
        num_pages=num_pages,
        target_bytes_per_token=target_bytes,
        draft_bytes_per_token=draft_bytes,
        max_seq_len=max_seq_len,
    )


def kv_bytes_per_token(decoder: DecoderSpec, mapping: Mapping, element_bytes: int) -> int:
    """K and V of all layers, on one rank."""
    return 2 * decoder.num_layers * decoder.kv_size // mapping.tp_size * element_bytes


def free_host_memory_bytes() -> int:
    """What Linux calls MemAvailable; elsewhere half a gibibyte, which is a guess that never hurts."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 29
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
