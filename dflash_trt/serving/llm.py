"""The Python API: open an engine directory, generate text.

with LLM("engine") as llm:
    print(llm.generate(["def fibonacci(n):"])[0].text)
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.serving.generator import Generator
from dflash_trt.serving.local_engine import open_local_engine

if TYPE_CHECKING:
    from dflash_trt.scheduler.config import SchedulerConfig
    from dflash_trt.scheduler.draft_length import DraftLengthPolicy
    from dflash_trt.serving.text import TextCodec


class LLM(Generator):
    """An engine directory, loaded and serving. Close it, or use it as a context manager.

    `config` is what it was opened with, resolved; `page_plan` says what the K/V budget came to.
    """

    def __init__(
        self,
        engine_dir: str | Path,
        config: RuntimeConfig | None = None,
        *,
        scheduler_config: SchedulerConfig | None = None,
        draft_length_policy: DraftLengthPolicy | None = None,
        **fields: Any,
    ) -> None:
        """`fields` are those of RuntimeConfig, and replace those of `config`.

        `num_draft_tokens` is K (default: the engine's max_draft_len). With `adaptive_draft_length` it is the maximum,
        and each step takes the K with the best estimated throughput. `draft_length={1: 7, 16: 5}` is K by the number of
        decoding requests. `draft_length_policy` and `scheduler_config` set the same and more, in the scheduler's terms.

        `overlap_scheduling` submits each step before the results of the one that runs are read, by default on a GPU: in
        float32 on a CPU the same tokens, and time gained where the device is not the CPU that plans.

        K/V pages of target and drafter share one budget: `kv_cache_bytes`, or a fraction of the free memory (by
        default half on a CPU).

        `device` is where an engine of the torch backend runs: "cpu", "cuda", or "auto", the GPU where there is one.
        An engine of several ranks starts a process for each rank but one, and ends them with `close`; threads and
        memory are then those of each rank. `num_threads` None: an even share for each rank of the cores that affinity
        and cgroups leave to this process, and no more than OMP_NUM_THREADS.

        `seed` draws the seeds of requests without one reproducibly; `SamplingParams` says when equal seeds give equal
        texts. More than `max_queue_len` waiting requests are refused; None: any number may wait.

        Raises:
            EngineDirError: the directory is not an engine this version can run.
            CapacityError: the engine does not fit into memory.
            RankError: a rank's process did not start.
            ConfigError: see RuntimeConfig; or K is beyond what the engine can draft, or the device is
                not there.
        """
        config = (RuntimeConfig() if config is None else config).replaced(**fields)
        self.engine = EngineDir.open(engine_dir)
        local = open_local_engine(
            self.engine, config, scheduler_config=scheduler_config, draft_length_policy=draft_length_policy
        )
        with ExitStack() as stack:  # until everything is well
            stack.callback(local.close)
            target = self.engine.manifest.target
            super().__init__(
                local,
                vocab_size=target.vocab_size,
                codec=open_codec(self.engine),
                eos_token_ids=target.eos_token_ids,
                seed=config.seed,
            )
            stack.pop_all()
        self.config, self.page_plan = local.config, local.page_plan


def open_codec(engine: EngineDir) -> TextCodec | None:
    """None for an engine without a tokenizer."""
    if engine.tokenizer_path is None:
        return None
    from dflash_trt.serving.text import TextCodec

    return TextCodec.open(engine.tokenizer_path)
