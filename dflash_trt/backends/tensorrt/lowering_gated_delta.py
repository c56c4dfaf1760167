"""A gated delta net in plain TensorRT layers: a step is one block of rows, in which requests do not see each other.

Exact and slow, for checks and tiny engines: the block's triangle is as large as the step, and every row has a copy of
its request's state. `backends/torch/gated_delta.py` is the definition, with its equations. Slots are values here: what
a step leaves in them is a new tensor of each part, which the step returns as the state's outputs.

Products over all rows of a step go through `_over_rows`: a weight of 0 does not hide another request's NaN.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dflash_trt.backends.tensorrt.layers import ITensor, Layers
from dflash_trt.core.state_spec import Recurrent
from dflash_trt.network.ops import DeltaParameters, StepInputs
from dflash_trt.network.state import RecurrentCache

_L2_EPS: Final = 1e-6  # inside of the square root
_NEVER: Final = -1e30  # its exponential is 0


def slot_tensor_name(state: Recurrent, part: str) -> str:
    """Of a tensor of the state, unique in an engine."""
    return f"{state.name}.{part}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _StepRows:
    """Tensors that depend on the step's integers alone, made once for all layers."""

    request_of_row: ITensor  # int32 [T]
    row: ITensor  # int32 [T]
    index: ITensor  # int32 [T], of a row among those of its request
    slots: ITensor  # int32 [R]
    starts: ITensor  # int32 [R]
    num_rows: ITensor  # int32 [R]
    context_lens: ITensor  # int32 [R]
    is_new: ITensor  # bool [R]
    sees: ITensor  # bool [1, T, T]: a row of the same request, not behind
    sees_before: ITensor  # the same without the row itself
    is_row: ITensor  # bool [1, T, T]: the row itself
    is_of_request: ITensor  # bool [R, T]
    levels: Sequence[ITensor]  # bool [1, T, T]: for `_inverse`


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """float32; q and k of length DK^-0.5 and 1, with a copy for every value head, but for `keys`."""

    q: ITensor  # [H, T, DK]
    k: ITensor  # [H, T, DK]
    v: ITensor  # [H, T, DV]
    keys: ITensor  # [T, KH, DK]
    rate: ITensor  # [H, T, 1]
    decay: ITensor  # [T, H], logarithms
    total: ITensor  # [T, H]: of a request's rows up to this one


