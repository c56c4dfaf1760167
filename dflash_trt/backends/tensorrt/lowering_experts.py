"""A mixture of experts in plain layers: every row goes through every expert, and those not chosen add nothing.

Slow by design, for checks. `backends/torch/moe.py` defines the arithmetic. Sums over experts are in float32.
"""

import math
from typing import Final, assert_never

from dflash_trt.backends.tensorrt.layers import Handle, ITensor, Layers
from dflash_trt.backends.tensorrt.quantized_linear import quantized_experts
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.formats.base import QuantizedWeight
from dflash_trt.network.ops import Linear, StackedExperts

_GELU_CUBE, _GELU_SCALE = 0.044715, (2 / math.pi) ** 0.5
NEGLIGIBLE: Final = 1e-20  # added to a sum of sigmoids, which may underflow
_CLOSED: Final = -3.0e38  # scores of a group that is not chosen from


def run_experts(
    layers: Layers,
    x: ITensor,  # F [N, H]
    logits: ITensor,  # F [N, moe.num_experts]
    experts: StackedExperts[Handle],
    moe: Moe,
) -> ITensor:  # F [N, H]; experts of other ranks add nothing
    is_chosen, weights = _choice(layers, logits, experts, moe)
    read = layers.reshape(x, (1, -1, x.shape[1]))
    if moe.scales_inputs:
        read = layers.binary("PROD", read, layers.cast_like(weights, x))  # [E, N, H]
    gate_up = _linear(layers, read, experts.gate_up)  # [E, N, 2F]
    results = layers.cast(_linear(layers, activated(layers, gate_up, moe), experts.down), "float32")
    # Selected, not multiplied by 0: what an expert makes of a row it did not get may be infinite.
    weighed = results if moe.scales_inputs else layers.binary("PROD", results, weights)
    weighed = layers.where(is_chosen, weighed, layers.floats([0.0], (1, 1, 1)))
    return layers.cast_like(layers.reduce("SUM", weighed, 0, keep_dims=False), x)


def _choice(
    layers: Layers, logits: ITensor, experts: StackedExperts[Handle], moe: Moe
) -> tuple[ITensor, ITensor]:  # bool and float32 [E, N, 1]
    """The rows that the experts of this rank get, and how much of each result these take."""
    chosen_weights, expert_ids = _top_k(layers, logits, moe, experts)
    here = [experts.first_expert + i for i in range(experts.num_experts)]
    by_choice = layers.reshape(expert_ids, (-1, moe.num_experts_per_token, 1))
    is_chosen = layers.binary("EQUAL", by_choice, layers.ints(here, (1, 1, len(here))))  # [N, k, E]
    weights = layers.reshape(chosen_weights, (-1, moe.num_experts_per_token, 1))
    by_expert = layers.where(is_chosen, weights, layers.floats([0.0], (1, 1, 1)))
    count = layers.reduce("SUM", layers.cast(is_chosen, "float32"), 1, keep_dims=False)  # [N, E]
    return (
        layers.binary("GREATER", _expert_rows(layers, count), 0.0),
        _expert_rows(layers, layers.reduce("SUM", by_expert, 1, keep_dims=False)),
    )


def _top_k(layers: Layers, logits: ITensor, moe: Moe, experts: StackedExperts[Handle]) -> tuple[ITensor, ITensor]:
    """Weights float32 [N, k], rounded to F, and ids int32 [N, k]; see `Moe.routing`."""
    wide = layers.cast(logits, "float32")
    match moe.routing:
        case "top_k_softmax":
            best, expert_ids = layers.top_k(wide, moe.num_experts_per_token, 1)
            weights = layers.softmax(best, 1)
        case "softmax_top_k" | "scaled_softmax_top_k":
            weights, expert_ids = layers.top_k(layers.softmax(wide, 1), moe.num_experts_per_token, 1)
            if moe.normalizes_top_k:
                weights = layers.binary("DIV", weights, layers.reduce("SUM", weights, 1))
            if experts.expert_scales is not None:
                scales = layers.cast(layers.tensor(experts.expert_scales), "float32")
                weights = layers.binary("PROD", weights, layers.gather(scales, expert_ids))
        case "sigmoid_top_k":
            weights, expert_ids = _largest_sigmoids(layers, layers.sigmoid(wide), moe, experts.choice_bias)
        case _:
            assert_never(moe.routing)
    return layers.cast(layers.cast_like(weights, logits), "float32"), expert_ids


