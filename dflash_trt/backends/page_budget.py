"""How many pages fit: target and draft K/V are planned together, from one memory budget.

The drafter's context lives in the same pages as the target's, so nothing of it is ever outside the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

from dflash_trt.backends.page_groups import PageNeeds, StepSizes
from dflash_trt.core.errors import CapacityError
from dflash_trt.core.host_resources import available_memory_bytes
from dflash_trt.core.state_spec import EngineStates
from dflash_trt.core.step_plan import PageWindow

if TYPE_CHECKING:
    from dflash_trt.core.runtime_config import RuntimeConfig
    from dflash_trt.engine_dir import EngineLimits, PretrainedConfig

DEFAULT_FREE_MEMORY_FRACTION: Final = 0.5  # share of a CPU's free memory; other programs need memory, too
# share of the memory free after loading; the rest is for activations of prefill steps
GPU_FREE_MEMORY_FRACTION: Final = 0.8
# share of the memory free besides the plan and its contexts with their activations
TENSORRT_FREE_MEMORY_FRACTION: Final = 0.9
SNAPSHOT_FRACTION: Final = 0.25  # share of the memory left by slots and one sequence


class PagedEngine(Protocol):
    """An engine directory's manifest, or what one would say."""

    @property
    def pretrained_config(self) -> PretrainedConfig: ...

    @property
    def build_config(self) -> EngineLimits: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PagePlan:
    """Sizes of this rank's K/V pages. `num_pages` never exceeds what max_batch_size full sequences need.

    Layers with one of `page_windows` have pages of their own; bytes per token count them, inside of their window.
    """

    page_size: int  # token positions
    num_pages: int
    target_bytes_per_token: int
    draft_bytes_per_token: int
    max_seq_len: int
    num_ranks: int = 1  # each with pages like these
    slot_bytes: int = 0  # recurrent states of all slots
    num_snapshots: int = 0  # recurrent states, for prefixes
    snapshot_bytes: int = 0  # all snapshots together
    page_windows: tuple[PageWindow, ...] = ()
    window_bytes_per_token: tuple[int, ...] = ()
    num_windows: int = 0  # requests whose windows fit
    num_host_pages: int = 0  # places in host memory, each with a page of every group
    num_host_snapshots: int = 0
    host_bytes: int = 0  # all places together

    @property
    def bytes_per_token(self) -> int:
        return self.target_bytes_per_token + self.draft_bytes_per_token

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def total_bytes(self) -> int:
        """Bytes of the pages, without `slot_bytes` and `snapshot_bytes`."""
        beside = self.bytes_per_token - sum(self.window_bytes_per_token)
        return self.num_tokens * beside + sum(self._window_bytes)

    @property
    def _window_bytes(self) -> list[int]:
        sizes = zip(self.page_windows, self.window_bytes_per_token, strict=True)
        return [self.page_size * (group.num_pages + 1) * num_bytes for group, num_bytes in sizes]

    @property
    def num_full_sequences(self) -> int:
        """Requests of max_seq_len that fit at the same time."""
        num_sequences = self.num_pages // -(-self.max_seq_len // self.page_size)
        return min(num_sequences, self.num_windows) if self.page_windows else num_sequences

    def agreed(self, smallest: Callable[[int], int]) -> PagePlan:
        """The plan that all ranks can hold; `smallest` is the minimum over ranks."""
        return replace(
            self,
            num_pages=smallest(self.num_pages),
            num_snapshots=smallest(self.num_snapshots),
            page_windows=tuple(replace(group, num_pages=smallest(group.num_pages)) for group in self.page_windows),
            num_windows=smallest(self.num_windows),
            num_host_pages=smallest(self.num_host_pages),
            num_host_snapshots=smallest(self.num_host_snapshots),
        )

    def __str__(self) -> str:
        draft = f" + {self.draft_bytes_per_token} (drafter)" if self.draft_bytes_per_token else ""
        ranks = f"on each of {self.num_ranks} ranks " if self.num_ranks > 1 else ""
        slots = ""
        if self.slot_bytes:
            snapshots = f"{self.snapshot_bytes / 2**20:.1f} MiB of {self.num_snapshots} snapshots for prefixes"
            slots = f", {self.slot_bytes / 2**20:.1f} MiB of recurrent state, {snapshots}"
        return (
            f"{ranks}{self.num_pages} pages of {self.page_size} tokens, {self.total_bytes / 2**20:.1f} MiB: "
            f"{self.target_bytes_per_token} (target){draft} bytes per token, "
            f"{self.num_tokens} tokens, {self.num_full_sequences} requests of max_seq_len {self.max_seq_len} at once"
            f"{''.join(self._windows_in_words())}{slots}{self._host_in_words()}"
        )

    def _windows_in_words(self) -> Iterator[str]:
        for group, num_bytes in zip(self.page_windows, self._window_bytes, strict=True):
            yield f"; of these {group.num_pages} pages, {num_bytes / 2**20:.1f} MiB, of layers with a window of "
            yield f"{group.window} tokens"

    def _host_in_words(self) -> str:
        if not self.num_host_pages:
            return ""
        snapshots = f" and {self.num_host_snapshots} snapshots" if self.num_host_snapshots else ""
        return (
            f"; {self.num_host_pages} pages{snapshots} of prefixes in {self.host_bytes / 2**20:.1f} MiB of host memory"
        )


