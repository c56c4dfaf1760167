"""Multi-head latent attention over pages: absorbed, and direct for prompts that begin in the step."""

from dataclasses import replace
from typing import Final

from dflash_trt.kernels.programs.pages import (
    CHECK_GRID,
    CHECK_PAGE_SIZE,
    CHECK_SPLITS,
    CONTEXT_LENS,
    MAX_VERIFY_ROWS,
    PAGE_FIELDS,
    PAGE_TABLE,
    POSITIONS,
    REQUEST_ARGUMENTS,
    SPLIT_LENGTH,
    STATE_POOLS,
    TOKEN_OFFSETS,
    check_scale,
)
from dflash_trt.kernels.programs.program import (
    Check,
    Constant,
    FieldRule,
    Kernel,
    Launch,
    Program,
    Stage,
    TensorRule,
    positive,
)

_SIZES: Final = {"LATENT": "latent_dim", "ROPE": "row - latent_dim"}
_WRITE: Final = Kernel(
    name="write_latents_kernel", types={"rows": "F", "pages": "pages"}, equal={"ROW": "row"}, at_least={"REQUESTS": "R"}
)
_ATTENTION: Final = Kernel(
    name="latent_attention_kernel",
    types={"q": "F", "pages": "pages"},
    equal=_SIZES
    | {"KEY_BLOCK": "key_block", "IS_IN_ONE_PAGE": "page_size % key_block == 0", "POOLED": "1"}
    | {"HAS_LOG_SUMS": "0"},
)
_PARTITION: Final = {"TILE": "tile", "KEY_BLOCK": "key_block", "HAS_BLOCK": "0", "CHUNK": "NO_CHUNK"}
_PLAN: Final = Kernel(name="attention_plan_kernel", equal=_PARTITION, at_least={"REQUESTS": "R"})
_REDUCTION: Final = Kernel(
    name="attention_reduction_kernel",
    types={"attended": "F"},
    equal=_PARTITION | {"HEAD_DIM": "latent_dim", "PLANNED": "1"},
    at_least={"REQUESTS": "R"},
)
_DIRECT_SIZES: Final = _SIZES | {"NOPE": "nope", "VALUE": "value"}
_CHUNK: Final = Kernel(name="latent_chunk_kernel", types={"attended": "F"}, equal=_DIRECT_SIZES | {"POOLED": "1"})
_KV: Final = Kernel(name="latent_kv_kernel", types={"kv": "F"}, equal=_DIRECT_SIZES | {"TILE": "tile"})

