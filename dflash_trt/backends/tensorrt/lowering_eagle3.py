"""The ops of EAGLE-3 in plain TensorRT layers; `backends/torch/paged_rows.py` is the definition of its features.

Pages of features are values here, as those of K/V are: a write makes a new tensor, which the step returns as the
state's output. The features that a chain begins with are those of tokens of the same step, so nobody reads them from
pages.
"""

from collections.abc import Sequence

from dflash_trt.backends.tensorrt.layers import ITensor, Layers
from dflash_trt.backends.tensorrt.lowering_attention import StepIndex
from dflash_trt.network.ops import Acceptance, Rows, StepInputs, TokenBlocks
from dflash_trt.network.state import RowCache


def previous_rows(
    layers: Layers,
    x: ITensor,  # F [T, H]
    inputs: StepInputs[ITensor],
    index: StepIndex,
    cache: RowCache[ITensor],
) -> tuple[ITensor, ITensor]:
    """The result of `Ops.previous_rows`, and the pages behind it."""
    requests, positions, pages = index.request_of_row, inputs.positions, cache.tensor
    row = layers.arange(layers.dim(inputs.token_ids, 0))
    starts = layers.drop_ends(inputs.token_offsets, 0, first=0, last=1)
    above = layers.gather(x, layers.binary("MAX", layers.binary("SUB", row, 1), 0))
    before = layers.binary("MAX", layers.binary("SUB", positions, 1), 0)
    stored = layers.gather_nd(pages, _places(layers, requests, before, inputs.page_table, pages.shape[1]))
    is_inside = layers.reshape(layers.binary("GREATER", positions, 0), (-1, 1))
    stored = layers.where(is_inside, stored, layers.like(0.0, stored))
    is_first = layers.reshape(layers.binary("EQUAL", row, layers.gather(starts, requests)), (-1, 1))
    places = _places(layers, requests, positions, inputs.page_table, pages.shape[1])
    return layers.where(is_first, stored, above), layers.scatter_nd(pages, places, x)


def accepted_rows(
    layers: Layers,
    x: ITensor,  # F [T, H]
    acceptance: Acceptance[ITensor],
    inputs: StepInputs[ITensor],
) -> ITensor:
    """`Ops.context_rows`, F [R, H]: of the last accepted tokens. A request without tokens has some row."""
    starts = layers.drop_ends(inputs.token_offsets, 0, first=0, last=1)
    num_kept = layers.binary("SUB", acceptance.next_context_lens, inputs.context_lens)
    row = layers.binary("SUB", layers.binary("SUM", starts, num_kept), 1)
    return layers.gather(x, layers.binary("MAX", row, 0))


def chain_blocks(
    layers: Layers, acceptance: Acceptance[ITensor], drafts: Sequence[ITensor], page_table: ITensor
) -> TokenBlocks[ITensor]:
    """See `Ops.chain_blocks`."""
    tokens = [layers.reshape(acceptance.bonus_tokens, (-1, 1)), *drafts]
    starts = layers.reshape(acceptance.next_context_lens, (-1, 1))
    slots = layers.reshape(layers.arange(len(tokens)), (1, -1))
    rows = Rows(
        positions=layers.reshape(layers.binary("SUM", starts, slots), (-1,)),
        token_offsets=None,
        context_lens=acceptance.next_context_lens,
        page_table=page_table,
        keeps_kv=False,
    )
    return TokenBlocks(token_ids=layers.reshape(layers.concat(tokens, 1), (-1,)), rows=rows)


def _places(
    layers: Layers, requests: ITensor, positions: ITensor, page_table: ITensor, page_size: int
) -> ITensor:  # int32 [T, 2]: page and offset
    page_index = layers.binary("DIV", positions, page_size)
    offset = layers.binary("SUB", positions, layers.binary("PROD", page_index, page_size))
    columns = [layers.reshape(column, (-1, 1)) for column in (requests, page_index)]
    page = layers.gather_nd(page_table, layers.concat(columns, 1))
    return layers.concat([layers.reshape(column, (-1, 1)) for column in (page, offset)], 1)
