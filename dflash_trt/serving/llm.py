"""The Python API: open an engine directory, generate text.

with LLM("engine") as llm:
    print(llm.generate("def fibonacci(n):").text)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_trt.core.chat_template_options import ChatTemplateOptions
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.other_engines import checks_keywords, hint_for
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.serving.generator import Generator
from dflash_trt.serving.opening import checked_settings, open_engine
from dflash_trt.serving.request_reader import RequestReader

if TYPE_CHECKING:
    from dflash_trt.scheduler.config import Policies, SchedulerConfig
    from dflash_trt.scheduler.draft_length import DraftLengthPolicy
    from dflash_trt.serving.text import TextCodec


def _check_engine_dir(args: Sequence[object], fields: Mapping[str, object]) -> None:
    """`LLM(model=...)` gets an answer, instead of a TypeError."""
    if not args and "engine_dir" not in fields:
        hints = (hint for name in fields if "engine_dir" in (hint := hint_for(name, ("engine_dir",))))
        found, hint = ", ".join(fields) or "none", next(hints, "Pass it first: LLM('engine').")
        raise ConfigError.about("LLM", expected="an engine_dir", found=found, hint=hint)


@checks_keywords(_check_engine_dir)
class LLM(Generator):
    """An engine directory, loaded and serving. Close it, or use it as a context manager.

    `config` is what it was opened with, resolved; `page_plan` says what the K/V budget came to; None
    for an engine that TensorRT-LLM runs, whose pages are its own.
    """

    def __init__(
        self,
        engine_dir: str | Path,
        config: RuntimeConfig | None = None,
        *,
        scheduler_config: SchedulerConfig | None = None,
        draft_length_policy: DraftLengthPolicy | None = None,
        before_load: Callable[[RequestReader], object] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        **fields: Any,
    ) -> None:
        """`fields` are fields of RuntimeConfig and replace those in `config`.

        `draft_length` is K, or K by the number of decoding requests, as in {1: 7, 16: 5}; by default such
        a table, which begins with the engine's max_draft_len (`core.draft_lengths`). With `adaptive_draft_length` it is
        the maximum, and each step takes the K with the best estimated throughput. `draft_length_policy` and
        `scheduler_config` set the same and more, in the scheduler's terms. `ngram` adds drafts from a request's text.

        `overlap_scheduling` submits each step before the results of the running step are read (default: on a GPU). In
        float32 on a CPU the tokens are the same; it saves time where the device is not the CPU that plans.

        K/V pages of target and drafter share one budget: `kv_cache_bytes`, or a fraction of the free memory (by default
        half on a CPU).

        `device` is where an engine of the torch backend runs: "cpu", "cuda", or "auto", a GPU if there is one. An
        engine of several ranks starts a process for each rank but one, and ends them with `close`; threads and memory
        then count per rank. `num_threads` defaults to an even share per rank of the cores that affinity and cgroups
        leave to this process, and at most OMP_NUM_THREADS.

        `seed` draws the seeds of requests without one reproducibly; `SamplingParams` says when equal seeds give equal
        texts. `max_queue_len` limits the waiting requests, and further ones are refused; None means no limit.

        `before_load` is called when settings, device and tokenizer have been checked and before any weights are read;
        an exception of it ends the opening. `on_progress` is called with the bytes of weights read so far and the total
        (of rank 0), in a thread of the engine.

        Raises:
            EngineDirError: the directory is not an engine this version can run, or TensorRT-LLM is missing, which runs
                engines of backend tensorrt_llm.
            CapacityError: the engine does not fit into memory.
            RankError: a rank's process did not start.
            ConfigError: see RuntimeConfig; or K is beyond what the engine can draft, or the device is
                not there.
        """
        config = (RuntimeConfig() if config is None else config).replaced(**fields)
        self.engine = EngineDir.open(engine_dir)
        policies: Policies = {"scheduler_config": scheduler_config, "draft_length_policy": draft_length_policy}
        config = checked_settings(self.engine, config, **policies)
        reader = open_request_reader(self.engine)
        if before_load is not None:
            before_load(reader)
        engine = self.engine if on_progress is None else self.engine.reporting(on_progress)
        opened = open_engine(engine, config, **policies)
        with ExitStack() as stack:  # until everything is well
            stack.callback(opened.close)
            eos_token_ids = self.engine.manifest.target.eos_token_ids
            super().__init__(opened, reader, eos_token_ids=eos_token_ids, seed=config.seed)
            stack.pop_all()
        self.config, self.page_plan = opened.config, opened.page_plan

    def __repr__(self) -> str:
        target, draft = self.engine.manifest.target, self.engine.manifest.draft
        drafter = "no drafter" if draft is None else f"{draft.algorithm} drafter"
        return f"<LLM {self.engine.path}: {target.family}, {drafter}, on {self.config.device}>"

    @property
    def tokenizer(self) -> Any:
        """The engine's `tokenizers.Tokenizer`; None for an engine without one."""
        return None if self.codec is None else self.codec.backend

    @property
    def chat_template_options(self) -> ChatTemplateOptions:
        """Options of the chat template that the engine was built with; a request's own replace them by name."""
        return self.engine.manifest.chat_template_options


def open_request_reader(engine: EngineDir) -> RequestReader:
    """The reader of an engine's requests, which knows the maximum length of their prompts."""
    manifest = engine.manifest
    max_tokens = manifest.build_config.max_seq_len - 1
    return RequestReader(open_codec(engine), vocab_size=manifest.target.vocab_size, max_tokens=max_tokens)


def open_codec(engine: EngineDir) -> TextCodec | None:
    """None for an engine without a tokenizer."""
    if engine.tokenizer_path is None:
        return None
    from dflash_trt.serving.text import TextCodec

    return TextCodec.open(engine.tokenizer_path, chat_template_options=engine.manifest.chat_template_options)