def plan_engine_pages(
    engine: PagedEngine,
    config: RuntimeConfig,
    *,
    free_bytes: Callable[[], int] | None = None,
    default_fraction: float = DEFAULT_FREE_MEMORY_FRACTION,
    has_groups: bool = True,
) -> PagePlan:
    """The pages that each rank of an engine gets on this machine, from the K/V budget of `config`.

    `free_bytes` asks the rank's device, where that is not the host, whose memory the ranks share evenly. Without
    `has_groups`, as in older TensorRT engines, layers with windows keep all positions.

    Raises:
        CapacityError: the pages of one max_seq_len sequence do not fit, or host memory is short.
    """
    model, build = engine.pretrained_config, engine.build_config
    num_ranks = model.mapping.world_size

    num_local_ranks = num_ranks // config.nnodes

    def share_of_host() -> int:
        return available_memory_bytes() // num_local_ranks

    fraction = config.kv_cache_free_memory_fraction or default_fraction
    budget_bytes = config.kv_cache_bytes or int((free_bytes or share_of_host)() * fraction)
    return plan_pages(
        model.states(has_drafter=config.use_drafter),
        num_ranks=num_ranks,
        page_size=build.page_size,
        max_batch_size=build.max_batch_size,
        max_seq_len=build.max_seq_len,
        budget_bytes=budget_bytes,
        num_snapshots=config.num_state_snapshots if config.enable_prefix_caching else 0,
        steps=step_sizes(build, has_drafter=config.use_drafter) if has_groups else None,
        host_bytes=_host_bytes(config, num_local_ranks, kv_bytes=budget_bytes if free_bytes is None else 0),
    )


