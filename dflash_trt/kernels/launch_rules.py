"""Launch rules of attention and experts, called in Python and compiled into the plugin library.

`rules.py` exports the constants and, as expressions, the functions. So a rule is one `return` of integer arithmetic on
its arguments, none of them negative, and on the constants of this file.
"""

from typing import Final

ANY_DISTANCE: Final = 1 << 30  # max_lag, max_lead: no limit
ANY_ROWS: Final = (1 << 31) - 1  # max_rows: no limit
NO_WINDOW: Final = 0
NO_CHUNK: Final = 0
PROGRAMS_PER_MULTIPROCESSOR: Final = 2  # for attention: shared memory and registers of all tiles but 128 allow it
FP8_MIN_TILE: Final = 64  # rows of a tile over FP8 pages in 16-bit networks
# A node's partial results are laid out for this many, so that a plan's workspace serves any GPU of its architecture.
MAX_MULTIPROCESSORS: Final = 192
HEAD_DIM_GRAIN: Final = 16  # every head_dim is a multiple
MAX_HEAD_DIM: Final = 512  # in a target
MAX_DRAFT_HEAD_DIM: Final = 256  # no kernel has a draft block of wider heads
WIDE_HEAD_DIM: Final = 256  # for wider heads a program of attention computes a part
WIDE_MAX_GROUP: Final = 16  # query heads of a K/V head that is wider: what the smallest tile holds
# Of attention with splits of a fixed length: for the longest context, so that a multiple fills a GPU with one request.
FIXED_SPLITS: Final = 8
MIN_SPLIT_LENGTH: Final = 256  # keys: fewer are not worth a split
SPLIT_GRAIN: Final = 128  # keys: a multiple of what a program reads at once, in every dtype
LATENT_KEY_BLOCK: Final = 32  # in attention over latents
MIN_KEY_BLOCK: Final = 16  # minimum of the tensor cores
MIN_DIRECT_ROWS: Final = 64  # rows of a starting prompt: fewer do not fill a tile of one head
# Entries of a tile of experts; an entry is one choice of one row.
MIN_TILE_TOKENS: Final = 16
MID_TILE_TOKENS: Final = 32
MAX_TILE_TOKENS: Final = 64
# Rows of a tile of a linear layer of integers.
MIN_INT8_TOKENS: Final = 16
MID_INT8_TOKENS: Final = 32
FULL_INT8_TOKENS: Final = 64
MAX_INT8_TOKENS: Final = 128
MAX_GRID_Y: Final = 65_535  # programs of a launch along y
CONTEXT_PIECE_ROWS: Final = 512  # rows of a step whose attention over all ranks' positions is exchanged at once
PLAN_WORDS: Final = 8  # int32, of an item of a plan of attention
# Forms of packed weights. From FP8_BLOCK to INT4 they have block scales, and from MXFP4 to INT4 a byte has two codes.
PLAIN, FP8, FP8_BLOCK, MXFP4, NVFP4, INT4, INT8 = range(7)


