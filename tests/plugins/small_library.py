"""Kernels of the library that tests build: those of the lists given, and those of the cases of experts.

python -m tests.plugins.small_library OUT --cache DIR [lists of `python -m plugins.aot`]
"""

import sys
from dataclasses import dataclass

from plugins.aot import command_line
from plugins.aot.variant import KernelVariant, unique_variants
from plugins.aot.variants import LibrarySpec
from tests.plugins.expert_cases import CASES


@dataclass(frozen=True, kw_only=True)
class SmallLibrarySpec(LibrarySpec):
    def variants(self) -> tuple[KernelVariant, ...]:
        experts = [variant for case in CASES.values() for variant in case.kernels().variants("float32")]
        return unique_variants([*super().variants(), *experts])


if __name__ == "__main__":
    command_line.LibrarySpec = SmallLibrarySpec  # type: ignore[misc]
    sys.exit(command_line.main())
