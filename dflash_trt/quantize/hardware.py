"""Which GPUs compute in which format, and what to use instead where one does not."""

from collections.abc import Mapping

from dflash_trt.core.errors import ConfigError, problem, raise_all
from dflash_trt.formats.registry import weight_formats


def require_hardware(formats: Mapping[str, str], capability: tuple[int, int]) -> None:
    """Raise ConfigError if a GPU of this compute capability has no units for a format.

    Weight-only formats run anywhere.
    """
    problems = []
    for name, known in weight_formats().items():
        first = known.first_capability
        if first is not None and name in formats.values() and capability < first:
            expected = f"a GPU of compute capability {first[0]}.{first[1]} or later"
            found = f"{capability[0]}.{capability[1]}"
            problems.append(problem(f"format {name}", expected=expected, found=found, hint=known.instead))
    raise_all(ConfigError, "quantization", problems)
