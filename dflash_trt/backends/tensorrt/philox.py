"""Philox4x32-10 and its Gumbel noise in TensorRT layers; `backends/torch/philox` defines them.

TensorRT has integer sums, products and quotients but no shifts and no exclusive or. All words are non-negative int64
below 2**32, so a shift is a division, and an exclusive or is a look-up of each pair of bytes. TensorRT does not say how
exact its logarithm is near 1: a series is used there, as in the kernels.
"""

from typing import Final

from dflash_trt.backends.tensorrt.layers import ITensor, Layers
from dflash_trt.backends.torch.philox import LARGEST, MULTIPLIERS, WEYL

_BYTE: Final = 1 << 8
_HALF: Final = 1 << 16
_WORD: Final = 1 << 32


def noise_of_row_tokens(
    layers: Layers,
    seed: ITensor,
    position: ITensor,
    tokens: ITensor,  # int64 [1 or N, M]
    stream: ITensor,  # int64 [N]
) -> ITensor:
    """float32 [N, M], of each row's own tokens."""
    quads, word = _divmod(layers, tokens, 4)
    numbers = layers.ints([0, 1, 2, 3], (1, 1, 4), "int64")
    by_token = layers.reshape(word, (-1, tokens.shape[1], 1))
    is_word = layers.cast(layers.binary("EQUAL", by_token, numbers), "int64")
    words = layers.binary("PROD", _words(layers, seed, position, quads, stream), is_word)
    return _gumbel(layers, _uniform(layers, layers.reduce("SUM", words, 2, keep_dims=False)))


def philox(layers: Layers, key: ITensor, even: ITensor, odd: ITensor) -> ITensor:
    """Ten rounds over int64 words below 2**32.

    The key is [N, 1, 2]. The words 0 and 2 of the counters are `even` [N, Q, 2], 1 and 3 are `odd`; shapes broadcast.
    Returns words 0, 1, 2, 3, [N, Q, 4]. Both halves of a round are one row of layers: a builder's time is in their
    number.
    """
    powers = layers.ints([_BYTE**i for i in range(4)], (1, 1, 1, 4), "int64")
    table = layers.ints([a ^ b for a in range(_BYTE) for b in range(_BYTE)], (_BYTE * _BYTE,), "int64")
    swapped = layers.ints([1, 0], (2,))
    for i in range(10):
        high, low = (layers.gather(half, swapped, 2) for half in _multiply(layers, even))
        step = layers.ints([i * word % _WORD for word in WEYL], (1, 1, 2), "int64")
        round_key = _modulo(layers, layers.binary("SUM", key, step), _WORD)
        even, odd = _xor(layers, table, powers, high, odd, round_key), low
    pairs = [layers.reshape(words, (-1, words.shape[1], 2, 1)) for words in (even, odd)]
    return layers.reshape(layers.concat(pairs, 3), (-1, even.shape[1], 4))


def _words(
    layers: Layers,
    seed: ITensor,
    position: ITensor,
    quads: ITensor,  # int64 [1 or N, Q]
    stream: ITensor,  # int64 [N]
) -> ITensor:
    """int64 [N, Q, 4]."""
    low_and_high = layers.ints([1, _WORD], (1, 2), "int64")
    key = _modulo(layers, layers.binary("DIV", layers.reshape(seed, (-1, 1)), low_and_high), _WORD)
    is_first = layers.ints([1, 0], (1, 1, 2), "int64")  # word 3 of a counter is 0
    even = layers.binary("PROD", layers.reshape(position, (-1, 1, 1)), is_first)
    is_second = layers.ints([0, 1], (1, 1, 2), "int64")
    by_row = layers.reshape(stream, (-1, 1, 1))
    even = layers.binary("SUM", even, layers.binary("PROD", by_row, is_second))
    odd = layers.binary("PROD", layers.reshape(quads, (-1, quads.shape[1], 1)), is_first)
    return philox(layers, layers.reshape(key, (-1, 1, 2)), even, odd)


def _uniform(layers: Layers, words: ITensor) -> ITensor:
    v = layers.binary("PROD", layers.binary("SUM", layers.cast(words, "float32"), 0.5), 2.0**-32)
    return layers.binary("MIN", v, LARGEST)


def _gumbel(layers: Layers, v: ITensor) -> ITensor:
    series = layers.binary("SUM", layers.binary("PROD", v, 0.2), 0.25)
    for coefficient in (1 / 3, 1 / 2, 1.0):
        series = layers.binary("SUM", layers.binary("PROD", v, series), coefficient)
    rest = layers.binary("SUM", layers.unary("NEG", v), 1.0)
    exponential = layers.where(
        layers.binary("LESS", v, 1 / 32),
        layers.binary("PROD", v, series),
        layers.unary("NEG", layers.unary("LOG", rest)),
    )
    return layers.unary("NEG", layers.unary("LOG", exponential))


def _xor(layers: Layers, table: ITensor, powers: ITensor, *words: ITensor) -> ITensor:
    """Bitwise, of int64 [N, Q, 2], byte by byte.

    The cumulative sum stands between the rounds: TensorRT-RTX fuses a plain sum into the next round, and compiles the
    network with ten of them six times as long (11.4 s for 1.9 s).
    """
    first, *others = (_bytes(layers, word, powers) for word in words)
    for other in others:
        pair = layers.binary("SUM", layers.binary("PROD", first, _BYTE), other)
        first = layers.gather(table, layers.cast(pair, "int32"))
    total = layers.cumulative_sum(layers.binary("PROD", first, powers), 3)
    return layers.reshape(layers.slice(total, 3, 3, 1), (-1, first.shape[1], 2))


def _bytes(layers: Layers, words: ITensor, powers: ITensor) -> ITensor:  # [N, Q, 2] -> [N, Q, 2, 4]
    shifted = layers.binary("DIV", layers.reshape(words, (-1, words.shape[1], 2, 1)), powers)
    return _modulo(layers, shifted, _BYTE)


def _multiply(layers: Layers, words: ITensor) -> tuple[ITensor, ITensor]:
    """High and low 32 bits of the products with Philox's two factors, half by half: int64 is too narrow."""
    halves = zip(*(divmod(factor, _HALF) for factor in MULTIPLIERS), strict=True)
    high, low = (layers.ints(list(half), (1, 1, 2), "int64") for half in halves)
    upper, lower = _divmod(layers, layers.binary("PROD", words, high), _HALF)
    rest = layers.binary("SUM", layers.binary("PROD", lower, _HALF), layers.binary("PROD", words, low))
    carry, rest = _divmod(layers, rest, _WORD)
    return layers.binary("SUM", upper, carry), rest


def _divmod(layers: Layers, x: ITensor, divisor: int) -> tuple[ITensor, ITensor]:
    quotient = layers.binary("DIV", x, divisor)
    return quotient, layers.binary("SUB", x, layers.binary("PROD", quotient, divisor))


def _modulo(layers: Layers, x: ITensor, divisor: int) -> ITensor:
    return _divmod(layers, x, divisor)[1]
