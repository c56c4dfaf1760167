"""Philox4x32-10 in TensorRT integer layers; the definition, with its source, is `philox`.

TensorRT has integer sums, products and quotients but no shifts and no exclusive or. All words are non-negative int64
below 2**32, so a shift is a division, and an exclusive or is the parity of a sum of bits.
"""

from typing import Final

from dflash_trt.backends.tensorrt.layers import ITensor, Layers

_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_HALF: Final = 1 << 16
_WORD: Final = 1 << 32


def uniform(
    layers: Layers,
    seed: ITensor,  # int64 [N], non-negative
    position: ITensor,  # int64 [N], absolute position of the token to be drawn
) -> ITensor:
    """float32 [N] in [0, 1), 24 random bits each."""
    key_high, key_low = _divmod(layers, seed, _WORD)
    zero = layers.binary("PROD", position, 0)
    words = philox(layers, (key_low, key_high), (position, zero, zero, zero))
    top_bits, _ = _divmod(layers, words[0], 1 << 8)
    return layers.binary("PROD", layers.cast(top_bits, "float32"), 2.0**-24)


def philox(
    layers: Layers, key: tuple[ITensor, ITensor], counter: tuple[ITensor, ITensor, ITensor, ITensor]
) -> tuple[ITensor, ITensor, ITensor, ITensor]:
    """Ten rounds over int64 [N] words; returns four."""
    powers = layers.ints([1 << i for i in range(32)], (1, 32), "int64")
    key0, key1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        high0, low0 = _multiply(layers, c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(layers, c2, _MULTIPLIERS[1])
        c0, c1 = _xor(layers, powers, high1, c1, key0), low1
        c2, c3 = _xor(layers, powers, high0, c3, key1), low0
        key0 = _modulo(layers, layers.binary("SUM", key0, _WEYL[0]), _WORD)
        key1 = _modulo(layers, layers.binary("SUM", key1, _WEYL[1]), _WORD)
    return c0, c1, c2, c3


def _xor(layers: Layers, powers: ITensor, *words: ITensor) -> ITensor:
    """Bitwise, of int64 [N] words: bit i of the result is the parity of the bits i."""
    count: ITensor | None = None
    for word in words:
        shifted = layers.binary("DIV", layers.reshape(word, (-1, 1)), powers)  # [N, 32]
        bits = _modulo(layers, shifted, 2)
        count = bits if count is None else layers.binary("SUM", count, bits)
    return layers.reduce("SUM", layers.binary("PROD", _modulo(layers, count, 2), powers), 1, keep_dims=False)


def _multiply(layers: Layers, word: ITensor, factor: int) -> tuple[ITensor, ITensor]:
    """High and low 32 bits of a 32 x 32 bit product, in 16-bit halves as `philox` takes it."""
    high, low = _divmod(layers, word, _HALF)
    factor_high, factor_low = divmod(factor, _HALF)
    carry, low_half = _divmod(layers, layers.binary("PROD", low, factor_low), _HALF)
    middle = layers.binary("SUM", layers.binary("PROD", high, factor_low), carry)
    middle_high, middle_low = _divmod(layers, middle, _HALF)
    cross = layers.binary("SUM", layers.binary("PROD", low, factor_high), middle_low)
    cross_high, cross_low = _divmod(layers, cross, _HALF)
    carries = layers.binary("SUM", middle_high, cross_high)
    return (
        layers.binary("SUM", layers.binary("PROD", high, factor_high), carries),
        layers.binary("SUM", layers.binary("PROD", cross_low, _HALF), low_half),
    )


def _divmod(layers: Layers, x: ITensor, divisor: int) -> tuple[ITensor, ITensor]:
    quotient = layers.binary("DIV", x, divisor)
    return quotient, layers.binary("SUB", x, layers.binary("PROD", quotient, divisor))


def _modulo(layers: Layers, x: ITensor, divisor: int) -> ITensor:
    return _divmod(layers, x, divisor)[1]