class DeltaLowering:
    """Every recurrent layer of one network."""

    def __init__(
        self,
        layers: Layers,
        inputs: StepInputs[ITensor],
        slot_ids: ITensor,  # int64 [R]
        request_of_row: ITensor,  # int32 [T]
        *,
        max_num_tokens: int,
    ) -> None:
        self._layers = layers
        self._rows = _step_rows(layers, inputs, slot_ids, request_of_row, max_num_tokens)

    def run(
        self,
        qkvz: ITensor,  # F [T, channels + v_size]
        ba: ITensor,  # F [T, 2 * H]
        parameters: DeltaParameters[ITensor],
        cache: RecurrentCache[ITensor],
        eps: float,
    ) -> tuple[ITensor, dict[str, ITensor]]:
        """F [T, v_size], and the state's tensors behind the step, by name. See `Ops.gated_delta`."""
        layers, spec = self._layers, cache.spec
        num_folded = self._num_folded(cache)
        state = self._folded(cache, num_folded)
        inputs = layers.slice(qkvz, 1, 0, spec.num_channels)
        mixed = self._convolved(inputs, parameters.conv, cache, num_folded)
        block = self._block(mixed, ba, parameters, spec)
        attended, deltas = self._solved(block, state, spec)
        z = layers.slice(qkvz, 1, spec.num_channels, spec.num_value_heads * spec.value_head_dim)
        out = _gated(layers, attended, z, parameters.norm, eps)
        parts = self._records(block, deltas, spec) | {
            "state": self._state_behind(block, deltas, state, spec),
            "window": self._window_behind(inputs, cache, num_folded),
            "position": layers.binary("SUM", self._rows.context_lens, self._skipped(spec)),
        }
        slots = layers.reshape(self._rows.slots, (-1, 1))
        return out, {
            slot_tensor_name(spec, part): layers.scatter_nd(tensor, slots, parts[part])
            for part, tensor in cache.tensors.items()
        }

    def _num_folded(self, cache: RecurrentCache[ITensor]) -> ITensor:  # int32 [R]
        layers, rows = self._layers, self._rows
        position = layers.gather(cache.tensors["position"], rows.slots)
        count = layers.clamp(layers.binary("SUB", rows.context_lens, position), 0, cache.spec.num_records)
        is_old = layers.cast(layers.unary("NOT", rows.is_new), "int32")
        return layers.binary("PROD", count, is_old)

    def _folded(self, cache: RecurrentCache[ITensor], num_folded: ITensor) -> ITensor:  # [R, H, DK, DV]
        """States at the first rows; of a new request zeros, whatever its slot holds."""
        layers, spec = self._layers, cache.spec
        state, keys, deltas, decays = (
            layers.gather(cache.tensors[name], self._rows.slots) for name in ("state", "keys", "deltas", "decays")
        )
        places = layers.reshape(layers.arange(spec.num_records), (1, -1))
        is_folded = layers.binary("LESS", places, layers.reshape(num_folded, (-1, 1)))  # [R, records]
        decays = _cleared(layers, decays, layers.reshape(is_folded, (-1, spec.num_records, 1)))
        is_folded = layers.reshape(is_folded, (-1, spec.num_records, 1, 1))
        keys, deltas = (_cleared(layers, x, is_folded) for x in (keys, deltas))
        last = layers.reduce("SUM", decays, 1)  # [R, 1, H]
        weight = layers.unary("EXP", layers.binary("SUB", last, layers.cumulative_sum(decays, 1)))
        deltas = layers.binary("PROD", deltas, layers.reshape(weight, (-1, spec.num_records, spec.num_value_heads, 1)))
        keys = _of_value_heads(layers, keys, spec, axis=2)
        added = layers.matmul(layers.transpose(keys, (0, 2, 3, 1)), layers.transpose(deltas, (0, 2, 1, 3)))
        kept = layers.reshape(layers.unary("EXP", last), (-1, spec.num_value_heads, 1, 1))
        folded = layers.binary("SUM", layers.binary("PROD", state, kept), added)
        return _cleared(layers, folded, layers.reshape(layers.unary("NOT", self._rows.is_new), (-1, 1, 1, 1)))

    def _convolved(
        self, inputs: ITensor, filters: ITensor, cache: RecurrentCache[ITensor], num_folded: ITensor
    ) -> ITensor:  # F [T, channels]
        """SiLU of the causal convolution over inputs of the step and those that the slot has from before it."""
        layers, rows, num_before = self._layers, self._rows, cache.spec.conv_size - 1
        total: ITensor | None = None
        for tap in range(cache.spec.conv_size):
            lag = num_before - tap
            is_input = layers.unary("NOT", layers.binary("LESS", rows.index, lag))
            new = layers.gather(inputs, layers.binary("MAX", layers.binary("SUB", rows.row, lag), 0))
            column = layers.binary("SUM", rows.index, tap)
            old = self._old_inputs(cache, num_folded, rows.request_of_row, column)
            value = layers.where(layers.reshape(is_input, (-1, 1)), new, old)
            weight = layers.reshape(layers.cast(layers.slice(filters, 1, tap, 1), "float32"), (1, -1))
            part = layers.binary("PROD", layers.cast(value, "float32"), weight)
            total = part if total is None else layers.binary("SUM", total, part)
        assert total is not None
        return layers.cast_like(_silu(layers, total), inputs)

    def _old_inputs(
        self, cache: RecurrentCache[ITensor], num_folded: ITensor, requests: ITensor, index: ITensor
    ) -> ITensor:  # F [N, channels]
        """Inputs number `index` int32 [N] of the windows of `requests` int32 [N]; of new ones zeros."""
        layers, rows, window = self._layers, self._rows, cache.tensors["window"]
        column = layers.binary("SUM", layers.gather(num_folded, requests), index)
        column = layers.clamp(column, 0, cache.spec.conv_size - 2 + cache.spec.num_records)
        places = [layers.reshape(x, (-1, 1)) for x in (layers.gather(rows.slots, requests), column)]
        found = layers.gather_nd(window, layers.concat(places, 1))
        is_old = layers.binary("GREATER", layers.gather(rows.context_lens, requests), 0)
        return _cleared(layers, found, layers.reshape(is_old, (-1, 1)))

    def _block(self, mixed: ITensor, ba: ITensor, parameters: DeltaParameters[ITensor], spec: Recurrent) -> _Block:
        layers, heads = self._layers, spec.num_value_heads
        wide, k_size = layers.cast(mixed, "float32"), spec.num_key_heads * spec.key_head_dim
        q, k = (_unit(layers, layers.slice(wide, 1, start, k_size), spec) for start in (0, k_size))
        q = layers.binary("PROD", q, spec.key_head_dim**-0.5)
        v = layers.slice(wide, 1, 2 * k_size, heads * spec.value_head_dim)
        b, a = (layers.cast(layers.slice(ba, 1, start, heads), "float32") for start in (0, heads))
        log_rate, dt_bias = (layers.reshape(x, (1, -1)) for x in (parameters.log_rate, parameters.dt_bias))
        softplus = _softplus(layers, layers.binary("SUM", a, dt_bias))
        decay = layers.unary("NEG", layers.binary("PROD", softplus, layers.unary("EXP", log_rate)))
        sees = layers.reshape(self._rows.sees, (-1, self._num_rows))
        return _Block(
            q=layers.transpose(_of_value_heads(layers, q, spec, axis=1), (1, 0, 2)),
            k=layers.transpose(_of_value_heads(layers, k, spec, axis=1), (1, 0, 2)),
            v=layers.transpose(layers.reshape(v, (-1, heads, spec.value_head_dim)), (1, 0, 2)),
            keys=k,
            rate=_by_head(layers, layers.sigmoid(b)),
            decay=decay,
            total=_over_rows(layers, layers.cast(sees, "float32"), decay, sees),
        )

    @property
    def _num_rows(self) -> ITensor:
        return self._layers.dim(self._rows.row, 0)

    def _solved(self, block: _Block, state: ITensor, spec: Recurrent) -> tuple[ITensor, ITensor]:
        """Results [T, H, DV] and deltas [H, T, DV] of all rows."""
        layers, rows = self._layers, self._rows
        total = _by_head(layers, block.total)  # [H, T, 1]
        difference = layers.binary("SUB", total, layers.transpose(total, (0, 2, 1)))
        between = layers.unary("EXP", layers.where(rows.sees, difference, layers.floats([_NEVER], (1, 1, 1))))
        products = layers.matmul(block.k, block.k, is_b_transposed=True)
        lower = layers.binary("PROD", block.rate, layers.binary("PROD", between, products))
        inverse = self._inverse(_cleared(layers, lower, rows.sees_before))
        from_state = layers.unary("EXP", total)
        of_rows = layers.gather(state, rows.request_of_row)  # [T, H, DK, DV]
        of_k, of_q = (layers.binary("PROD", from_state, _times(layers, x, of_rows)) for x in (block.k, block.q))
        wanted = layers.binary("PROD", block.rate, layers.binary("SUB", block.v, of_k))
        deltas = _over_rows(layers, inverse, wanted, rows.sees)
        seen = layers.binary("PROD", between, layers.matmul(block.q, block.k, is_b_transposed=True))
        seen = _cleared(layers, seen, rows.sees)
        attended = layers.binary("SUM", of_q, _over_rows(layers, seen, deltas, rows.sees))
        return layers.transpose(attended, (1, 0, 2)), deltas

    def _inverse(self, lower: ITensor) -> ITensor:  # [H, T, T]
        """(I + L)^-1 of a strictly lower triangle, from the inverses of diagonal blocks to those twice as large."""
        layers, rows = self._layers, self._rows
        inverse = layers.cast(rows.is_row, "float32")
        for level, is_between in enumerate(rows.levels):
            between = _cleared(layers, lower, is_between)
            if level > 0:
                between = _over_rows(layers, inverse, between, rows.sees)
                between = _over_rows(layers, between, inverse, rows.sees)
            inverse = layers.binary("SUB", inverse, between)
        return inverse

    def _records(self, block: _Block, deltas: ITensor, spec: Recurrent) -> dict[str, ITensor]:
        """Those of the first rows of each request; behind its last one they mean nothing."""
        layers, rows = self._layers, self._rows
        places = layers.reshape(layers.arange(spec.num_records), (1, -1))
        row = self._own_row(layers.binary("SUM", layers.reshape(rows.starts, (-1, 1)), places))
        return {
            "keys": layers.gather(block.keys, row),
            "deltas": layers.gather(layers.transpose(deltas, (1, 0, 2)), row),
            "decays": layers.gather(block.decay, row),
        }

    def _own_row(self, row: ITensor) -> ITensor:  # int32 [R, n]
        """No row behind the request's last one."""
        layers, rows = self._layers, self._rows
        last = layers.binary("SUB", layers.binary("SUM", rows.starts, rows.num_rows), 1)
        return layers.binary("MAX", layers.binary("MIN", row, layers.reshape(last, (-1, 1))), 0)

    def _skipped(self, spec: Recurrent) -> ITensor:  # int32 [R]
        """Rows of a prompt, whose state goes on to its end; 0 of a verify block, whose rows are records."""
        layers = self._layers
        is_prompt = layers.cast(layers.binary("GREATER", self._rows.num_rows, spec.num_records), "int32")
        return layers.binary("PROD", self._rows.num_rows, is_prompt)

    def _state_behind(self, block: _Block, deltas: ITensor, state: ITensor, spec: Recurrent) -> ITensor:
        """[R, H, DK, DV]: of a prompt that behind its rows."""
        layers, rows, heads = self._layers, self._rows, spec.num_value_heads
        has_row = layers.cast(rows.is_of_request, "float32")
        whole = _over_rows(layers, has_row, block.decay, rows.is_of_request)  # [R, H]
        left = layers.binary("SUB", layers.gather(whole, rows.request_of_row), block.total)
        keys = layers.binary("PROD", block.k, layers.unary("EXP", _by_head(layers, left)))  # [H, T, DK]
        is_of_request = layers.reshape(rows.is_of_request, (-1, 1, 1, self._num_rows))
        turned = layers.reshape(layers.transpose(keys, (0, 2, 1)), (1, heads, spec.key_head_dim, -1))
        of_request = _cleared(layers, turned, is_of_request)  # [R, H, DK, T]
        by_head = layers.reshape(deltas, (1, heads, -1, spec.value_head_dim))
        added = _over_rows(layers, of_request, by_head, is_of_request)
        kept = layers.binary("PROD", state, layers.reshape(layers.unary("EXP", whole), (-1, heads, 1, 1)))
        is_prompt = layers.binary("GREATER", layers.reshape(rows.num_rows, (-1, 1, 1, 1)), spec.num_records)
        return layers.where(is_prompt, layers.binary("SUM", kept, added), state)

    def _window_behind(
        self, inputs: ITensor, cache: RecurrentCache[ITensor], num_folded: ITensor
    ) -> ITensor:  # F [R, conv_size - 1 + records, channels]
        layers, rows, spec = self._layers, self._rows, cache.spec
        size, num_before = spec.conv_size - 1 + spec.num_records, spec.conv_size - 1
        places = layers.reshape(layers.arange(size), (1, -1))
        index = layers.binary("SUM", layers.reshape(self._skipped(spec), (-1, 1)), places)  # [R, size]
        row = layers.binary("SUM", layers.reshape(rows.starts, (-1, 1)), layers.binary("SUB", index, num_before))
        new = layers.gather(inputs, self._own_row(row))
        requests = layers.reshape(layers.arange(layers.dim(rows.slots, 0)), (-1, 1))
        requests = layers.binary("SUM", requests, layers.binary("PROD", places, 0))
        flat = [layers.reshape(x, (-1,)) for x in (requests, index)]
        old = layers.reshape(self._old_inputs(cache, num_folded, *flat), (-1, size, spec.num_channels))
        is_old = layers.binary("LESS", index, num_before)
        return layers.where(layers.reshape(is_old, (-1, size, 1)), old, new)