def work_slots(*, kv_heads: int, num_multiprocessors: int) -> int:
    """Programs per K/V head that run at once: one wave of the GPU, which the step's work is cut into."""
    return max(1, num_multiprocessors * PROGRAMS_PER_MULTIPROCESSOR // kv_heads)


def heads_reciprocal(*, heads_per_kv: int) -> int:
    """Factor that replaces a division by heads_per_kv: see `attention.query_row`."""
    return (65536 + heads_per_kv - 1) // heads_per_kv


def num_partials(*, tile: int, kv_heads: int, head_dim: int, num_slots: int) -> int:
    """float32 elements of partial results: at most one for each slot."""
    return num_slots * kv_heads * tile * head_dim


def num_stats(*, tile: int, kv_heads: int, num_slots: int) -> int:
    """float32 elements that say how partial results are weighed: a maximum and a sum for each row."""
    return num_slots * kv_heads * tile * 2


def max_lag(*, window: int, chunk: int, is_window_anchored: int) -> int:
    """Largest distance from a query to the first key it sees; from the anchor if the window is anchored."""
    return min(
        ANY_DISTANCE if window == NO_WINDOW else window if is_window_anchored else window - 1,
        ANY_DISTANCE if chunk == NO_CHUNK else chunk - 1,
    )


def max_lead(*, lag: int, is_causal: int, is_window_anchored: int) -> int:
    """From a query to the last key it sees. `lag` is its max_lag."""
    return 0 if is_causal else ANY_DISTANCE if is_window_anchored else lag


def is_verify_step(*, num_rows: int, num_requests: int, num_verify_rows: int) -> int:
    """1 if no request needs to have more than `num_verify_rows` rows: attention is then one pass over all of them.

    In other steps prefill chunks have tiles of their own, in a pass that skips verify blocks, as another skips the
    chunks. Any answer gives right results.
    """
    return 1 if num_requests * num_verify_rows >= num_rows else 0


def most_verify_rows(*, num_rows: int, num_requests: int, num_verify_rows: int) -> int:
    """The most rows that one request of a verify step can have: with a tile for them, its keys are read once."""
    return max(1, min(num_verify_rows, num_rows - num_requests + 1))


def fixed_split_length(*, max_keys: int) -> int:
    """Keys of a split of a fixed length, for requests of at most `max_keys` keys."""
    return (
        (max(MIN_SPLIT_LENGTH, (max_keys + FIXED_SPLITS - 1) // FIXED_SPLITS) + SPLIT_GRAIN - 1)
        // SPLIT_GRAIN
        * SPLIT_GRAIN
    )


def latent_slots(*, groups: int, num_multiprocessors: int) -> int:
    """Programs of a group of heads that run at once over latents: a multiprocessor has registers for one."""
    return max(1, num_multiprocessors // groups)


def latent_key_block(*, page_size: int, is_float32: int) -> int:
    """Keys of a block, which lie in one page, unless pages are smaller than the least of a block."""
    return max(MIN_KEY_BLOCK, min(MIN_KEY_BLOCK if is_float32 == 1 else LATENT_KEY_BLOCK, page_size))


def min_direct_rows(*, num_rows: int, num_requests: int, num_verify_rows: int) -> int:
    """Rows from which a starting prompt is attended directly; ANY_ROWS if no request can have as many.

    No verify block has more than num_verify_rows. A step without more rows than verify blocks may have has no prompt,
    as far as shapes tell, and any answer gives right results.
    """
    return (
        max(MIN_DIRECT_ROWS, num_verify_rows + 1)
        if num_rows >= max(MIN_DIRECT_ROWS, num_requests * num_verify_rows + 1)
        else ANY_ROWS
    )


def row_tiles(*, num_rows: int, num_requests: int, rows_per_tile: int, min_rows: int) -> int:
    """Tiles of query rows at most: each request of at least `min_rows` rows may have one that is not full."""
    return num_rows // rows_per_tile + min(num_requests, num_rows // min_rows)


def tile_tokens(*, num_entries: int, num_experts: int, widens_weights: int) -> int:
    """Entries of a tile: the fewest that hold what an expert gets on average.

    Packed weights that are widened to float32 leave no room for more in the 227 KiB of a multiprocessor.
    """
    return (
        MIN_TILE_TOKENS
        if widens_weights == 1
        else MIN_TILE_TOKENS
        if MIN_TILE_TOKENS * num_experts >= num_entries
        else MID_TILE_TOKENS
        if MID_TILE_TOKENS * num_experts >= num_entries
        else MAX_TILE_TOKENS
    )


def int8_tile_tokens(*, num_rows: int) -> int:
    """Rows of a tile of a linear layer of integers: the fewest that hold all, or the most there are."""
    return (
        MIN_INT8_TOKENS
        if num_rows <= MIN_INT8_TOKENS
        else MID_INT8_TOKENS
        if num_rows <= MID_INT8_TOKENS
        else FULL_INT8_TOKENS
        if num_rows <= FULL_INT8_TOKENS
        else MAX_INT8_TOKENS
    )


def max_tiles(*, num_entries: int, num_experts: int, tokens: int) -> int:
    """Tiles for any choice: each expert that has entries may have one that is not full."""
    return min(num_entries, num_experts) + (num_entries - min(num_entries, num_experts)) // tokens


def row_bytes(*, form: int, num_columns: int, element_bytes: int) -> int:
    """Of a row of codes; `element_bytes` are those of F."""
    return (
        num_columns * element_bytes
        if form == PLAIN
        else num_columns // 2
        if form >= MXFP4 and form < INT8
        else num_columns
    )


def block_row_bytes(*, form: int, num_columns: int) -> int:
    """Of a row of block scales, as the format has them; 0 without."""
    return (
        4 * ((num_columns + 127) // 128)
        if form == FP8_BLOCK
        else num_columns // 32
        if form == MXFP4
        else num_columns // 16
        if form == NVFP4
        else 2 * (num_columns // 32)
        if form == INT4
        else 0
    )
