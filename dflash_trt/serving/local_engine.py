"""Opens and closes an engine directory's executor, scheduler and loop together, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from dflash_trt.core.errors import ConfigError, problem, raise_all
from dflash_trt.core.process import let_threads_sleep, paused_collection
from dflash_trt.scheduler.adaptive_draft_length import AdaptiveDraftLength
from dflash_trt.scheduler.config import Policies, SchedulerConfig
from dflash_trt.scheduler.data_parallel import DataParallelScheduler, StepScheduler, make_scheduler
from dflash_trt.scheduler.draft_length import BatchSizeDraftLength, DraftLengthPolicy
from dflash_trt.serving.engine_loop import EngineLoop
from dflash_trt.serving.prefix_directory import PrefixDirectory
from dflash_trt.serving.prefix_transfers import PrefixStore

if TYPE_CHECKING:
    from dflash_trt.core.runtime_config import RuntimeConfig
    from dflash_trt.engine_dir import EngineDir
    from dflash_trt.executor.opening import EngineExecutor


MakeStore = Callable[[str, int], PrefixStore]  # of what the blocks are for, and the bytes of the largest


class LocalEngine(EngineLoop):
    """Implements Engine; owns its executor. `config` is resolved: what the engine was opened with."""

    def __init__(
        self,
        executor: EngineExecutor,
        config: RuntimeConfig,
        scheduler: StepScheduler,
        *,
        open_executor: Callable[[], EngineExecutor],
    ) -> None:
        """`open_executor` opens another one like `executor`, in the place of one that is lost."""
        reopen = self._replace_executor if config.nnodes == 1 else None  # the commands of other nodes have ended
        super().__init__(executor, scheduler, overlaps=bool(config.overlap_scheduling), reopen=reopen)
        self._open_executor = open_executor
        self.config = config
        self.prefix_root: str | None = None  # what the blocks of `prefix_store` are for
        self.prefix_store: PrefixStore | None = None
        self.page_plan = executor.page_plan
        self._executor = executor

    def close(self, *, drains: bool = False) -> None:
        super().close(drains=drains)
        self._executor.close()

    def _replace_executor(self) -> EngineExecutor:
        with suppress(Exception):  # the device may be broken
            self._executor.close()
        self._executor = self._open_executor()
        if self._transfers is not None:
            with self._lock:
                self._transfers.lose_device(self._executor.place_bytes)
        return self._executor


def checked_config(engine: EngineDir, config: RuntimeConfig, **policies: Unpack[Policies]) -> RuntimeConfig:
    """`config` resolved for this engine on this machine; nothing is loaded.

    Raises:
        ConfigError: an object and a setting that it replaces are both given; or see `resolved_config`.
    """
    let_threads_sleep()  # before PyTorch is imported
    from dflash_trt.executor.opening import resolved_config

    _check_once_decided(config, policies)
    return resolved_config(engine, config)


@paused_collection()
def open_local_engine(
    engine: EngineDir,
    config: RuntimeConfig,
    *,
    make_store: MakeStore | None = None,
    publishes_all: bool = False,
    **policies: Unpack[Policies],
) -> LocalEngine:
    """An engine that is ready to start; `config` is of `checked_config`.

    `make_store` makes the store of prefixes in the place of `disk_cache_dir`, `publishes_all` is in that of
    `publish_prompts`.

    Raises what `open_executor` and `make_store` raise.
    """
    from dflash_trt.executor.opening import open_executor

    policy = policies.get("draft_length_policy") or _policy(config)
    scheduler_config = policies.get("scheduler_config") or SchedulerConfig(
        enable_prefix_caching=config.enable_prefix_caching, max_queue_len=config.max_queue_len, ngram=config.ngram
    )
    open_one = partial(open_executor, engine, config, draft_lens=policy.lengths)
    executor = open_one()
    with ExitStack() as stack:  # until everything is well
        stack.callback(executor.close)
        dp_size = engine.manifest.pretrained_config.mapping.dp_size
        scheduler = make_scheduler(executor.limits, scheduler_config, policy, num_ranks=dp_size)
        local = LocalEngine(executor, config, scheduler, open_executor=open_one)
        if config.disk_cache_dir is not None:
            publishes_all = config.publish_prompts
            make_store = partial(_directory, Path(config.disk_cache_dir), config.disk_cache_bytes)
        if make_store is not None:
            schedulers = scheduler.ranks if isinstance(scheduler, DataParallelScheduler) else [scheduler]
            root = _root_of(engine, config)
            local.prefix_root = root.hex()[:16]
            store = local.prefix_store = make_store(local.prefix_root, _max_block_bytes(executor))
            place_bytes = executor.place_bytes
            local.keep_prefixes(schedulers, store, root=root, place_bytes=place_bytes, publishes_all=publishes_all)
        stack.pop_all()
    return local


def _root_of(engine: EngineDir, config: RuntimeConfig) -> bytes:
    """A hash of the engine, and of whatever else decides what a page holds."""
    manifest = engine.with_draft_window(config.draft_window).manifest
    kind = {"engine": manifest.model_dump(mode="json"), "device": config.device, "drafter": config.use_drafter}
    kind |= {"deterministic": config.deterministic}
    return sha256(json.dumps(kind, sort_keys=True).encode()).digest()


def _directory(path: Path, max_bytes: int | None, name: str, max_block_bytes: int) -> PrefixDirectory:
    return PrefixDirectory.open(path, name=name, max_bytes=max_bytes)


def _max_block_bytes(executor: EngineExecutor) -> int:
    """Of all ranks."""
    counts = {False: executor.limits.num_host_pages, True: executor.limits.num_host_snapshots}
    places = [executor.place_bytes(0, is_state) for is_state, count in counts.items() if count]
    return max(sum(len(part) for part in parts) for parts in places)


def _policy(config: RuntimeConfig) -> DraftLengthPolicy:
    """Draft length policy of a resolved config."""
    if config.adaptive_draft_length:
        return AdaptiveDraftLength(config.max_draft_tokens, device="cpu" if config.device == "cpu" else "cuda")
    return BatchSizeDraftLength(config.draft_length or {1: 0})


def _check_once_decided(config: RuntimeConfig, policies: Policies) -> None:
    """Refuse a setting if an object that decides the same is given: it would be ignored."""
    decided_by = {
        "scheduler_config": ("enable_prefix_caching", "max_queue_len", "ngram"),
        "draft_length_policy": ("adaptive_draft_length", "draft_length"),
    }
    problems = [
        problem(name, expected=f"only in {owner}, which is given", found=repr(getattr(config, name)), hint="Drop one.")
        for owner, names in decided_by.items()
        if policies.get(owner) is not None
        for name in names
        if getattr(config, name) != type(config).model_fields[name].default
    ]
    scheduler_config = policies.get("scheduler_config")
    if config.host_cache_bytes is not None and scheduler_config and not scheduler_config.enable_prefix_caching:
        expected, found = "a scheduler_config that caches prefixes", "enable_prefix_caching=False in it"
        problems.append(problem("host_cache_bytes", expected=expected, found=found, hint="Drop one."))
    raise_all(ConfigError, "settings", problems)
