"""Kernels of the library that tests build: those of the lists given, of chunks, and of cases of experts, delta nets
and latents.

python -m tests.plugins.small_library OUT --cache DIR [lists of `python -m plugins.aot`]
"""

import sys
from dataclasses import dataclass

import torch

from plugins.aot import command_line
from plugins.aot.attention_variants import attention_variants
from plugins.aot.gated_delta_variants import DeltaKernels
from plugins.aot.variant import KernelVariant, unique_variants
from plugins.aot.variants import FLOAT32_TILES, FLOAT_TYPES, LibrarySpec
from tests.plugins import fixed_cases
from tests.plugins.delta_cases import state_spec
from tests.plugins.expert_cases import CASES
from tests.plugins.latent_cases import CASES as LATENT_CASES
from tests.plugins.node_inputs import CHUNK, StepCase

MAX_REQUESTS = 16


@dataclass(frozen=True, kw_only=True)
class SmallLibrarySpec(LibrarySpec):
    def variants(self) -> tuple[KernelVariant, ...]:
        experts = [variant for case in CASES.values() for variant in case.kernels().variants("float32")]
        kernels = DeltaKernels.of(state_spec(), max_requests=MAX_REQUESTS)
        dtypes = [dtype for dtype in FLOAT_TYPES if dtype in self.dtypes]
        deltas = [variant for dtype in dtypes for variant in kernels.variants(dtype)]
        latents = [
            variant
            for dtype in dtypes
            for case in LATENT_CASES.values()
            for variant in case.kernels(dtype).variants(dtype)
        ]
        chunks = attention_variants(
            dtype=torch.float32,
            page_dtype=torch.float32,
            head_dim=StepCase.head_dim,
            has_block=False,
            max_requests=MAX_REQUESTS,
            tiles=FLOAT32_TILES,
            chunk=CHUNK,
        )
        fixed = fixed_cases.variants(MAX_REQUESTS)
        listed = [variant for variant in super().variants() if not _is_rare(variant.name)]
        return unique_variants([*listed, *experts, *deltas, *chunks, *latents, *fixed])


def _is_rare(name: str) -> bool:
    """Of layers that no test has: with a soft cap, over FP8 pages or in a chain."""
    return "softcap" in name and ("float8" in name or "chain" in name)


if __name__ == "__main__":
    command_line.LibrarySpec = SmallLibrarySpec  # type: ignore[misc]
    sys.exit(command_line.main())
