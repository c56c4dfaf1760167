"""The part of a build that knows formats: the plan, its calibration, and the quantized weights.

`build` calls it with checked arguments; `calibration` runs the network.
"""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Mapping as AbcMapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from dflash_trt.checkpoint.pair import CheckpointPair
from dflash_trt.checkpoint.specs import PairSpecs
from dflash_trt.compile.calibration import Advance, calibrate_pair
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.dtype import FloatDType, torch_dtype
from dflash_trt.core.errors import ConfigError, raise_all
from dflash_trt.core.mapping import Mapping as RankMapping
from dflash_trt.core.model import draft as models
from dflash_trt.core.quantization import Calibration, QuantizationConfig, QuantizationSpec
from dflash_trt.engine_dir.provenance import ComponentBytes
from dflash_trt.quantize.calibrate import cache_key, modelopt_version, read_cached, write_cached
from dflash_trt.quantize.calibrate_prompts import calibration_prompts
from dflash_trt.quantize.hardware import require_hardware
from dflash_trt.quantize.plan import QuantizationPlan, make_plan, sharding_problems
from dflash_trt.quantize.stream import engine_stream, whole_weights

_NARROW: Final[tuple[FloatDType, ...]] = ("bfloat16", "float16")
_ROWS_AT_ONCE: Final = 1024  # of a matrix that is compared

PlanCallback = Callable[[QuantizationPlan], None]


def local_capability() -> tuple[int, int] | None:
    """Compute capability of this machine's GPU; None without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def plan_quantization(config: BuildConfig, pair: PairSpecs, *, capability: tuple[int, int] | None) -> QuantizationPlan:
    """Plan each linear layer's format; checks shapes, checkpoint and the GPU's capability, if any.

    Raises:
        ConfigError: impossible choices; all of them in one error.
    """
    plan = make_plan(config.quantization or QuantizationConfig(), pair.target, pair.draft, pair.quantization)
    raise_all(ConfigError, "tensor parallelism", sharding_problems(plan, config.mapping))
    if capability is not None:
        require_hardware(plan.formats, capability)
    return plan


def calibrate(
    config: BuildConfig,
    pair: CheckpointPair,
    plan: QuantizationPlan,
    *,
    base_dir: Path,
    template_options: AbcMapping[str, Any],
    input_hashes: Sequence[str],
    dtype: torch.dtype,
    advance: Advance,
) -> tuple[Calibration, str | None]:
    """The ranges the plan needs, and a note; from the cache if the same inputs were calibrated before.

    Raises:
        ConfigError: ModelOpt is missing, prompts are wrong, or a range is not finite and positive.
    """
    if not plan.needs_calibration:
        return Calibration(), None
    options = (config.quantization or QuantizationConfig()).calibration
    tokenizer_dir = pair.tokenizer_files[0].parent if pair.tokenizer_files else None
    prompts = calibration_prompts(
        options,
        base_dir=base_dir,
        tokenizer_dir=tokenizer_dir,
        vocab_size=pair.target.vocab_size,
        template_options=template_options,
    )
    key = cache_key(
        {
            "inputs": sorted(input_hashes),
            "drafter_overrides": config.drafter_overrides,
            "draft_window": config.draft_window,
            "dtype": str(dtype),
            "formats": plan.formats,
            "has_fp8_kv": [plan.has_fp8_target_kv, plan.has_fp8_draft_kv],
            "prompts": prompts,
            "chunk_tokens": options.chunk_tokens,
            "modelopt": modelopt_version() if any(x.needs_activations for x in plan.linears) else None,
        }
    )
    calibration = read_cached(key)
    num_tokens = sum(map(len, prompts))
    source = f"calibrated on {len(prompts)} prompts, {num_tokens} tokens"
    if calibration is not None:
        return calibration, f"{source}, by an earlier build"
    calibration = calibrate_pair(pair, plan, prompts, dtype=dtype, chunk_tokens=options.chunk_tokens, advance=advance)
    write_cached(key, calibration)
    return calibration, source


def engine_quantization(plan: QuantizationPlan, calibration: Calibration) -> QuantizationSpec | None:
    """Quantization for the manifest; None for an unquantized engine."""
    spec = plan.spec(calibration.target_kv, calibration.draft_kv)
    return None if spec.is_empty else spec


def engine_weights(
    pair: CheckpointPair, plan: QuantizationPlan, calibration: Calibration, *, dtype: torch.dtype, mapping: RankMapping
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one rank, in the order of its file, one weight in memory at a time."""
    tensors = pair.iter_weights(dtype=dtype, mapping=mapping, whole_names=whole_weights(plan))
    return engine_stream(tensors, plan, calibration, dtype=dtype, mapping=mapping)


def component_sizes(
    plan: QuantizationPlan, config: BuildConfig, weights_dtype: FloatDType | None
) -> tuple[ComponentBytes, ...]:
    """Bytes per component before and after."""
    return tuple(ComponentBytes(**asdict(size)) for size in plan.sizes(config.dtype, weights_dtype))


def exact_weights_dtype(pair: CheckpointPair) -> FloatDType | None:
    """The 16-bit dtype that holds every unquantized matrix exactly; None if neither does. Reads all of them."""
    table, found = models.engine_weights(pair.target, pair.draft, pair.quantization), [*_NARROW]
    for name, tensor in pair.iter_weights(dtype=torch.float32, mapping=RankMapping()):
        is_matrix = name in table and table[name].matrix_dtype(name, "float32", "bfloat16") == "bfloat16"
        if not is_matrix or name in pair.quantization.linears:
            continue
        found = [dtype for dtype in found if _holds(dtype, tensor)]
        if not found:
            return None
    return found[0]


def _holds(dtype: FloatDType, tensor: Tensor) -> bool:
    narrow = torch_dtype(dtype)
    return all(torch.equal(part.to(narrow).float(), part) for part in torch.split(tensor, _ROWS_AT_ONCE))
