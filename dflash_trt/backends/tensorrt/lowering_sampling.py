"""sample_and_accept in plain TensorRT layers; the definition is `backends/torch/sampling`.

TensorRT sorts at most 3840 elements, so top_k and top_p find their threshold by bisection over the scaled logits
instead of sorting the vocabulary. The threshold is resolved to 104 / 2**32, below a float32's rounding of the
probabilities themselves; tokens whose probabilities differ by less than that are kept or dropped together.

TensorRT does not document NaN in its reductions and TopK. The sum of exponentials is NaN whatever they do, and
so are the log probabilities of a row with NaN or +inf, or of -inf alone; tokens are brought into the vocabulary.
"""

from typing import Final

from dflash_trt.backends.tensorrt.layers import ITensor, Layers
from dflash_trt.backends.tensorrt.lowering_philox import noise_and_test_numbers, noise_of_range
from dflash_trt.backends.tensorrt.lowering_rejection import Candidates, DrawnTests
from dflash_trt.network.ops import Acceptance, StepInputs

_LOWEST: Final = -104.0  # exp of less is 0 in float32
_NUM_BISECTIONS: Final = 32


def sample_and_accept(
    layers: Layers,
    logits: ITensor,  # [R*(K+1), V], at logit_rows
    inputs: StepInputs[ITensor],
    *,
    num_choices: int = 0,
) -> Acceptance[ITensor]:
    """Tokens, log probabilities and what verification decided. `num_choices` is 0 of engines without drafts."""
    num_requests, width = layers.dim(inputs.logit_rows, 0), layers.dim(inputs.logit_rows, 1)
    scores = layers.cast(logits, "float32")
    candidates = Candidates.of(layers, inputs) if num_choices else None
    tests = None if candidates is None else DrawnTests.of(layers, inputs, candidates, num_choices)
    sampled = layers.clamp(sample_rows(layers, scores, inputs, tests), 0, scores.shape[1] - 1)  # int32 [N, 1]
    logprobs = layers.binary("SUB", layers.gather_elements(scores, sampled, 1), _logsumexp(layers, scores))
    tokens = layers.reshape(sampled, (num_requests, width))
    if candidates is None:
        num_accepted = layers.binary("PROD", inputs.num_candidates, 0)  # int32 [R]
    else:
        num_accepted = _count_accepted(layers, tokens, candidates)

    bonus_tokens = layers.gather_elements(tokens, layers.reshape(num_accepted, (-1, 1)), 1)
    starts, ends = (layers.drop_ends(inputs.token_offsets, 0, first=i, last=1 - i) for i in (0, 1))
    num_fed = layers.binary("SUB", layers.binary("SUB", ends, starts), inputs.num_candidates)
    return Acceptance(
        emitted_tokens=tokens,  # an accepted draft equals the token sampled at its row
        emitted_logprobs=layers.reshape(logprobs, (num_requests, width)),
        num_accepted=num_accepted,
        bonus_tokens=layers.reshape(bonus_tokens, (-1,)),
        next_context_lens=layers.binary("SUM", layers.binary("SUM", inputs.context_lens, num_fed), num_accepted),
    )


def sample_rows(
    layers: Layers, scores: ITensor, inputs: StepInputs[ITensor], tests: DrawnTests | None = None
) -> ITensor:
    """One token per row, int32 [N, 1]: argmax where temperature is 0, else a draw from the filtered distribution, or
    the draft that passed its test.
    """
    temperature = _per_row(layers, inputs.temperature, inputs)
    is_random = layers.binary("GREATER", temperature, 0.0)
    divisor = layers.where(is_random, temperature, layers.like(1.0, temperature))
    below_largest = layers.binary("SUB", scores, layers.reduce("MAX", scores, 1))  # 0: no division makes it infinite
    scaled = layers.binary("DIV", below_largest, divisor)
    is_kept = layers.binary("GREATER", _filtered_weights(layers, scaled, inputs), 0.0)
    rows = layers.reshape(inputs.logit_rows, (-1,))
    position = layers.binary("SUM", layers.cast(layers.gather(inputs.positions, rows), "int64"), 1)
    seed = _per_row(layers, inputs.seed, inputs)
    if tests is None:
        noise, is_accepted = noise_of_range(layers, seed, position, scores.shape[1]), None
    else:
        noise, numbers = noise_and_test_numbers(layers, seed, position, scores.shape[1])
        of_rows = {"is_kept": is_kept, "scaled": scaled, "temperature": divisor, "numbers": numbers}
        below_largest, is_accepted = tests.decide(layers, below_largest, **of_rows)
    is_open = layers.binary("OR", is_kept, layers.unary("NOT", is_random))
    noisy = layers.binary("SUM", below_largest, layers.binary("PROD", noise, temperature))  # as they are when greedy
    drawn = layers.argmax(_where_kept(layers, is_open, noisy, float("-inf")), 1)
    return drawn if tests is None else layers.where(is_accepted, tests.drafts, drawn)


