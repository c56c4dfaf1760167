"""K/V pages as TensorRT holds them: of the network's float type, or FP8 with one scale for K and one for V.

Knows how rows become codes and codes become rows again in plain layers, as `torch/attention` defines it: the division
and the rounding in float32, whatever the network's type is.
"""

from dataclasses import dataclass, replace
from typing import Final, Self

from dflash_trt.backends.tensorrt.layers import ITensor, Layers
from dflash_trt.core.quantization import LayerKvScales

E4M3_MAX: Final = 448.0


@dataclass(frozen=True, slots=True)
class Pages:
    """One layer's state [pages, 2, page_size, kv_heads, D]. With `scales` it is FP8: e4m3(K / k), e4m3(V / v).

    Of latents it is [pages, page_size, row], and all of it K.
    """

    tensor: ITensor
    scales: LayerKvScales | None = None

    def codes(self, layers: Layers) -> ITensor:
        """Contents of the pages: float32 values of FP8 codes, or the tensor itself."""
        if self.scales is None:
            return self.tensor
        # The maximum changes no code. Without it TensorRT-RTX 1.7 moves the dequantization behind the scatter that
        # follows, and its builder crashes.
        return layers.binary("MAX", layers.dequantize_fp8(self.tensor), -E4M3_MAX)

    def rows(self, layers: Layers, kv: tuple[ITensor, ITensor]) -> ITensor:
        """K rows, then V rows [2N, kv_heads, D], as `codes` has them."""
        if self.scales is None:
            return layers.concat(kv, 0)
        scaled = [_divided(layers, *pair) for pair in zip(kv, (self.scales.k, self.scales.v), strict=True)]
        return layers.dequantize_fp8(layers.quantize_fp8(layers.concat(scaled, 0)))

    def key_rows(self, layers: Layers, k: ITensor) -> ITensor:
        """The same of rows of K alone, whatever their axes are."""
        if self.scales is None:
            return k
        return layers.dequantize_fp8(layers.quantize_fp8(_divided(layers, k, self.scales.k)))

    def with_codes(self, layers: Layers, codes: ITensor) -> Self:
        """The same pages with other content; exact, since every code is a value of FP8."""
        return replace(self, tensor=codes if self.scales is None else layers.quantize_fp8(codes))

    def values(self, layers: Layers, codes: ITensor, *, is_value: bool, like: ITensor) -> ITensor:
        """K or V in the type of `like`."""
        if self.scales is None:
            return codes
        scale = self.scales.v if is_value else self.scales.k
        return layers.cast_like(layers.binary("PROD", codes, scale), like)


def _divided(layers: Layers, x: ITensor, scale: float) -> ITensor:
    return layers.binary("DIV", layers.cast(x, "float32"), scale)
