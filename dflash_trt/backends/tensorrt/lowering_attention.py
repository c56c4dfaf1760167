"""Attention over pages in plain TensorRT layers: scatter the new K/V, gather every page, mask, softmax.

Exact and slow: each token row gathers all P pages of its request, in float32, so this lowering is for checking a
network and for tiny engines; the plugin (plugins/README.md) is what serves. The definition is `torch/attention`.
Pages are values here: a write makes a new tensor, which the step returns as the state's output.
"""

from dataclasses import dataclass

from dflash_trt.backends.tensorrt.layers import Dim, ITensor, Layers
from dflash_trt.backends.tensorrt.lowering_pages import Pages
from dflash_trt.core.model.gqa import AttentionMask, Gqa, QueryTemperature
from dflash_trt.network.ops import StepInputs


@dataclass(frozen=True, kw_only=True, slots=True)
class StepIndex:
    """Tensors that depend only on the step's integers, computed once for all layers."""

    request_of_row: ITensor  # int32 [T]
    page_table: ITensor  # int32 [R, P]
    page_table_of_row: ITensor  # int32 [T, P]
    positions: ITensor  # int32 [T]
    kv_slots: ITensor  # int32 [2T, 3]: (page, k or v, offset) of every row's K, then of every row's V
    num_keys: Dim  # P * page_size
    key_positions: ITensor  # int32 [1, P * page_size]


def index_step(layers: Layers, inputs: StepInputs[ITensor], *, page_size: int) -> StepIndex:
    """Which request each row belongs to and where its K/V go."""
    num_rows = layers.dim(inputs.token_ids, 0)
    rows = layers.reshape(layers.arange(num_rows), (-1, 1))
    ends = layers.reshape(layers.drop_ends(inputs.token_offsets, 0, first=1, last=0), (1, -1))
    has_passed = layers.unary("NOT", layers.binary("LESS", rows, ends))  # [T, R]: the request ended before this row
    request_of_row = layers.reduce("SUM", layers.cast(has_passed, "int32"), 1, keep_dims=False)
    page_index = layers.binary("DIV", inputs.positions, page_size)
    offset = layers.binary("SUB", inputs.positions, layers.binary("PROD", page_index, page_size))
    page = layers.gather_nd(inputs.page_table, _columns(layers, request_of_row, page_index))
    zero = layers.binary("PROD", page, 0)
    slots = [_columns(layers, page, layers.binary("SUM", zero, is_value), offset) for is_value in (0, 1)]
    num_pages = layers.dim(inputs.page_table, 1)
    num_keys = num_pages * page_size if isinstance(num_pages, int) else layers.binary("PROD", num_pages, page_size)
    return StepIndex(
        request_of_row=request_of_row,
        page_table=inputs.page_table,
        page_table_of_row=layers.gather(inputs.page_table, request_of_row),
        positions=inputs.positions,
        kv_slots=layers.concat(slots, 0),
        num_keys=num_keys,
        key_positions=layers.reshape(layers.arange(num_keys), (1, -1)),
    )


def write_rows(layers: Layers, index: StepIndex, kv: tuple[ITensor, ITensor], pages: Pages) -> Pages:
    """Pages with k and v [T, kv_heads, D] of all rows written."""
    codes = layers.scatter_nd(pages.codes(layers), index.kv_slots, pages.rows(layers, kv))
    return pages.with_codes(layers, codes)