def _filtered_weights(layers: Layers, scaled: ITensor, inputs: StepInputs[ITensor]) -> ITensor:
    """Probabilities, zero where top_k, then top_p, then min_p removed the token. `scaled` is at most 0."""
    weights = layers.softmax(scaled, 1)
    cutoff = _cutoff(layers, scaled, weights, inputs)
    weights = _kept(layers, weights, layers.binary("GREATER", scaled, cutoff))
    largest = layers.reduce("MAX", weights, 1)
    min_p = _per_row(layers, inputs.min_p, inputs)
    is_small = layers.binary("LESS", weights, layers.binary("PROD", min_p, largest))
    return _kept(layers, weights, layers.unary("NOT", is_small))


def _cutoff(
    layers: Layers,
    x: ITensor,  # float32 [N, V], scaled logits less the row's largest
    weights: ITensor,  # float32 [N, V], their softmax
    inputs: StepInputs[ITensor],
) -> ITensor:
    """Threshold [N, 1] of x above which top_k, and then top_p, keep a token, and its ties."""
    top_k = layers.cast(_per_row(layers, inputs.top_k, inputs), "float32")
    has_top_k = layers.binary("GREATER", top_k, 0.0)
    num_kept = layers.where(has_top_k, top_k, layers.like(float(x.shape[1]), top_k))
    ones = layers.cast(layers.binary("GREATER", x, _LOWEST), "float32")
    by_count = _bisect(layers, x, ones, num_kept)
    is_kept = layers.binary("GREATER", x, by_count)
    mass = layers.reduce("SUM", _kept(layers, weights, is_kept), 1)
    num_tied = layers.binary("SUB", layers.reduce("SUM", layers.cast(is_kept, "float32"), 1), num_kept)
    least_weight = layers.reduce(
        "MIN", layers.where(is_kept, weights, layers.like(float("inf"), weights)), 1
    )  # of the tied ones, top_k counts only as many as it wants
    excess = layers.binary("PROD", layers.binary("MAX", num_tied, 0.0), least_weight)
    top_p = _per_row(layers, inputs.top_p, inputs)
    wanted = layers.binary("PROD", top_p, layers.binary("SUB", mass, excess))
    by_mass = _bisect(layers, x, weights, wanted)
    has_top_p = layers.binary("LESS", top_p, 1.0)
    return layers.binary("MAX", by_count, layers.where(has_top_p, by_mass, layers.like(_LOWEST, by_mass)))


def _bisect(
    layers: Layers,
    x: ITensor,  # float32 [N, V], at most 0
    weight: ITensor,  # float32 [N, V], non-negative
    limit: ITensor,  # float32 [N, 1], positive
) -> ITensor:
    """The greatest t in [_LOWEST, 0) above which there is at least `limit` weight (else _LOWEST), [N, 1].

    Only the lower end is carried from round to round: with two ends that depend on each other, the time that
    TensorRT-RTX needs to compile doubles with every round.
    """
    low = layers.binary("SUM", layers.binary("PROD", limit, 0.0), _LOWEST)
    step = -_LOWEST
    for _ in range(_NUM_BISECTIONS):
        step /= 2
        above = layers.cast(layers.binary("GREATER", x, layers.binary("SUM", low, step)), "float32")
        total = layers.reduce("SUM", layers.binary("PROD", above, weight), 1)
        is_enough = layers.cast(layers.unary("NOT", layers.binary("LESS", total, limit)), "float32")
        low = layers.binary("SUM", low, layers.binary("PROD", is_enough, step))
    return low


def _count_accepted(layers: Layers, tokens: ITensor, candidates: Candidates) -> ITensor:  # int32 [R, K+1]
    """int32 [R]: the leading candidates that equal the target's own tokens."""
    is_same = layers.binary("EQUAL", candidates.tokens, tokens)
    differs = layers.unary("NOT", layers.binary("AND", candidates.is_given, is_same))
    num_different = layers.cumulative_sum(layers.cast(differs, "int32"), 1)
    is_accepted = layers.binary("LESS", num_different, 1)
    return layers.reduce("SUM", layers.cast(is_accepted, "int32"), 1, keep_dims=False)


def _per_row(layers: Layers, values: ITensor, inputs: StepInputs[ITensor]) -> ITensor:
    """[R] -> [R*(K+1), 1], each request's value at each of its rows."""
    num_requests, width = layers.dim(inputs.logit_rows, 0), layers.dim(inputs.logit_rows, 1)
    return layers.reshape(layers.broadcast(layers.reshape(values, (-1, 1)), (num_requests, width)), (-1, 1))


def _logsumexp(layers: Layers, scores: ITensor) -> ITensor:
    largest = layers.reduce("MAX", scores, 1)
    total = layers.reduce("SUM", layers.unary("EXP", layers.binary("SUB", scores, largest)), 1)
    return layers.binary("SUM", largest, layers.unary("LOG", total))


def _kept(layers: Layers, weights: ITensor, is_kept: ITensor) -> ITensor:
    return _where_kept(layers, is_kept, weights, 0.0)


def _where_kept(layers: Layers, is_kept: ITensor, x: ITensor, other: float) -> ITensor:
    return layers.where(is_kept, x, layers.like(other, x))
