"""Single changes of a build configuration with which an engine fits that does not."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from dflash_trt.checkpoint.specs import PairSpecs
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import DFlashError
from dflash_trt.core.quantization import QuantizationConfig
from dflash_trt.plan.gpus import Gpu
from dflash_trt.plan.planning import EnginePlan, plan_engine

_RANKS: Final = (2, 4, 8, 16)
_FORMATS: Final = ("fp8", "nvfp4", "nvfp4_w4a16")  # the closest to the unquantized model first
_MIN_STEP_TOKENS: Final = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """`change` are options of `build`."""

    change: str
    plan: EnginePlan


def remedies(config: BuildConfig, pair: PairSpecs, gpu: Gpu) -> Iterator[Remedy]:
    """The smallest change of each kind: ranks, format, pages, context, and the tokens of a step."""
    for kind in (_more_ranks, _formats, _fp8_pages, _fewer_step_tokens):
        for change, changed in kind(config):
            plan = _fitting(changed, pair, gpu)
            if plan is not None:
                yield Remedy(change=change, plan=plan)
                break
    yield from _shorter_context(config, pair, gpu)


def _fitting(config: BuildConfig, pair: PairSpecs, gpu: Gpu) -> EnginePlan | None:
    """The plan, if there can be such an engine and it fits."""
    try:
        plan = plan_engine(config, pair, gpu)
    except DFlashError:
        return None
    return plan if plan.fits else None


def _more_ranks(config: BuildConfig) -> Iterable[tuple[str, BuildConfig]]:
    """With the experts divided as they are, and with whole experts on each rank."""
    for tp_size in _RANKS:
        for ep_size in dict.fromkeys((config.ep_size, tp_size)):
            if tp_size > config.tp_size and tp_size % ep_size == 0:
                experts = f" --ep-size {ep_size}" if ep_size > 1 else ""
                changed = {"tp_size": tp_size, "ep_size": ep_size}
                yield f"--tp-size {tp_size}{experts}", config.model_copy(update=changed)


def _formats(config: BuildConfig) -> Iterable[tuple[str, BuildConfig]]:
    quantization = config.quantization or QuantizationConfig()
    if quantization.target == "none":
        for name in _FORMATS:
            changed = quantization.model_copy(update={"target": name})
            yield f"--quantization {name}", config.model_copy(update={"quantization": changed})


def _fp8_pages(config: BuildConfig) -> Iterable[tuple[str, BuildConfig]]:
    quantization = config.quantization or QuantizationConfig()
    if quantization.kv_cache == "none":
        changed = quantization.model_copy(update={"kv_cache": "fp8"})
        yield "--kv-cache fp8", config.model_copy(update={"quantization": changed})


def _fewer_step_tokens(config: BuildConfig) -> Iterable[tuple[str, BuildConfig]]:
    num_tokens = config.max_num_tokens // 2
    while num_tokens >= max(config.max_batch_size, _MIN_STEP_TOKENS):
        yield f"--max-num-tokens {num_tokens}", config.model_copy(update={"max_num_tokens": num_tokens})
        num_tokens //= 2


def _shorter_context(config: BuildConfig, pair: PairSpecs, gpu: Gpu) -> Iterator[Remedy]:
    """The longest in whole pages, by bisection."""
    fewest, too_many = 0, -(-(config.max_seq_len or pair.target.max_position_embeddings) // config.page_size)
    best = None
    while too_many - fewest > 1:
        num_pages = (fewest + too_many) // 2
        length = max(2, num_pages * config.page_size)
        plan = _fitting(config.model_copy(update={"max_seq_len": length}), pair, gpu)
        if plan is None:
            too_many = num_pages
        else:
            fewest, best = num_pages, Remedy(change=f"--max-seq-len {length}", plan=plan)
    if best is not None:
        yield best
