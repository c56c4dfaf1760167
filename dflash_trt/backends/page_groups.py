"""Pages of each page group that sequences need: layers that keep all positions, or a window."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

from dflash_trt.core.state_spec import EngineStates
from dflash_trt.core.step_plan import PageWindow, decode_pages, num_pages_for


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSizes:
    """Maximum sizes of steps: a prompt's chunk needs window pages in addition to decoding's."""

    max_num_tokens: int
    max_draft_len: int


@dataclass(frozen=True, kw_only=True)
class PageNeeds:
    """Page needs of one rank. Without `steps`, all layers are in one group."""

    states: EngineStates
    page_size: int
    max_batch_size: int
    max_seq_len: int
    steps: StepSizes | None = None

    @cached_property
    def windows(self) -> tuple[int, ...]:
        return () if self.steps is None else self.states.windows(self._max_positions)

    @property
    def pages_per_sequence(self) -> int:
        """Pages per sequence in the first group."""
        return num_pages_for(self.max_seq_len, self.page_size)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a page of the first group, which may have no layers."""
        return self.page_size * self.states.bytes_per_token_of(None, self.windows)

    @property
    def window_bytes_per_token(self) -> tuple[int, ...]:
        return tuple(self.states.bytes_per_token_of(window, self.windows) for window in self.windows)

    def window_pages(self, num_requests: int) -> tuple[int, ...]:
        """Pages of each window for `num_requests` requests of any length, and for the chunks of one step."""
        if self.steps is None:
            return ()
        whole = num_pages_for(self._max_positions, self.page_size)
        chunks = num_pages_for(self.steps.max_num_tokens, self.page_size)
        of_one = [decode_pages(window, self.page_size, self.steps.max_draft_len) for window in self.windows]
        most = min(num_requests, self.max_batch_size) * whole
        return tuple(min(num_requests * min(pages, whole) + chunks, most) for pages in of_one)

    def window_bytes(self, num_requests: int) -> int:
        """Bytes of these pages and a blank one per window."""
        sizes = zip(self.window_pages(num_requests), self.window_bytes_per_token, strict=True)
        return sum(self.page_size * (num_pages + 1) * num_bytes for num_pages, num_bytes in sizes)

    def bytes_of(self, num_requests: int) -> int:
        """Pages of `num_requests` sequences of max_seq_len, in all groups."""
        return num_requests * self.pages_per_sequence * self.page_bytes + self.window_bytes(num_requests)

    def num_windows_in(self, budget_bytes: int) -> int:
        """Requests whose windows get pages; at most max_batch_size.

        As many as full sequences fit, or, because most are shorter, as many as half of the budget holds, if the other
        layers then have what they would have in one group. More, for cached prefixes, if everything else has all it can
        use.
        """
        most = range(self.max_batch_size + 1)
        num_pages = budget_bytes // (self.page_size * self.states.bytes_per_token)
        beside = budget_bytes - max(num_pages, self.pages_per_sequence) * self.page_bytes
        of_half = bisect_right(most, min(beside, budget_bytes // 2), key=self.window_bytes) - 1
        of_sequences = bisect_right(most, budget_bytes, key=self.bytes_of) - 1
        rest_bytes = budget_bytes - self.max_batch_size * self.pages_per_sequence * self.page_bytes
        every = range(self.max_batch_size * (self.pages_per_sequence + 1))
        of_rest = bisect_right(every, rest_bytes, key=self.window_bytes) - 1
        return max(of_half, of_sequences, of_rest, 1)

    def page_windows(self, num_requests: int) -> tuple[PageWindow, ...]:
        return tuple(map(PageWindow, self.windows, self.window_pages(num_requests)))

    @property
    def _max_positions(self) -> int:
        """As `ExecutorLimits.max_positions`."""
        return self.max_seq_len + (0 if self.steps is None else self.steps.max_draft_len)
