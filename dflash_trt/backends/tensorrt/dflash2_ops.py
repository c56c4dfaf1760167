"""DFlash2's ops in TensorRT layers; `backends/torch/dflash2.py` defines them.

K is a number of the step, and layers do not loop: the selector has the slots of the largest K; slots after the step's
last one repeat it and are cut off. Everything independent of earlier slots is computed before.
"""

from dataclasses import dataclass
from typing import Self

from dflash_trt.backends.tensorrt.layers import Dim, Handle, ITensor, Layers
from dflash_trt.backends.tensorrt.philox import noise_of_row_tokens
from dflash_trt.core.checked_values import FLOAT32_TINY
from dflash_trt.network.ops import Acceptance, Codebooks, StepInputs
from dflash_trt.network.proposal import Proposal


def block_conv(
    layers: Layers,
    x: ITensor,  # F [R*S, H]
    filters: ITensor,  # F [R*S, J * groups]
    base: Handle,  # F [1, J, H]
    *,
    num_requests: Dim,
    num_slots: Dim,  # S
) -> ITensor:
    """See `Ops.block_conv`; fp32 inside, one rounding."""
    num_taps, hidden_size = base.shape[1], x.shape[1]
    num_groups = filters.shape[1] // num_taps
    by_group = (-1, num_groups, hidden_size // num_groups)
    blocks = layers.reshape(layers.cast(x, "float32"), (-1, num_slots, hidden_size))
    if num_taps > 1:  # zeros before slot 0
        zeros = layers.broadcast(layers.floats([0.0], (1, 1, 1)), (num_requests, num_taps - 1, hidden_size))
        blocks = layers.concat((zeros, blocks), 1)
    wide, total = layers.cast(filters, "float32"), None
    for tap in range(num_taps):
        dynamic = layers.reshape(layers.slice(wide, 1, tap * num_groups, num_groups), (-1, num_groups, 1))
        fixed = layers.cast(layers.slice(layers.tensor(base), 1, tap, 1), "float32")
        coefficients = layers.binary("SUM", dynamic, layers.reshape(fixed, (1, *by_group[1:])))
        shifted = layers.slice(blocks, 1, num_taps - 1 - tap, num_slots)
        term = layers.binary("PROD", coefficients, layers.reshape(shifted, by_group))
        total = term if total is None else layers.binary("SUM", total, term)
    return layers.cast_like(layers.reshape(total, (-1, hidden_size)), x)


def select_tokens(
    layers: Layers,
    logits: ITensor,  # F [R*K, V]
    hidden: ITensor,  # F [R*K, r]
    codebooks: Codebooks[Handle],
    acceptance: Acceptance[ITensor],
    inputs: StepInputs[ITensor],
    *,
    num_slots: Dim,  # K
    max_slots: int,
) -> Proposal[ITensor]:
    """See `Ops.select_tokens`. TensorRT's TopK is relied on for the order of equal logits."""
    count, rank = codebooks.top_k, hidden.shape[1]
    rows = DraftRows.of(layers, inputs, acceptance.next_context_lens, num_slots)
    own_scores, draft_topk_ids = layers.top_k(without_nan(layers, logits), count, 1)  # [R*K, top_k]
    noise = noise_of_row_tokens(layers, rows.seed, rows.position, layers.cast(draft_topk_ids, "int64"), rows.stream)
    noisy = layers.binary("SUM", own_scores, layers.binary("PROD", noise, rows.temperature))
    keys = layers.cast(layers.gather(layers.tensor(codebooks.successor), draft_topk_ids), "float32")  # [R*K, top_k, r]
    keys = layers.binary("PROD", keys, layers.reshape(layers.cast(hidden, "float32"), (-1, 1, rank)))
    scores, candidates = (layers.reshape(values, (-1, num_slots, count)) for values in (noisy, draft_topk_ids))
    keys = layers.reshape(keys, (-1, num_slots, count, rank))
    predecessors, token, path, links = layers.tensor(codebooks.predecessor), acceptance.bonus_tokens, [], []
    for slot in range(max_slots):
        at = slot_index(layers, slot, num_slots)
        query = layers.reshape(layers.cast(layers.gather(predecessors, token), "float32"), (-1, 1, rank))
        linked = layers.binary("PROD", layers.reshape(layers.gather(keys, at, 1), (-1, count, rank)), query)
        links.append(layers.reduce("SUM", linked, 2, keep_dims=False))
        score = layers.binary("SUM", layers.reshape(layers.gather(scores, at, 1), (-1, count)), links[-1])
        best = layers.clamp(layers.argmax(score, 1), 0, count - 1)  # NaN has no largest
        token = _chosen(layers, layers.reshape(layers.gather(candidates, at, 1), (-1, count)), best)
        path.append(layers.reshape(token, (-1, 1)))
    tokens = layers.slice(layers.concat(path, 1), 1, 0, num_slots)
    linked = layers.slice(layers.concat(links, 1), 1, 0, times(layers, num_slots, count))
    without_noise = layers.binary("SUM", own_scores, layers.reshape(linked, (-1, count)))
    return proposal_of(
        layers, tokens, draft_topk_ids, topk_probs_of(layers, without_noise, rows.temperature), num_slots
    )


def slot_index(layers: Layers, slot: int, num_slots: Dim) -> ITensor:
    """int32 [1]: the slot, or the last one."""
    if isinstance(num_slots, int):
        return layers.ints([min(slot, num_slots - 1)], (1,))
    last = layers.binary("SUB", num_slots, 1)
    return layers.cast(layers.binary("MIN", layers.ints([slot], (1,), "int64"), last), "int32")


def _chosen(layers: Layers, candidates: ITensor, place: ITensor) -> ITensor:
    """int32 [R, top_k], [R, 1] -> [R]."""
    return layers.reshape(layers.gather_elements(candidates, place, 1), (-1,))


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftRows:
    """Sampling inputs of the R*K rows of drafts."""

    seed: ITensor  # int64 [R*K, 1]
    stream: ITensor  # int64 [R*K, 1]
    temperature: ITensor  # float32 [R*K, 1]
    position: ITensor  # int64 [R*K]: slot j of a block, from 1 on, is j positions after the bonus token

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


def proposal_of(
    layers: Layers,
    tokens: ITensor,  # int32 [R*K, 1] or [R, K]
    draft_topk_ids: ITensor,  # int32 [R*K, C]
    draft_topk_probs: ITensor,  # float32 [R*K, C]
    num_slots: Dim,  # K
) -> Proposal[ITensor]:
    width = times(layers, num_slots, draft_topk_ids.shape[1])
    return Proposal(
        tokens=layers.reshape(tokens, (-1, num_slots)),
        draft_topk_ids=layers.reshape(draft_topk_ids, (-1, width)),
        draft_topk_probs=layers.reshape(draft_topk_probs, (-1, width)),
    )


def topk_probs_of(
    layers: Layers,
    scores: ITensor,  # float32 [N, C]
    temperature: ITensor,  # float32 [N, 1]
) -> ITensor:
    """The distribution that noise at the temperature samples, float32 [N, C]; 0 if the scores give none.

    With NaN or +inf, or with -inf only, the sum of exponentials is NaN, whatever a reduction makes of NaN.
    """
    below_largest = layers.binary("SUB", scores, layers.reduce("MAX", scores, 1))
    degree = layers.binary("MAX", temperature, FLOAT32_TINY)  # greedy rows mean nothing
    weights = layers.unary("EXP", layers.binary("DIV", below_largest, degree))
    total = layers.reduce("SUM", weights, 1)
    draft_topk_probs = layers.binary("DIV", weights, total)
    return layers.where(layers.binary("GREATER", total, 0.0), draft_topk_probs, layers.like(0.0, draft_topk_probs))


def without_nan(layers: Layers, logits: ITensor) -> ITensor:
    """float32 with NaN below all numbers: TensorRT does not document NaN in TopK."""
    scores = layers.cast(logits, "float32")
    return layers.where(layers.unary("ISNAN", scores), layers.like(float("-inf"), scores), scores)


def times(layers: Layers, size: Dim, factor: int) -> Dim:
    return size * factor if isinstance(size, int) else layers.binary("PROD", size, factor)
