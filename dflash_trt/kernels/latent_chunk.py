"""Direct attention of prompts that begin in this step: one GEMM makes every head's keys and values.

The rows of such a request see only each other, so keys are read from the GEMM's output and no page is. A program
computes a tile of query rows of one head. PyTorch's GEMM computes all rows of a step; a plugin, which knows only their
number, uses the kernel here, with the plan of the following attention.
"""

# mypy: ignore-errors
# ruff: noqa: N803, SIM102  (constants of a kernel are upper case, and branches of their own)

import triton
import triton.language as tl

from dflash_trt.kernels.attention_partition import load_range
from dflash_trt.kernels.attention_reduction import LOG2_E, absorb
from dflash_trt.kernels.latent_attention import is_direct, load_columns


@triton.jit
def is_state(state_pools, state_index):
    """An address of 0 is none: see rope_and_pages.py."""
    return tl.load(state_pools + state_index) != 0


@triton.jit(do_not_specialize=["min_direct_rows", "heads", "state_index"])
def latent_kv_kernel(
    rows,  # F [N, LATENT + ROPE], of which the latents are read
    k_factor,  # F [heads, NOPE, LATENT]
    v_factor,  # F [heads, VALUE, LATENT]
    kv,  # out, F [N, heads, NOPE + VALUE]; other requests' rows are left alone
    state_pools,  # int64 [states]
    plan,  # int32 [items, PLAN_WORDS], of tiles for one head
    token_offsets,  # int32 [R + 1]
    context_lens,  # int32 [R]
    min_direct_rows,
    heads,
    state_index,  # in state_pools
    NOPE: tl.constexpr,
    VALUE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,  # columns of one factor, per program
    LATENT_BLOCK: tl.constexpr,
):
    """Grid: (heads * (blocks of COLUMNS of K, and of V), tile_capacity + 1)."""
    request, token, num_rows, _, _, _ = load_range(plan, tl.program_id(1))
    if num_rows == 0:
        return
    if not is_direct(request, token_offsets, context_lens, min_direct_rows):
        return
    if not is_state(state_pools, state_index):
        return
    k_blocks: tl.constexpr = (NOPE + COLUMNS - 1) // COLUMNS
    blocks: tl.constexpr = k_blocks + (VALUE + COLUMNS - 1) // COLUMNS
    head = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    is_key = block < k_blocks
    size = tl.where(is_key, NOPE, VALUE)
    column = tl.where(is_key, block, block - k_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    in_tile = tl.arange(0, TILE)
    # The rest of a tile, or of a factor, repeats its last row.
    row = (token + tl.minimum(in_tile, num_rows - 1)).to(tl.int64)[:, None]
    factor = tl.where(is_key, k_factor, v_factor) + head.to(tl.int64) * (size * LATENT)
    of_factor = factor + (tl.minimum(column, size - 1) * LATENT)[:, None]
    products = tl.zeros([TILE, COLUMNS], tl.float32)
    for first in range(0, LATENT, LATENT_BLOCK):
        in_latent = first + tl.arange(0, LATENT_BLOCK)
        latent = load_latents(rows + row * (LATENT + ROPE), in_latent, LATENT, LATENT_BLOCK)
        of_columns = load_latents(of_factor, in_latent, LATENT, LATENT_BLOCK)
        products = tl.dot(latent, tl.trans(of_columns), products, input_precision="tf32x3")
    out = kv + (row * heads + head) * (NOPE + VALUE) + (tl.where(is_key, 0, NOPE) + column)[None, :]
    tl.store(out, products, mask=(in_tile < num_rows)[:, None] & (column < size)[None, :])


@triton.jit
def load_latents(rows, in_latent, LATENT: tl.constexpr, LATENT_BLOCK: tl.constexpr):
    """A block of the features of each row, from pointers [ROWS, 1]; zeros after the last feature."""
    if LATENT % LATENT_BLOCK == 0:
        return tl.load(rows + in_latent[None, :])
    return tl.load(rows + in_latent[None, :], mask=in_latent[None, :] < LATENT, other=0.0)


# As in attention.py: one build serves steps of all sizes. Strides are the engine's, and nearly always multiples.
@triton.jit(do_not_specialize=["min_direct_rows", "heads", "state_index"])
def latent_chunk_kernel(
    q_nope,  # F, N rows of heads q_pitch apart, NOPE each, the rows q_stride
    queries,  # F [N, heads, LATENT + ROPE], of which the rotated part is read
    kv,  # F [N, heads, NOPE + VALUE]
    rows,  # F [N, LATENT + ROPE], of which the rotated key is read
    attended,  # out, F [N, heads, VALUE]; other requests' rows are left alone
    state_pools,  # int64 [states]; read only with POOLED: nothing is done without a state
    plan,  # int32 [items, PLAN_WORDS], of tiles for one head
    token_offsets,  # int32 [R + 1]
    context_lens,  # int32 [R]
    score_scale,
    min_direct_rows,
    q_stride,
    q_pitch,
    heads,
    state_index,  # in state_pools
    NOPE: tl.constexpr,
    VALUE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    NOPE_DIM: tl.constexpr,  # padded to powers of two
    VALUE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    TILE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    POOLED: tl.constexpr,
):
    """Grid: (heads, tile_capacity + 1)."""
    head = tl.program_id(0)
    request, token, num_rows, position, _, _ = load_range(plan, tl.program_id(1))
    if num_rows == 0:
        return
    if not is_direct(request, token_offsets, context_lens, min_direct_rows):
        return
    if POOLED:
        if not is_state(state_pools, state_index):
            return
    in_tile = tl.arange(0, TILE)
    in_nope, in_rope, in_value = tl.arange(0, NOPE_DIM), tl.arange(0, ROPE_DIM), tl.arange(0, VALUE_DIM)
    # The rest of a tile, or of a block of keys, repeats its last row.
    row = (token + tl.minimum(in_tile, num_rows - 1)).to(tl.int64)[:, None]
    q_n = load_columns(q_nope + row * q_stride + head.to(tl.int64) * q_pitch, in_nope, NOPE, NOPE_DIM)
    q_r = load_columns(queries + (row * heads + head) * (LATENT + ROPE) + LATENT, in_rope, ROPE, ROPE_DIM)
    num_keys = position + num_rows  # the first row of the request is at position 0
    first_row = token - position
    maximum = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    output = tl.zeros([TILE, VALUE_DIM], tl.float32)
    for first_key in range(0, num_keys, KEY_BLOCK):
        key = first_key + tl.arange(0, KEY_BLOCK)
        key_row = (first_row + tl.minimum(key, num_keys - 1)).to(tl.int64)[:, None]
        of_head = kv + (key_row * heads + head) * (NOPE + VALUE)
        k_n = load_columns(of_head, in_nope, NOPE, NOPE_DIM)
        k_r = load_columns(rows + key_row * (LATENT + ROPE) + LATENT, in_rope, ROPE, ROPE_DIM)
        v = load_columns(of_head + NOPE, in_value, VALUE, VALUE_DIM)
        products = tl.dot(q_r, tl.trans(k_r), input_precision="tf32x3")
        products = tl.dot(q_n, tl.trans(k_n), products, input_precision="tf32x3")
        products = tl.where(key[None, :] <= (position + in_tile)[:, None], products, float("-inf"))
        maximum, total, output = absorb(products, score_scale * LOG2_E, v, maximum, total, output)
    out = attended + (row * heads + head) * VALUE + in_value[None, :]
    mask = (in_tile < num_rows)[:, None] & (in_value < VALUE)[None, :]
    tl.store(out, output / total[:, None], mask=mask)
