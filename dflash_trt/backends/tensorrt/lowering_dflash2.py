"""The ops of DFlash2 in plain TensorRT layers, also beside plugins; `backends/torch/dflash2.py` is the definition.

K is a number of the step, and layers do not repeat themselves: the walk has the steps of the largest K, of which those
behind the step's last slot repeat that slot and are cut off. What does not depend on the walk comes before it.
"""

from dflash_trt.backends.tensorrt.layers import Dim, Handle, ITensor, Layers
from dflash_trt.backends.tensorrt.lowering_drafts import DraftRows, chances_of, proposal_of, times, without_nan
from dflash_trt.backends.tensorrt.lowering_philox import noise_of_row_tokens
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
    own_scores, choices = layers.top_k(without_nan(layers, logits), count, 1)  # [R*K, top_k]
    noise = noise_of_row_tokens(layers, rows.seed, rows.position, layers.cast(choices, "int64"), rows.stream)
    noisy = layers.binary("SUM", own_scores, layers.binary("PROD", noise, rows.temperature))
    keys = layers.cast(layers.gather(layers.tensor(codebooks.successor), choices), "float32")  # [R*K, top_k, r]
    keys = layers.binary("PROD", keys, layers.reshape(layers.cast(hidden, "float32"), (-1, 1, rank)))
    scores, candidates = (layers.reshape(values, (-1, num_slots, count)) for values in (noisy, choices))
    keys = layers.reshape(keys, (-1, num_slots, count, rank))
    predecessors, token, path, links = layers.tensor(codebooks.predecessor), acceptance.bonus_tokens, [], []
    for slot in range(max_slots):
        at = _at(layers, slot, num_slots)
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
    return proposal_of(layers, tokens, choices, chances_of(layers, without_noise, rows.temperature), num_slots)


def _at(layers: Layers, slot: int, num_slots: Dim) -> ITensor:
    """int32 [1]: the slot, or the last one."""
    if isinstance(num_slots, int):
        return layers.ints([min(slot, num_slots - 1)], (1,))
    last = layers.binary("SUB", num_slots, 1)
    return layers.cast(layers.binary("MIN", layers.ints([slot], (1,), "int64"), last), "int32")


def _chosen(layers: Layers, candidates: ITensor, place: ITensor) -> ITensor:
    """int32 [R, top_k], [R, 1] -> [R]."""
    return layers.reshape(layers.gather_elements(candidates, place, 1), (-1,))
