"""The Python API: open an engine directory, generate text.

with LLM("engine") as llm:
    print(llm.generate(["def fibonacci(n):"])[0].text)
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_trt.core.errors import ConfigError, problem
from dflash_trt.engine_dir import EngineDir
from dflash_trt.scheduler.adaptive_draft_length import AdaptiveDraftLength
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import DraftLengthPolicy, FixedDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from dflash_trt.serving.generator import Generator

if TYPE_CHECKING:
    from dflash_trt.executor.opening import Device
    from dflash_trt.serving.text import TextCodec


class LLM(Generator):
    """An engine directory, loaded and serving. Close it, or use it as a context manager."""

    def __init__(
        self,
        engine_dir: str | Path,
        *,
        use_drafter: bool = True,
        num_draft_tokens: int | None = None,
        adapts_draft_length: bool = False,
        reuses_prefixes: bool = True,
        overlaps_steps: bool = False,
        kv_cache_bytes: int | None = None,
        kv_cache_free_memory_fraction: float | None = None,
        num_threads: int | None = None,
        device: Device = "auto",
        seed: int | None = None,
        max_queue_len: int | None = None,
        scheduler_config: SchedulerConfig | None = None,
        draft_length: DraftLengthPolicy | None = None,
    ) -> None:
        """`num_draft_tokens` fixes K (None: the engine's max_draft_len).

        With `adapts_draft_length` it is only the most, and each step's K is what pays best by what was measured so
        far. `draft_length` and `scheduler_config` say the same and more, in the scheduler's own terms.

        `overlaps_steps` plans each step while the one before it runs: in float32 on a CPU the same tokens, and time
        gained where the device is not the CPU that plans.

        K/V pages of target and drafter share one budget: `kv_cache_bytes`, or a fraction of the free memory (half
        unless told); `page_plan` says what it came to.

        `device` is where an engine of the torch backend runs: "cpu", "cuda", or "auto", the GPU where there is one.
        An engine of several ranks starts a process for each rank but one, and ends them with `close`; threads and
        memory are then those of each rank. `num_threads` None: an even share for each rank of the cores that affinity
        and cgroups leave to this process, and no more than OMP_NUM_THREADS.

        `seed` draws the seeds of requests without one reproducibly; `SamplingParams` says when equal seeds give equal
        texts. More than `max_queue_len` waiting requests are
        refused; None: any number may wait.

        Raises:
            EngineDirError: the directory is not an engine this version can run.
            CapacityError: the engine does not fit into memory.
            RankError: a rank's process did not start.
            ConfigError: num_draft_tokens is beyond what the engine can draft, the K/V budget is no budget, or the
                device is not there.
        """
        from dflash_trt.executor.opening import open_executor

        self.engine = EngineDir.open(engine_dir)
        if draft_length is None:
            most = checked_draft_length(num_draft_tokens, max_draft_len(self.engine, use_drafter=use_drafter))
            draft_length = AdaptiveDraftLength(most) if adapts_draft_length else FixedDraftLength(most)
        executor = open_executor(
            self.engine,
            use_drafter=use_drafter,
            kv_cache_bytes=kv_cache_bytes,
            kv_cache_free_memory_fraction=kv_cache_free_memory_fraction,
            num_threads=num_threads,
            device=device,
            draft_lens=draft_length.lengths,
        )
        with ExitStack() as stack:  # until everything is well
            stack.callback(executor.close)
            self.page_plan = executor.page_plan
            config = scheduler_config or SchedulerConfig(reuses_prefixes=reuses_prefixes, max_queue_len=max_queue_len)
            scheduler = Scheduler(executor.limits, config, draft_length)
            target = self.engine.manifest.target
            super().__init__(
                EngineLoop(executor, scheduler, overlaps=overlaps_steps),
                vocab_size=target.vocab_size,
                codec=open_codec(self.engine),
                eos_token_ids=target.eos_token_ids,
                seed=seed,
            )
            stack.pop_all()
        self._executor = executor

    def close(self, *, drains: bool = False) -> None:
        super().close(drains=drains)
        self._executor.close()


def max_draft_len(engine: EngineDir, *, use_drafter: bool = True) -> int:
    """The largest K of its steps; 0 where nothing is drafted."""
    return engine.manifest.build_config.max_draft_len if use_drafter else 0


def checked_draft_length(num_draft_tokens: int | None, max_draft_len: int) -> int:
    """K, the engine's most unless told.

    Raises:
        ConfigError: the engine cannot draft that many.
    """
    if num_draft_tokens is not None and num_draft_tokens > max_draft_len:
        raise ConfigError(
            problem(
                "num_draft_tokens",
                expected=f"0 to {max_draft_len}, this engine's max_draft_len",
                found=str(num_draft_tokens),
                mend="Pass fewer, or build the engine with a larger max_draft_len.",
            )
        )
    return max_draft_len if num_draft_tokens is None else num_draft_tokens


def open_codec(engine: EngineDir) -> TextCodec | None:
    """None for an engine without a tokenizer."""
    if engine.tokenizer_path is None:
        return None
    from dflash_trt.serving.text import TextCodec

    return TextCodec.open(engine.tokenizer_path)
