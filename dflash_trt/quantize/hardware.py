"""Which GPUs compute in which format, and what to use instead where one does not."""

from collections.abc import Mapping

from dflash_trt.core.errors import ConfigError, problem, raise_all
from dflash_trt.core.quantization import WeightFormat

# CUDA compute capabilities: FP8 tensor cores since Ada and Hopper, FP4 since Blackwell.
_FIRST_CAPABILITY: dict[WeightFormat, tuple[int, int]] = {"fp8": (8, 9), "nvfp4": (10, 0)}
_INSTEAD: dict[WeightFormat, str] = {
    "fp8": "Use `none`, or `nvfp4_w4a16`, whose weights are unpacked before the GEMM.",
    "nvfp4": "Use `fp8` for speed, or `nvfp4_w4a16` for 4-bit weights with plain activations.",
}


def require_hardware(formats: Mapping[str, WeightFormat], capability: tuple[int, int]) -> None:
    """Raises ConfigError when a GPU of this compute capability has no units for a format; weight-only runs anywhere."""
    problems = []
    for weight_format, first in _FIRST_CAPABILITY.items():
        if weight_format in formats.values() and capability < first:
            expected = f"a GPU of compute capability {first[0]}.{first[1]} or later"
            found = f"{capability[0]}.{capability[1]}"
            problems.append(
                problem(f"format {weight_format}", expected=expected, found=found, mend=_INSTEAD[weight_format])
            )
    raise_all(ConfigError, "quantization", problems)
