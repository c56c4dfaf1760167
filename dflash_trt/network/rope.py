"""RoPE frequencies from a RopeSpec, in plain Python: every backend's table has the same numbers.

Definitions: linear (kaiokendev), llama3 (Meta's Llama 3.1 reference), yarn (arXiv 2309.00071), longrope (arXiv
2402.13753) and proportional (Gemma 4), with the same corner cases as `transformers.modeling_rope_utils`, against which
the tests compare.
"""

import math
from dataclasses import dataclass

from dflash_trt.core.model.rope import RopeSpec, Rotary


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeFrequencies:
    """`inv_freq[i]` is the angle per position of pair (i, i + D/2); `amplitude` multiplies cos and sin."""

    inv_freq: tuple[float, ...]
    amplitude: float


def rope_frequencies(rotary: Rotary) -> RopeFrequencies:
    """Frequencies for one head, D/2 of them."""
    rope, head_dim = rotary
    plain = [rope.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if rope.scaling == "none":
        return RopeFrequencies(inv_freq=tuple(plain), amplitude=1.0)
    if rope.scaling == "linear":
        return RopeFrequencies(inv_freq=tuple(f / rope.factor for f in plain), amplitude=1.0)
    if rope.scaling == "longrope":
        divided = tuple(f / divisor for f, divisor in zip(plain, rope.divisors, strict=True))
        return RopeFrequencies(inv_freq=divided, amplitude=rope.attention_factor or 1.0)
    if rope.scaling == "proportional":
        num_rotated = int(rope.rotated_fraction * head_dim // 2)
        turned = [f / rope.factor if i < num_rotated else 0.0 for i, f in enumerate(plain)]
        return RopeFrequencies(inv_freq=tuple(turned), amplitude=1.0)
    original = rope.original_max_position_embeddings
    assert original is not None  # proven by the spec
    if rope.scaling == "llama3":
        return RopeFrequencies(inv_freq=tuple(_llama3(f, rope, original) for f in plain), amplitude=1.0)
    return RopeFrequencies(inv_freq=_yarn(plain, rope, head_dim, original), amplitude=_yarn_amplitude(rope))


def _llama3(frequency: float, rope: RopeSpec, original: int) -> float:
    """Long wavelengths are slowed by `factor`, short ones kept, those between blended."""
    low, high = rope.low_freq_factor, rope.high_freq_factor
    assert low is not None and high is not None  # proven when the config was read
    wavelength = 2 * math.pi / frequency
    if wavelength > original / low:
        return frequency / rope.factor
    if wavelength < original / high or low == high:  # nothing lies between (Llama 4)
        return frequency
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


def _yarn(plain: list[float], rope: RopeSpec, head_dim: int, original: int) -> tuple[float, ...]:
    """Blend of interpolated (slow) and kept (fast) frequencies along a ramp between two rotation counts."""

    def correction_dim(num_rotations: float) -> float:
        return head_dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncates_correction_range:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001  # the ramp must not be a division by zero
    blended = []
    for i, frequency in enumerate(plain):
        interpolation = min(max((i - low) / width, 0.0), 1.0)
        blended.append(frequency / rope.factor * interpolation + frequency * (1 - interpolation))
    return tuple(blended)


def _yarn_amplitude(rope: RopeSpec) -> float:
    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)
