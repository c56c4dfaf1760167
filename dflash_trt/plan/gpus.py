"""GPUs to plan for, as data: their memory as PyTorch reports it, and the peaks of their datasheets.

`machine_file` reads others, measured by `dflash-trt bench machine`; a CPU is a machine among them.

Peaks are dense: a datasheet that says "with sparsity" gives twice as much. Boards are SXM. Sources, of November 2026:

- memory: "GPU 0 has a total capacity of ... GiB" of PyTorch's out-of-memory errors in public logs; the smallest where
  they differ by some MiB (B200: unslothai/unsloth issue 3411)
- H100, H200: nvidia.com/en-us/data-center/h100 and /h200 (3.35 and 4.8 TB/s, 989 and 1979 TFLOPS, NVLink 900 GB/s)
- B200: nvidia.com/en-us/data-center/hgx, an eighth of HGX B200 (64 TB/s, 18, 36 and 72 PFLOPS, NVLink 14.4 TB/s)
- B300: the same page, an eighth of HGX B300 (64 TB/s, 18, 36 and 105 PFLOPS, NVLink 14.4 TB/s)
- multiprocessors: `multi_processor_count` of the same boards; B300's is the full chip's
  (developer.nvidia.com/blog/inside-nvidia-blackwell-ultra-the-chip-powering-the-ai-factory-era)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from dflash_trt.core.errors import ConfigError

_MAX_GIB = 1 << 20
PLAIN_BITS: Final = 16  # unquantized operands
GPUS_PER_NODE: Final = 8  # of an HGX board, each linked to all others by NVLink


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU, or another machine that computes a rank. Without a bandwidth only its memory is known.

    `peak_flops` are FLOPs per second by the bits of an operand, 32 (float32), 16 (bfloat16), 8 (FP8) or 4 (FP4); a
    width it lacks runs at the next wider one, and so do integers without `has_integer_units`. `read_bytes_per_s` is the
    bandwidth by the size of a working set that is read repeatedly, for a machine whose caches hold a small model.
    `plain_weight_bits` is the width of unquantized weights in memory; None means as stored (a CPU keeps float32 weights
    that bfloat16 holds exactly in 16 bits).
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None
    num_multiprocessors: int = 192  # as many as any
    bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None  # NVLink, in one direction
    peak_flops: Mapping[int, float] = field(default_factory=dict)
    has_integer_units: bool = True  # tensor cores that multiply 8-bit integers as fast as FP8
    read_bytes_per_s: Mapping[int, float] = field(default_factory=dict)
    plain_weight_bits: int | None = None

    def flops_of(self, bits: int) -> float:
        """The peak for operands of `bits` bits."""
        return self.peak_flops[min(width for width in self.peak_flops if width >= bits)]

    @property
    def link_rate(self) -> float:
        """Bytes per second between ranks.

        Raises:
            ConfigError: it has no links, or they were not measured.
        """
        if self.link_bytes_per_s is None:
            hint = "Plan one rank, or write link_bytes_per_s into the machine file."
            raise ConfigError.about(self.name, expected="a bandwidth between ranks", found="none", hint=hint)
        return self.link_bytes_per_s

    def read_rate(self, num_bytes: float) -> float:
        """Bytes per second of a step that reads `num_bytes`; log-linear between two measured sizes."""
        assert self.bytes_per_s is not None
        known = sorted(self.read_bytes_per_s.items())
        if not known or num_bytes >= known[-1][0]:
            return known[-1][1] if known else self.bytes_per_s
        rate = np.interp(math.log(max(num_bytes, 1.0)), [math.log(size) for size, _ in known], [v for _, v in known])
        return float(rate)

    def kept_bytes(self, num_bytes: float, num_elements: float, format_name: str | None) -> float:
        """Bytes in memory of weights that an engine stores in `num_bytes`."""
        if format_name is not None or self.plain_weight_bits is None:
            return num_bytes
        return min(num_bytes, num_elements * self.plain_weight_bits / 8)

    def operand_bits(self, format_name: str | None) -> int:
        """Bits of a GEMM's operands: of the codes if activations are quantized, else of the activations."""
        if format_name is None:
            return PLAIN_BITS
        from dflash_trt.formats.registry import weight_format

        known = weight_format(format_name)
        columns = known.columns_per_block * 2
        codes = next(iter(known.layout((1, columns), (1,)).values()))
        if codes.dtype == "int8":  # on a CPU, too
            has_units = self.has_integer_units
        else:
            has_units = self.capability is not None and self.capability >= (known.first_capability or (0, 0))
        return codes.num_bytes * 8 // columns if has_units and not known.is_weight_only else PLAIN_BITS


def _gib(number: float) -> int:
    return int(number * 2**30)


GPUS: Final[tuple[Gpu, ...]] = (
    Gpu(
        name="h100",
        memory_bytes=_gib(79.1),
        capability=(9, 0),
        num_multiprocessors=132,
        bytes_per_s=3.35e12,
        link_bytes_per_s=450e9,
        peak_flops={16: 989e12, 8: 1979e12},
    ),
    Gpu(
        name="h200",
        memory_bytes=_gib(139.7),
        capability=(9, 0),
        num_multiprocessors=132,
        bytes_per_s=4.8e12,
        link_bytes_per_s=450e9,
        peak_flops={16: 989e12, 8: 1979e12},
    ),
    Gpu(
        name="b200",
        memory_bytes=_gib(178.3),
        capability=(10, 0),
        num_multiprocessors=148,
        bytes_per_s=8e12,
        link_bytes_per_s=900e9,
        peak_flops={16: 2.25e15, 8: 4.5e15, 4: 9e15},
    ),
    Gpu(
        name="b300",
        memory_bytes=_gib(267.6),
        capability=(10, 3),
        num_multiprocessors=160,
        bytes_per_s=8e12,
        link_bytes_per_s=900e9,
        peak_flops={16: 2.25e15, 8: 4.5e15, 4: 13.1e15},
        has_integer_units=False,  # ptxas 13.4 has no `tcgen05.mma` of `.kind::i8` for SM103
    ),
)


def named_like(name: str) -> Gpu | None:
    """The GPU of a driver's name, such as NVIDIA H100 80GB HBM3."""
    return next((gpu for gpu in GPUS if gpu.name in name.lower().split()), None)


def gpu_of(word: str) -> Gpu:
    """The GPU of a name, or a GPU with this many GiB.

    Raises:
        ConfigError: neither a known name nor a size.
    """
    known = {gpu.name: gpu for gpu in GPUS}
    if word.lower() in known:
        return known[word.lower()]
    try:
        gib = float(word)
    except ValueError:
        gib = 0.0
    if not 0 < gib <= _MAX_GIB:
        raise ConfigError.about("--gpu", expected=f"one of {', '.join(known)}, or its memory in GiB", found=word)
    return Gpu(name=f"GPU of {gib:g} GiB", memory_bytes=_gib(gib))