def _step_rows(
    layers: Layers, inputs: StepInputs[ITensor], slot_ids: ITensor, request_of_row: ITensor, max_num_tokens: int
) -> _StepRows:
    row = layers.arange(layers.dim(inputs.token_ids, 0))
    starts = layers.drop_ends(inputs.token_offsets, 0, first=0, last=1)
    ends = layers.drop_ends(inputs.token_offsets, 0, first=1, last=0)
    down, right = layers.reshape(row, (1, -1, 1)), layers.reshape(row, (1, 1, -1))
    requests_down, requests_right = (layers.reshape(request_of_row, shape) for shape in ((1, -1, 1), (1, 1, -1)))
    is_same = layers.binary("EQUAL", requests_down, requests_right)
    requests = layers.reshape(layers.arange(layers.dim(inputs.context_lens, 0)), (-1, 1))
    is_of_request = layers.binary("EQUAL", requests, layers.reshape(request_of_row, (1, -1)))
    is_behind = layers.binary("LESS", right, down)
    return _StepRows(
        request_of_row=request_of_row,
        row=row,
        index=layers.binary("SUB", row, layers.gather(starts, request_of_row)),
        slots=layers.cast(slot_ids, "int32"),
        starts=starts,
        num_rows=layers.binary("SUB", ends, starts),
        context_lens=inputs.context_lens,
        is_new=layers.binary("EQUAL", inputs.context_lens, 0),
        sees=layers.binary("AND", is_same, layers.unary("NOT", layers.binary("LESS", down, right))),
        sees_before=layers.binary("AND", is_same, is_behind),
        is_row=layers.binary("EQUAL", down, right),
        is_of_request=is_of_request,
        levels=[_between_blocks(layers, down, right, 1 << i) for i in range((max_num_tokens - 1).bit_length())],
    )