def attend_pages(
    layers: Layers,
    index: StepIndex,
    q: ITensor,  # [T, heads, D]
    pages: Pages,  # the rows' own K and V among them
    gqa: Gqa,
    sinks: ITensor | None,  # float32 [heads]
) -> ITensor:  # [T, heads * D]
    """See `Ops.attend`."""
    mask = gqa.mask
    assert mask.is_causal and not mask.is_window_anchored  # targets are; other configs are refused
    keys, values = read_pages(layers, pages, index.page_table_of_row, like=q)  # [T, kv_heads, S, D]
    kv_heads, head_dim = keys.shape[1], keys.shape[3]
    num_heads = q.shape[1]
    grouped = layers.reshape(q, (-1, kv_heads, num_heads // kv_heads, head_dim))
    query_positions = layers.reshape(index.positions, (-1, 1))
    visible = _not_greater(layers, index.key_positions, query_positions)  # [T, S]
    if mask.window is not None:
        distance = layers.binary("SUB", query_positions, index.key_positions)
        visible = layers.binary("AND", visible, layers.binary("LESS", distance, mask.window))
    if mask.chunk is not None:
        chunks = (layers.binary("DIV", x, mask.chunk) for x in (query_positions, index.key_positions))
        visible = layers.binary("AND", visible, layers.binary("EQUAL", *chunks))
    values = _cleared(layers, values, layers.reshape(visible, (-1, 1, index.num_keys, 1)))
    visible = layers.reshape(visible, (-1, 1, 1, index.num_keys))
    if sinks is not None:
        sinks = layers.reshape(sinks, (1, kv_heads, num_heads // kv_heads, 1))
    attended = _attend(layers, grouped, keys, values, visible, gqa, sinks)  # [T, kv_heads, group, D]
    return layers.reshape(attended, (-1, num_heads * head_dim))


def tempered(layers: Layers, q: ITensor, positions: ITensor, temperature: QueryTemperature) -> ITensor:
    """See `Ops.tempered`; float32 inside, back to q's dtype."""
    intervals = layers.binary("DIV", layers.binary("SUM", positions, 1), temperature.interval)
    growth = layers.unary("LOG", layers.binary("SUM", layers.cast(intervals, "float32"), 1.0))
    factors = layers.binary("SUM", layers.binary("PROD", growth, temperature.scale), 1.0)
    by_row = layers.reshape(factors, (-1, 1, 1))
    return layers.cast_like(layers.binary("PROD", layers.cast(q, "float32"), by_row), q)


def write_draft_context(
    layers: Layers, index: StepIndex, kv: tuple[ITensor, ITensor], pages: Pages, limits: ITensor
) -> Pages:
    """Pages with the rows at positions < limits written; every other slot keeps what it held."""
    limit_of_row = layers.gather(limits, index.request_of_row)
    is_kept = layers.binary("LESS", index.positions, limit_of_row)
    is_kept = layers.reshape(layers.concat((is_kept, is_kept), 0), (-1, 1, 1))  # for K, then for V
    codes = pages.codes(layers)
    old = layers.gather_nd(codes, index.kv_slots)
    rows = layers.where(is_kept, pages.rows(layers, kv), old)
    return pages.with_codes(layers, layers.scatter_nd(codes, index.kv_slots, rows))


def attend_draft(
    layers: Layers,
    index: StepIndex,
    q: ITensor,  # [R*S, heads, D]
    block: tuple[ITensor, ITensor],  # k, v of the block slots, [R*S, kv_heads, D]
    pages: Pages,
    context_lens: ITensor,
    gqa: Gqa,
    *,
    block_width: Dim,  # S
) -> ITensor:
    """`Ops.attend` for rows whose K/V are not kept: [R*S, heads * D]."""
    num_heads, head_dim = q.shape[1], q.shape[2]
    kv_heads = block[0].shape[1]
    keys, values = read_pages(layers, pages, index.page_table, like=q)  # [R, kv_heads, keys, D] each
    is_own = _is_in_context(layers, index, context_lens, gqa.mask)  # [R, keys]
    values = _cleared(layers, values, layers.reshape(is_own, (-1, 1, index.num_keys, 1)))

    num_keys = _sum(layers, index.num_keys, block_width)

    def with_block(old: ITensor, own: ITensor) -> ITensor:
        own = layers.transpose(layers.reshape(own, (-1, block_width, kv_heads, head_dim)), (0, 2, 1, 3))
        both = layers.concat((old, own), 2)
        return layers.reshape(both, (-1, kv_heads, 1, num_keys, head_dim))

    grouped = layers.reshape(q, (-1, block_width, kv_heads, num_heads // kv_heads, head_dim))
    grouped = layers.transpose(grouped, (0, 2, 3, 1, 4))  # [R, kv_heads, group, S, D]
    visible = _block_mask(layers, index, context_lens, gqa.mask, block_width)
    attended = _attend(layers, grouped, with_block(keys, block[0]), with_block(values, block[1]), visible, gqa)
    attended = layers.transpose(attended, (0, 3, 1, 2, 4))
    return layers.reshape(attended, (-1, num_heads * head_dim))


def read_pages(layers: Layers, pages: Pages, page_ids: ITensor, *, like: ITensor) -> tuple[ITensor, ITensor]:
    """K and V [N, kv_heads, P * page_size, D], in the type of `like`; `page_ids` int32 [N, P] name the pages."""
    kv_heads, head_dim = pages.tensor.shape[3:]
    gathered = layers.gather(pages.codes(layers), page_ids)  # [N, P, 2, page_size, kv_heads, D]
    rows = layers.dim(page_ids, 0)

    def half(which: int) -> ITensor:
        part = pages.values(layers, layers.slice(gathered, 2, which, 1), is_value=which == 1, like=like)
        return layers.transpose(layers.reshape(part, (rows, -1, kv_heads, head_dim)), (0, 2, 1, 3))

    return half(0), half(1)


def _is_in_context(layers: Layers, index: StepIndex, context_lens: ITensor, mask: AttentionMask) -> ITensor:
    """[R, keys]: stored positions that the first slot of a block sees, and with it any."""
    ends = layers.reshape(context_lens, (-1, 1))
    is_own = layers.binary("LESS", index.key_positions, ends)
    if mask.window is None:
        return is_own
    distance, reach = layers.binary("SUB", ends, index.key_positions), mask.window + int(mask.is_window_anchored)
    return layers.binary("AND", is_own, layers.binary("LESS", distance, reach))


def _block_mask(
    layers: Layers, index: StepIndex, context_lens: ITensor, mask: AttentionMask, block_width: Dim
) -> ITensor:
    """[R, 1, 1, S or 1, keys + S]: context rows below the new context length, then the block, in true positions."""
    rows = layers.dim(context_lens, 0)
    context_lens = layers.reshape(context_lens, (-1, 1))  # [R, 1]
    slots = layers.reshape(layers.arange(block_width), (1, -1))
    query = layers.binary("SUM", context_lens, slots)  # [R, S]
    stored = layers.broadcast(index.key_positions, (rows, index.num_keys))
    key_positions = layers.concat((stored, query), 1)  # [R, keys + S]
    num_columns = _sum(layers, index.num_keys, block_width)
    columns = layers.reshape(layers.arange(num_columns), (1, -1))
    is_block = layers.unary("NOT", layers.binary("LESS", columns, _as_int32(layers, index.num_keys)))
    is_stored = layers.binary("LESS", key_positions, context_lens)
    if mask.first_key:
        is_stored = layers.binary("AND", is_stored, layers.binary("GREATER", key_positions, mask.first_key - 1))
    visible = layers.binary("OR", is_block, is_stored)
    if mask.window is not None and mask.is_window_anchored:
        before_anchor = layers.binary("SUB", context_lens, key_positions)  # negative inside the block
        visible = layers.binary("AND", visible, _not_greater(layers, before_anchor, mask.window))
    visible = layers.reshape(visible, (rows, 1, -1))
    slot_window = None if mask.is_window_anchored else mask.window
    if not mask.is_causal and slot_window is None:
        return layers.reshape(visible, (rows, 1, 1, 1, -1))  # the same for every slot
    distance = layers.binary(
        "SUB", layers.reshape(query, (rows, -1, 1)), layers.reshape(key_positions, (rows, 1, -1))
    )  # [R, S, keys + S]
    if mask.is_causal:
        visible = layers.binary("AND", visible, layers.unary("NOT", layers.binary("LESS", distance, 0)))
    if slot_window is not None:
        is_near = layers.binary("LESS", layers.unary("ABS", distance), slot_window)
        visible = layers.binary("AND", visible, is_near)
    return layers.reshape(visible, (rows, 1, 1, block_width, -1))


def _attend(
    layers: Layers,
    q: ITensor,  # [..., queries, D]
    keys: ITensor,
    values: ITensor,
    mask: ITensor,
    gqa: Gqa,
    sinks: ITensor | None = None,  # float32 [1, ..., queries, 1]
) -> ITensor:
    """softmax(scores, where mask) values over the last two axes; float32 inside, back to q's dtype."""
    last = len(q.shape) - 1
    factor = gqa.score_scale / (gqa.softcap or 1.0)
    scaled = layers.binary("PROD", layers.cast(q, "float32"), factor)
    scores = layers.matmul(scaled, layers.cast(keys, "float32"), is_b_transposed=True)
    if gqa.softcap is not None:
        scores = layers.binary("PROD", layers.tanh(scores), gqa.softcap)
    scores = layers.where(mask, scores, layers.like(float("-inf"), scores))
    if sinks is None:
        weights = layers.softmax(scores, last)
    else:  # the last column, which has no value
        column = layers.broadcast(sinks, (layers.dim(scores, 0), *sinks.shape[1:]))
        with_sinks = layers.softmax(layers.concat((scores, column), last), last)
        weights = layers.drop_ends(with_sinks, last, first=0, last=1)
    return layers.cast_like(layers.matmul(weights, layers.cast(values, "float32")), q)


def _cleared(layers: Layers, values: ITensor, is_visible: ITensor) -> ITensor:
    """0 where no query may look: pages hold what others left there, and a weight of 0 does not hide NaN."""
    return layers.where(is_visible, values, layers.like(0.0, values))


def _columns(layers: Layers, *columns: ITensor) -> ITensor:
    """int32 [N] each -> [N, len(columns)]."""
    return layers.concat([layers.reshape(column, (-1, 1)) for column in columns], 1)


def _not_greater(layers: Layers, a: ITensor, b: ITensor | int) -> ITensor:
    return layers.unary("NOT", layers.binary("GREATER", a, b))


def _sum(layers: Layers, a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    return layers.binary("SUM", b, a) if isinstance(a, int) else layers.binary("SUM", a, b)


def _as_int32(layers: Layers, dim: Dim) -> ITensor:
    """A size as int32 [1, 1]."""
    if isinstance(dim, int):
        return layers.ints([dim], (1, 1))
    return layers.reshape(layers.cast(dim, "int32"), (1, 1))