_ABSORBED: Final = Stage(
    sizes={
        "key_block": "latent_key_block(page_size, is_float32)",
        "tile": Constant(name="TILE", kernel=_ATTENTION),
        "group_heads": "largest_divisor(heads, tile)",  # of a tile: all heads, or as many of one row as divide them
        "groups": "heads // group_heads",
        "rows_per_tile": "tile // group_heads if groups == 1 else 1",
        "tile_capacity": "row_tiles(T, R, rows_per_tile, 1)",
        "work_slots": "latent_slots(groups, num_multiprocessors)",
        "min_direct_rows": "min_direct_rows(T, R, max_verify_rows)",
    },
    arguments=REQUEST_ARGUMENTS
    | {"rows": "own", "log_sums": None, "sinks": None, "has_sinks": "0"}
    | {"kv_heads": "groups", "heads_per_kv": "group_heads", "heads_reciprocal": "heads_reciprocal(group_heads)"}
    | {"max_lag": "ANY_DISTANCE", "window_step": "1", "min_rows": "1", "max_rows": "ANY_ROWS"}
    | {"block_rows": "0", "split_blocks": "0", "direct_columns": "heads * value"},
    scratch={
        "plan": "4 * PLAN_WORDS * (tile_capacity + work_slots)",
        "partials": "4 * num_partials(tile, groups, latent_dim, work_slots)",
        "partial_stats": "4 * num_stats(tile, groups, work_slots)",
        "kept": "T * row * element_bytes if page_type == 1 else 0",  # what FP8 pages hold of the rows
    },
    launches=tuple(Launch(kernel=kernel) for kernel in (_WRITE, _PLAN, _ATTENTION, _REDUCTION)),
)
# Another step of as many rows and fewer requests may have a prompt. Keys are not split: there are tiles enough.
_DIRECT: Final = Stage(
    when="min_direct_rows != ANY_ROWS",
    sizes={
        "tile": Constant(name="TILE", kernel=_CHUNK),
        "key_block": Constant(name="KEY_BLOCK", kernel=_CHUNK),
        "tile_capacity": "row_tiles(T, R, tile, min_direct_rows)",
    },
    arguments={
        "queries": "q",
        "rows": "kept if page_type == 1 else own",
        "attended": "direct",
        "rows_per_tile": "tile",
        "work_slots": "1",
        "min_rows": "min_direct_rows",
        "q_stride": "nope",
        "q_pitch": "T * nope",
    },
    scratch={
        "plan": "4 * PLAN_WORDS * (row_tiles(T, R, tile, MIN_DIRECT_ROWS) + 1) if T >= MIN_DIRECT_ROWS else 0",
        "kv": "T * heads * (nope + value) * element_bytes if T >= MIN_DIRECT_ROWS else 0",
    },
    launches=tuple(Launch(kernel=kernel) for kernel in (_PLAN, _KV, _CHUNK)),
)
ATTEND_LATENTS: Final = Program(
    name="AttendLatents",
    inputs=(
        TensorRule("q", "F [T, heads, row]"),
        TensorRule("own", "F [T, row]"),
        TensorRule("q_nope", "F [heads, T, nope]"),
        TensorRule("k_factor", "F [heads, nope, latent_dim]"),
        TensorRule("v_factor", "F [heads, value, latent_dim]"),
        *(STATE_POOLS, POSITIONS, TOKEN_OFFSETS, CONTEXT_LENS, PAGE_TABLE),
    ),
    outputs=(TensorRule("attended", "F [T, heads, latent_dim]"), TensorRule("direct", "F [T, heads, value]")),
    fields=(
        *PAGE_FIELDS,
        FieldRule("latent_dim", 1, 1 << 16),
        MAX_VERIFY_ROWS,
        *(positive("k_scale"), positive("score_scale")),
    ),
    checks=(
        CHECK_PAGE_SIZE,
        check_scale("k_scale"),
        Check(
            subject="own",
            holds="row > latent_dim",
            expected="more features than the latent's {latent_dim}",
            found="{row}",
            hint="The rotated key stands behind the latent.",
        ),
    ),
    stage=_ABSORBED,
    passes=(_DIRECT,),
)
# For engines whose rows have the same bits in every step: absorbed for all rows, in splits of a fixed length.
ATTEND_LATENTS_IN_SPLITS: Final = replace(
    ATTEND_LATENTS,
    name="AttendLatentsInSplits",
    fields=(SPLIT_LENGTH, *ATTEND_LATENTS.fields),
    stage=replace(
        _ABSORBED,
        sizes={
            **_ABSORBED.sizes,
            "work_slots": "tile_capacity * (P * page_size // split_length + 2)",
            "split_blocks": "split_length // key_block",
            "min_direct_rows": "ANY_ROWS",
        },
        checks=(CHECK_GRID, CHECK_SPLITS),
        arguments={name: value for name, value in _ABSORBED.arguments.items() if name != "split_blocks"},
    ),
    passes=(),
)
HEAD_PRODUCT: Final = Program(
    name="HeadProduct",
    inputs=(TensorRule("x", "F [N, heads, I]"), TensorRule("factor", "F [heads, I, O]")),
    outputs=(TensorRule("out", "F [N, heads, O]"),),
    fields=(),
    stage=Stage(
        arguments={"num_rows": "N", "factor_stride": "I * O", "out_stride": "O"},
        launches=(
            Launch(
                kernel=Kernel(
                    name="head_product_kernel",
                    types={"x": "F"},
                    equal={"IN": "I", "OUT_SIZE": "O", "IS_TRANSPOSED": "0"},
                )
            ),
        ),
    ),
)
