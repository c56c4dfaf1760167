"""Settings of an engine that TensorRT-LLM runs: its arguments, and refusals of unsupported settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from dflash_trt.core.draft_lengths import lengths_text
from dflash_trt.core.errors import ConfigError, problem, raise_all
from dflash_trt.core.runtime_config import NODES, PREFIX_TIERS, RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.executor.opening import check_drafting, max_draft_len

# Settings that are TensorRT-LLM's own business.
_REFUSED: Final = (
    "adaptive_draft_length",
    "ngram",
    "draft_window",
    "num_state_snapshots",
    *PREFIX_TIERS,
    *NODES,
    "deterministic",
    "num_threads",
    "plugin_library",
)
_OF_ARGUMENTS: Final = (  # that a server which runs already has chosen
    "use_drafter",
    "draft_length",
    "overlap_scheduling",
    "kv_cache_bytes",
    "kv_cache_free_memory_fraction",
)


def resolved_settings(engine: EngineDir, config: RuntimeConfig, *, is_running: bool) -> RuntimeConfig:
    """Resolve `config` for TensorRT-LLM; `is_running`: a server has the engine open already.

    Raises:
        ConfigError: lists every setting that TensorRT-LLM does not have, or that is decided already.
    """
    raise_all(ConfigError, "backend tensorrt_llm", list(_problems(config, is_running=is_running)))
    check_drafting(engine, config)
    resolved: dict[str, object] = {"device": "cuda", "enable_prefix_caching": False}
    if config.use_drafter:
        resolved["draft_length"] = config.draft_length or {1: max_draft_len(engine)}
    return config.model_copy(update=resolved)


def llm_args(engine: EngineDir, config: RuntimeConfig) -> dict[str, Any]:
    """The engine's arguments, with what a resolved `config` says instead; paths are absolute."""
    record = engine.manifest.tensorrt_llm
    assert record is not None
    args = record.resolved_args(engine.path)
    drafting: dict[str, Any] | None = args.pop("speculative_config", None)
    if drafting is not None and config.max_draft_tokens:
        args["speculative_config"] = drafting | {"max_draft_len": config.max_draft_tokens}
    if config.overlap_scheduling is not None:
        args["disable_overlap_scheduler"] = not config.overlap_scheduling
    kv_cache: dict[str, Any] = dict(args["kv_cache_config"])
    if config.kv_cache_free_memory_fraction is not None:
        kv_cache["free_gpu_memory_fraction"] = config.kv_cache_free_memory_fraction
    if config.kv_cache_bytes is not None:
        kv_cache["max_gpu_total_bytes"] = config.kv_cache_bytes
    return args | {"kv_cache_config": kv_cache}


def _problems(config: RuntimeConfig, *, is_running: bool) -> Iterator[str]:
    fields = type(config).model_fields
    hint = "Leave it out, or use an engine of backend torch or tensorrt."
    lengths = lengths_text(config.draft_length or {})
    for name in _REFUSED:
        value = getattr(config, name)
        if value != fields[name].default:
            yield problem(name, expected="nothing", found=repr(value), hint=hint)
    if len(config.draft_length or {}) > 1:
        yield problem("draft_length", expected="one K", found=lengths, hint=hint)
    if config.device == "cpu":
        yield problem("device", expected="a GPU", found="cpu", hint=hint)
    for name in _OF_ARGUMENTS:
        value = getattr(config, name)
        if is_running and value != fields[name].default:
            started = "Start trtllm-serve with it, or unset DFLASH_TRT_TRTLLM_URL."
            found = lengths if name == "draft_length" else repr(value)
            yield problem(name, expected="nothing, for the server is started", found=found, hint=started)