def _between_blocks(layers: Layers, down: ITensor, right: ITensor, size: int) -> ITensor:  # bool [1, T, T]
    """Between diagonal blocks of `size` rows, inside of those twice as large."""
    is_in = layers.binary("EQUAL", layers.binary("DIV", down, 2 * size), layers.binary("DIV", right, 2 * size))
    is_below = layers.binary("LESS", layers.binary("DIV", right, size), layers.binary("DIV", down, size))
    return layers.binary("AND", is_in, is_below)


def _cleared(layers: Layers, x: ITensor, is_kept: ITensor) -> ITensor:
    """Selected, not multiplied: a slot that nobody has written may hold anything."""
    return layers.where(is_kept, x, layers.like(0.0, x))


def _over_rows(
    layers: Layers,
    weights: ITensor,  # float32 [..., N, T], 0 where `has_row` is false
    x: ITensor,  # float32 [..., T, C]
    has_row: ITensor,  # bool [..., N, T]
) -> ITensor:  # [..., N, C]
    """weights @ x, in which a number of x that is not finite reaches the results that have its row, and no other."""
    is_bad = layers.binary("OR", layers.unary("ISNAN", x), layers.unary("ISINF", x))
    product = layers.matmul(weights, _cleared(layers, x, layers.unary("NOT", is_bad)))
    num_bad = layers.matmul(layers.cast(has_row, "float32"), layers.cast(is_bad, "float32"))
    return layers.where(layers.binary("GREATER", num_bad, 0.0), layers.like(math.nan, product), product)


