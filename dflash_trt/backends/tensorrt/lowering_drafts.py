"""Draws of drafts in plain TensorRT layers; the definitions are in `backends/torch`, `sampling` and `rejection`.

Both ways of drawing are one graph, whose rows take the one of their request: all tokens with the noise of the target,
or the C most likely with noise of their own. Whatever the stream, the noise is made once.
"""

from dataclasses import dataclass
from typing import Self

from dflash_trt.backends.tensorrt.layers import Dim, ITensor, Layers
from dflash_trt.backends.tensorrt.lowering_philox import noise_of_range, noise_of_tokens
from dflash_trt.core.checked_values import FLOAT32_TINY
from dflash_trt.network.ops import StepInputs
from dflash_trt.network.proposal import Proposal


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftRows:
    """What the rows of drafts, R*K of them, are drawn with."""

    seed: ITensor  # int64 [R*K, 1]
    stream: ITensor  # int64 [R*K, 1]
    temperature: ITensor  # float32 [R*K, 1]
    position: ITensor  # int64 [R*K]: slot j of a block, from 1 on, is at j behind the bonus token

    @classmethod
    def of(
        cls,
        layers: Layers,
        inputs: StepInputs[ITensor],
        starts: ITensor,  # int32 [R], positions of the bonus tokens
        num_slots: Dim,  # K
    ) -> Self:
        num_requests = layers.dim(inputs.temperature, 0)

        def per_row(values: ITensor) -> ITensor:  # [R] -> [R*K, 1]
            repeated = layers.broadcast(layers.reshape(values, (-1, 1)), (num_requests, num_slots))
            return layers.reshape(repeated, (-1, 1))

        slots = layers.binary("SUM", layers.reshape(layers.arange(num_slots), (1, -1)), 1)
        positions = layers.binary("SUM", layers.reshape(starts, (-1, 1)), slots)
        return cls(
            seed=per_row(inputs.seed),
            stream=per_row(layers.cast(inputs.draft_stream, "int64")),
            temperature=per_row(inputs.temperature),
            position=layers.cast(layers.reshape(positions, (-1,)), "int64"),
        )


def draft_tokens(
    layers: Layers,
    logits: ITensor,  # [R*K, V]
    next_context_lens: ITensor,  # int32 [R]
    draft_to_target: ITensor | None,  # int64 [V]
    inputs: StepInputs[ITensor],
    num_slots: Dim,  # K
    *,
    num_choices: int,
) -> Proposal[ITensor]:
    """See `Ops.draft_tokens`."""
    rows = DraftRows.of(layers, inputs, next_context_lens, num_slots)
    if draft_to_target is None:
        noise = noise_of_range(layers, rows.seed, rows.position, logits.shape[1], rows.stream)
    else:
        noise = noise_of_tokens(layers, rows.seed, rows.position, draft_to_target, rows.stream)
    noise = layers.binary("PROD", noise, rows.temperature)
    scores = without_nan(layers, logits)
    likeliest = layers.argmax(layers.binary("SUM", scores, noise), 1)
    best, choices = layers.top_k(scores, num_choices, 1)
    noisy = layers.binary("SUM", best, layers.gather_elements(noise, choices, 1))
    drawn = layers.gather_elements(choices, layers.argmax(noisy, 1), 1)
    tokens = layers.where(layers.binary("GREATER", rows.stream, 0), drawn, likeliest)
    if draft_to_target is not None:
        tokens, choices = (layers.cast(layers.gather(draft_to_target, x), "int32") for x in (tokens, choices))
    return proposal_of(layers, tokens, choices, chances_of(layers, best, rows.temperature), num_slots)


def proposal_of(
    layers: Layers,
    tokens: ITensor,  # int32 [R*K, 1] or [R, K]
    choices: ITensor,  # int32 [R*K, C]
    chances: ITensor,  # float32 [R*K, C]
    num_slots: Dim,  # K
) -> Proposal[ITensor]:
    width = times(layers, num_slots, choices.shape[1])
    return Proposal(
        tokens=layers.reshape(tokens, (-1, num_slots)),
        choices=layers.reshape(choices, (-1, width)),
        chances=layers.reshape(chances, (-1, width)),
    )


def chances_of(
    layers: Layers,
    scores: ITensor,  # float32 [N, C]
    temperature: ITensor,  # float32 [N, 1]
) -> ITensor:
    """The distribution that noise at the temperature draws from, float32 [N, C]; 0 where the scores give none.

    With NaN or +inf, or of -inf alone, the sum of exponentials is NaN, whatever a reduction makes of NaN.
    """
    below_largest = layers.binary("SUB", scores, layers.reduce("MAX", scores, 1))
    degree = layers.binary("MAX", temperature, FLOAT32_TINY)  # greedy rows mean nothing
    weights = layers.unary("EXP", layers.binary("DIV", below_largest, degree))
    total = layers.reduce("SUM", weights, 1)
    chances = layers.binary("DIV", weights, total)
    return layers.where(layers.binary("GREATER", total, 0.0), chances, layers.like(0.0, chances))


def without_nan(layers: Layers, logits: ITensor) -> ITensor:
    """float32 with NaN below all numbers: TensorRT does not document NaN in TopK."""
    scores = layers.cast(logits, "float32")
    return layers.where(layers.unary("ISNAN", scores), layers.like(float("-inf"), scores), scores)


def times(layers: Layers, size: Dim, factor: int) -> Dim:
    return size * factor if isinstance(size, int) else layers.binary("PROD", size, factor)