def _host_bytes(config: RuntimeConfig, num_local_ranks: int, *, kv_bytes: int) -> int:
    """Of each rank, beside `kv_bytes` of the host that its pages may take. Raises CapacityError."""
    wanted = config.host_cache_bytes or 0
    if wanted and wanted + kv_bytes > (most := available_memory_bytes() // num_local_ranks):
        beside = f" beside {kv_bytes} of K/V pages" if kv_bytes else ""
        ranks = ", a rank's share" if num_local_ranks > 1 else ""
        raise CapacityError.about(
            "host_cache_bytes",
            expected=f"at most {max(0, most - kv_bytes)} bytes, which are free{beside}{ranks}",
            found=str(wanted),
            hint="Give less to cached prefixes, or to K/V pages of a CPU.",
        )
    return wanted


def step_sizes(build: EngineLimits, *, has_drafter: bool = True) -> StepSizes:
    return StepSizes(max_num_tokens=build.max_num_tokens, max_draft_len=build.max_draft_len if has_drafter else 0)


def plan_pages(
    states: EngineStates,  # one rank's
    *,
    num_ranks: int = 1,
    page_size: int,
    max_batch_size: int,
    max_seq_len: int,
    budget_bytes: int,
    num_snapshots: int | None = 0,
    steps: StepSizes | None = None,
    host_bytes: int = 0,
) -> PagePlan:
    """Plan pages for a budget. `num_snapshots` defaults to one per request, capped at SNAPSHOT_FRACTION.

    The cap is a fraction of the memory left by slots and one sequence. With `steps`, layers with windows have pages of
    their own. `host_bytes` are for prefixes that leave the device; snapshots take at most SNAPSHOT_FRACTION of
    them, too.

    Raises CapacityError when the budget does not hold one sequence of max_seq_len, or `host_bytes` no prefix.
    """
    needs = PageNeeds(
        states=states, page_size=page_size, max_batch_size=max_batch_size, max_seq_len=max_seq_len, steps=steps
    )
    needed_bytes = needs.bytes_of(1)
    slot_bytes = states.bytes_per_slot * (max_batch_size + 1)  # a slot for padding, too
    if num_snapshots is None or not states.is_recurrent:
        spare_bytes = max(0, budget_bytes - slot_bytes - needed_bytes)
        most = int(spare_bytes * SNAPSHOT_FRACTION) // states.bytes_per_slot if states.is_recurrent else 0
        num_snapshots = min(max_batch_size, most)
    snapshot_bytes = states.bytes_per_slot * num_snapshots
    left_bytes = budget_bytes - slot_bytes - snapshot_bytes
    if needed_bytes > left_bytes:
        smaller = "max_batch_size or max_seq_len" if slot_bytes else "max_seq_len"
        beside = f" in addition to {slot_bytes + snapshot_bytes} bytes of recurrent state" if slot_bytes else ""
        raise CapacityError.about(
            "K/V pages",
            expected=f"room for one sequence of max_seq_len {max_seq_len} ({needed_bytes} bytes){beside}",
            found=f"a budget of {budget_bytes} bytes",
            hint=f"Give more K/V memory, or build with a smaller {smaller}.",
        )
    num_windows = needs.num_windows_in(left_bytes)
    num_pages = max_batch_size * needs.pages_per_sequence
    if needs.page_bytes:
        num_pages = min(num_pages, (left_bytes - needs.window_bytes(num_windows)) // needs.page_bytes)
    return PagePlan(
        page_size=page_size,
        num_pages=num_pages,
        target_bytes_per_token=sum(state.bytes_per_token for state in states.target),
        draft_bytes_per_token=sum(state.bytes_per_token for state in states.draft),
        max_seq_len=max_seq_len,
        num_ranks=num_ranks,
        slot_bytes=slot_bytes,
        num_snapshots=num_snapshots,
        snapshot_bytes=snapshot_bytes,
        page_windows=needs.page_windows(num_windows),
        window_bytes_per_token=needs.window_bytes_per_token,
        num_windows=num_windows,
        **(_host_places(states, page_size, host_bytes, num_snapshots=num_snapshots) if host_bytes else {}),
    )


def _host_places(states: EngineStates, page_size: int, host_bytes: int, *, num_snapshots: int) -> dict[str, int]:
    """Fields of PagePlan. Raises CapacityError: see `plan_pages`."""
    page_bytes = page_size * states.bytes_per_token
    least = page_bytes, "a page"
    if states.is_recurrent:
        if not num_snapshots:
            raise CapacityError.about(
                "host_cache_bytes",
                expected="K/V memory with room for snapshots, without which no prefix is cached",
                found="none for any",
                hint="Give more K/V memory, or leave it out.",
            )
        least = max(least, (int(states.bytes_per_slot / SNAPSHOT_FRACTION), "a snapshot in a quarter of it"))
        num_snapshots = int(host_bytes * SNAPSHOT_FRACTION) // states.bytes_per_slot
    else:
        num_snapshots = 0
    num_pages = (host_bytes - num_snapshots * states.bytes_per_slot) // page_bytes
    if not num_pages or host_bytes < least[0]:
        raise CapacityError.about(
            "host_cache_bytes",
            expected=f"at least {least[0]}, for {least[1]}",
            found=str(host_bytes),
            hint="Give it more, or leave it out.",
        )
    used_bytes = num_pages * page_bytes + num_snapshots * states.bytes_per_slot
    return {"num_host_pages": num_pages, "num_host_snapshots": num_snapshots, "host_bytes": used_bytes}