def _by_head(layers: Layers, x: ITensor) -> ITensor:  # [T, H] -> [H, T, 1]
    return layers.reshape(layers.transpose(x, (1, 0)), (x.shape[1], -1, 1))


def _of_value_heads(layers: Layers, x: ITensor, spec: Recurrent, *, axis: int) -> ITensor:
    """The key head of every value head, along the axis of heads."""
    per_key = spec.num_value_heads // spec.num_key_heads
    heads = [head // per_key for head in range(spec.num_value_heads)]
    return layers.gather(x, layers.ints(heads, (len(heads),)), axis)


def _times(layers: Layers, x: ITensor, state: ITensor) -> ITensor:
    """[H, T, DK] and [T, H, DK, DV] -> [H, T, DV]."""
    heads, key_dim = x.shape[0], x.shape[2]
    rows = layers.reshape(layers.transpose(x, (1, 0, 2)), (-1, heads, 1, key_dim))
    product = layers.reshape(layers.matmul(rows, state), (-1, heads, state.shape[3]))
    return layers.transpose(product, (1, 0, 2))


def _unit(layers: Layers, x: ITensor, spec: Recurrent) -> ITensor:  # [T, KH * DK] -> [T, KH, DK]
    heads = layers.reshape(x, (-1, spec.num_key_heads, spec.key_head_dim))
    square = layers.reduce("SUM", layers.binary("PROD", heads, heads), 2)
    return layers.binary("DIV", heads, layers.unary("SQRT", layers.binary("SUM", square, _L2_EPS)))


def _silu(layers: Layers, x: ITensor) -> ITensor:
    return layers.binary("PROD", x, layers.sigmoid(x))


def _softplus(layers: Layers, x: ITensor) -> ITensor:
    rest = layers.unary("EXP", layers.unary("NEG", layers.unary("ABS", x)))
    return layers.binary("SUM", layers.binary("MAX", x, 0.0), layers.unary("LOG", layers.binary("SUM", rest, 1.0)))


def _gated(
    layers: Layers,
    attended: ITensor,  # float32 [T, H, DV]
    z: ITensor,  # F [T, H * DV]
    norm: ITensor,  # F [DV]
    eps: float,
) -> ITensor:  # F [T, H * DV]
    """Norm of each head, then its gate; rounded where PyTorch's ops round."""
    mean_square = layers.reduce("AVG", layers.binary("PROD", attended, attended), 2)
    normed = layers.binary("DIV", attended, layers.unary("SQRT", layers.binary("SUM", mean_square, eps)))
    normed = layers.binary("PROD", layers.cast_like(normed, z), layers.reshape(norm, (1, 1, -1)))
    gate = _silu(layers, layers.cast(z, "float32"))
    flat = layers.reshape(layers.cast(normed, "float32"), (-1, z.shape[1]))
    return layers.cast_like(layers.binary("PROD", flat, gate), z)