def _largest_sigmoids(
    layers: Layers,
    scores: ITensor,  # float32 [N, E]
    moe: Moe,
    choice_bias: Handle | None,
) -> tuple[ITensor, ITensor]:
    wanted = scores
    if choice_bias is not None:
        bias = layers.reshape(layers.tensor(choice_bias), (1, moe.num_experts))
        wanted = layers.binary("SUM", scores, bias)
    if moe.num_groups > 1:
        wanted = _of_best_groups(layers, wanted, moe)
    _, expert_ids = layers.top_k(wanted, moe.num_experts_per_token, 1)
    by_choice = layers.reshape(expert_ids, (-1, moe.num_experts_per_token, 1))
    is_chosen = layers.binary("EQUAL", by_choice, layers.ints(range(moe.num_experts), (1, 1, moe.num_experts)))
    of_all = layers.reshape(scores, (-1, 1, moe.num_experts))
    chosen = layers.where(is_chosen, of_all, layers.floats([0.0], (1, 1, 1)))  # [N, k, E], one number in each row
    weights = layers.reduce("SUM", chosen, 2, keep_dims=False)
    if moe.normalizes_top_k:
        total = layers.binary("SUM", layers.reduce("SUM", weights, 1), NEGLIGIBLE)
        weights = layers.binary("DIV", weights, total)
    return layers.binary("PROD", weights, moe.routing_scale), expert_ids


def _of_best_groups(layers: Layers, wanted: ITensor, moe: Moe) -> ITensor:
    """`wanted` [N, E] where the router may choose, far below it elsewhere."""
    grouped = layers.reshape(wanted, (-1, moe.num_groups, moe.num_experts // moe.num_groups))
    best_two, _ = layers.top_k(grouped, 2, 2)
    _, group_ids = layers.top_k(layers.reduce("SUM", best_two, 2, keep_dims=False), moe.num_chosen_groups, 1)
    by_choice = layers.reshape(group_ids, (-1, moe.num_chosen_groups, 1))
    is_chosen = layers.binary("EQUAL", by_choice, layers.ints(range(moe.num_groups), (1, 1, moe.num_groups)))
    count = layers.reduce("SUM", layers.cast(is_chosen, "float32"), 1, keep_dims=False)  # [N, groups]
    is_open = layers.binary("GREATER", layers.reshape(count, (-1, moe.num_groups, 1)), 0.0)
    of_open = layers.where(is_open, grouped, layers.floats([_CLOSED], (1, 1, 1)))
    return layers.reshape(of_open, (-1, moe.num_experts))


def _expert_rows(layers: Layers, x: ITensor) -> ITensor:  # [N, E] -> [E, N, 1]
    return layers.reshape(layers.transpose(x, (1, 0)), (x.shape[1], -1, 1))


def _linear(layers: Layers, x: ITensor, linear: Linear[Handle]) -> ITensor:
    """[E or 1, N, in] -> [E, N, out]."""
    if isinstance(linear.weight, QuantizedWeight):
        out = quantized_experts(layers, x, linear.weight)
    else:
        out = layers.matmul(x, layers.tensor(linear.weight), is_b_transposed=True)
    if linear.bias is None:
        return out
    num_experts, _, size = out.shape
    return layers.binary("SUM", out, layers.reshape(layers.tensor(linear.bias), (num_experts, 1, size)))


def activated(layers: Layers, gate_up: ITensor, moe: Moe) -> ITensor:
    """[..., 2F] -> [..., F]; see `Moe.activation`."""
    last, half = len(gate_up.shape) - 1, gate_up.shape[-1] // 2
    gate, up = (layers.slice(gate_up, last, start, half) for start in (0, half))
    if moe.activation == "clamped_swiglu":
        assert moe.limit is not None and moe.alpha is not None
        gate = layers.binary("MIN", gate, moe.limit)
        up = layers.binary("SUM", layers.clamp(up, -moe.limit, moe.limit), 1.0)
    wide = layers.cast(gate, "float32")  # fp32 inside the activation
    if moe.activation == "gelu_tanh":
        return layers.binary("PROD", layers.cast_like(gelu_tanh(layers, wide), gate), up)
    steepness = 1.0 if moe.alpha is None else moe.alpha
    sigmoid = layers.sigmoid(wide if steepness == 1.0 else layers.binary("PROD", wide, steepness))
    return layers.binary("PROD", layers.cast_like(layers.binary("PROD", wide, sigmoid), gate), up)


def gelu_tanh(layers: Layers, x: ITensor) -> ITensor:
    """GELU in its approximation with tanh."""
    cube = layers.binary("PROD", x, layers.binary("PROD", x, x))
    inner = layers.binary("SUM", x, layers.binary("PROD", cube, _GELU_CUBE))
    weight = layers.binary("SUM", layers.tanh(layers.binary("PROD", inner, _GELU_SCALE)), 1.0)
    return layers.binary("PROD", layers.binary("PROD", x, 0.5), weight)
