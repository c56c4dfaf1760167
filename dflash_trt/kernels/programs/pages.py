"""Operations that find pages by address: attention over K/V, its draft blocks, and rows by position."""

from dataclasses import replace
from typing import Final

from dflash_trt.kernels.programs.program import (
    ANY,
    LARGEST_FLOAT,
    Check,
    Constant,
    Expression,
    FieldRule,
    Kernel,
    Launch,
    Program,
    Stage,
    TensorRule,
    flag,
    positive,
)

STATE: Final = FieldRule("state", 0, ANY)  # an index in `state_pools`
PAGE_SIZE: Final = FieldRule("page_size", 1, 1 << 16)
PAGE_FIELDS: Final = (STATE, flag("page_type"), PAGE_SIZE)  # page_type 0: pages of F, 1: of FP8
PAGE_SCALES: Final = (positive("k_scale"), positive("v_scale"))  # 1 for pages that are not FP8
WINDOW: Final = FieldRule("window", 0, ANY)  # NO_WINDOW: none
SCORE_FACTORS: Final = (FieldRule("softcap", 0.0, LARGEST_FLOAT), positive("score_scale"))  # softcap 0: none

MAX_VERIFY_ROWS: Final = FieldRule("max_verify_rows", 1, 1 << 16)  # of a request that is not a prompt

STATE_POOLS: Final = TensorRule("state_pools", "int64 [states]")
POSITIONS: Final = TensorRule("positions", "[T]")
TOKEN_OFFSETS: Final = TensorRule("token_offsets", "[R + 1]")
CONTEXT_LENS: Final = TensorRule("context_lens", "[R]")
PAGE_TABLE: Final = TensorRule("page_table", "[R, P]")
NEXT_CONTEXT_LENS: Final = TensorRule("next_context_lens", "[R]")

CHECK_PAGE_SIZE: Final = Check(
    subject="page_size",
    holds="page_size & (page_size - 1) == 0",
    expected="a power of two",
    found="{page_size}",
    hint="Build the engine with 16, 32 or 64.",
)


def check_scale(name: str) -> Check:
    return Check(
        subject=name,
        holds=f"page_type == 1 or {name} == 1.0",
        expected="1",
        found=f"{{{name}}}",
        hint="Only FP8 pages are scaled.",
    )


_CHECK_HEADS: Final = Check(
    subject="q",
    holds="heads % kv_heads == 0",
    expected="a multiple of {kv_heads} heads",
    found="{heads}",
    hint="Query heads share K/V heads evenly.",
)
_PAGE_CHECKS: Final = (
    check_scale("k_scale"),
    check_scale("v_scale"),
    CHECK_PAGE_SIZE,
    Check(
        subject="head_dim",
        holds="D % HEAD_DIM_GRAIN == 0",
        expected="a multiple of {HEAD_DIM_GRAIN}",
        found="{D}",
        hint="There are no kernels for it: build the engine with --backend torch and run it on a CPU.",
    ),
)
REQUEST_ARGUMENTS: Final = {
    "num_rows": "T",
    "num_requests": "R",
    "pages_per_request": "P",
    "page_shift": "log2(page_size)",
    "state_index": "state",
    "pages": None,  # only its type is used: the address is in state_pools
}
_NO_QUERIES: Final = dict.fromkeys(("q", "q_out", "k_out", "q_norm", "k_norm", "inv_freq"))


def _write(k: str, v: str, *, limits: str | None = None, when: Expression = "") -> Launch:
    """K and V of the step's rows into their pages; rows at positions from `limits` on are left out."""
    return Launch(
        kernel=Kernel(
            name="rotate_and_store_kernel",
            types={"k": "F", "pages": "pages"},
            equal={"HEAD_DIM": "D", "HAS_NORM": "0", "HAS_ROPE": "0", "STORES_PAGES": "1", "POOLED": "1"}
            | {"HAS_LIMITS": "0" if limits is None else "1"},
            at_least={"REQUESTS": "R"},
        ),
        arguments={"k": k, "v": v, "limits": limits, "k_stride": "kv_heads * D", "v_stride": "kv_heads * D"}
        | _NO_QUERIES
        | {"q_heads": "0", "q_stride": "0", "amplitude": "1.0", "eps": "0.0"},
        when=when,
    )


def _attention(
    query_rows: Expression,
    *,
    num_rows: Expression = "T",
    equal: dict[str, Expression],
    when: Expression = "",
    min_rows: Expression = "1",
    max_rows: Expression = "ANY_ROWS",
) -> Stage:
    """One pass over the requests that have `min_rows` to `max_rows` of all rows, with the tile for `query_rows`.

    The constants of `equal` are those of both kernels, then `HAS_SOFTCAP` and `FIRST_KEY` of the first.
    """
    shared = {"HEAD_DIM": "D", "PLANNED": "0"} | {name: equal[name] for name in ("HAS_BLOCK", "CHUNK")}
    attention = Kernel(
        name="attention_kernel",
        types={"attended": "F", "pages": "pages"},
        equal=shared | {"HAS_SOFTCAP": "softcap > 0.0", "FIRST_KEY": equal["FIRST_KEY"], "POOLED": "1"},
        at_least={"REQUESTS": "R"},
    )
    reduction = Kernel(
        name="attention_reduction_kernel", types={"attended": "F"}, equal=shared, at_least={"REQUESTS": "R"}
    )
    attention_of_tile, reduction_of_tile = (
        replace(kernel, sized={"TILE": "tile"}) for kernel in (attention, reduction)
    )
    return Stage(
        when=when,
        sizes={
            "tile": Constant(name="TILE", kernel=attention, nearest=f"({query_rows}) * heads_per_kv"),
            "parts": Constant(name="PARTS", kernel=attention_of_tile),  # programs that share a tile
            "work_slots": "work_slots(kv_heads * parts, num_multiprocessors)",  # one wave of the GPU
        },
        checks=(
            Check(
                subject="query heads of a K/V head",
                holds="heads_per_kv <= tile",
                expected="at most {tile}",
                found="{heads_per_kv}",
                hint="Build the library with larger --tiles, or the engine with --backend torch to run it on a CPU.",
            ),
        ),
        arguments={"num_rows": num_rows, "min_rows": min_rows, "max_rows": max_rows},
        scratch={
            "partials": "4 * num_partials(tile, kv_heads, D, work_slots)",
            "partial_stats": "4 * num_stats(tile, kv_heads, work_slots)",
        },
        launches=(Launch(kernel=attention_of_tile), Launch(kernel=reduction_of_tile)),
    )


_ATTENTION_ARGUMENTS: Final = REQUEST_ARGUMENTS | {
    "plan": None,  # every program plans for itself
    "block_k_stride": "kv_heads * D",
    "block_v_stride": "kv_heads * D",
    "heads_reciprocal": "heads_reciprocal(heads_per_kv)",
}
_STEP: Final = {"HAS_BLOCK": "0", "CHUNK": "chunk", "FIRST_KEY": "0"}
ATTEND_PAGES: Final = Program(
    name="AttendPages",
    inputs=(
        TensorRule("q", "F [T, heads, D]"),
        TensorRule("k", "F [T, kv_heads, D]", when="shares_kv == 0"),
        TensorRule("v", "F [T, kv_heads, D]", when="shares_kv == 0"),
        *(STATE_POOLS, POSITIONS, TOKEN_OFFSETS, CONTEXT_LENS, PAGE_TABLE),
        TensorRule("sinks", "float32 [heads]"),
    ),
    outputs=(TensorRule("attended", "F [T, heads * D]"),),
    fields=(
        *PAGE_FIELDS,
        WINDOW,
        FieldRule("chunk", 0, ANY),
        MAX_VERIFY_ROWS,
        *(flag("has_sinks"), flag("shares_kv")),
        *PAGE_SCALES,
        *SCORE_FACTORS,
    ),
    checks=(*_PAGE_CHECKS, _CHECK_HEADS),
    stage=Stage(
        sizes={"heads_per_kv": "heads // kv_heads"},
        arguments=_ATTENTION_ARGUMENTS
        | {"block_k": "q", "block_v": "q", "block_rows": "T // R"}  # not read without a block
        | {"max_lag": "max_lag(window, chunk, 0)", "max_lead": "0", "window_step": "1"}
        | {"sinks": "sinks if has_sinks == 1 else None"},
        # Rejected rows are written too: the next step overwrites them.
        launches=(_write("k", "v", when="shares_kv == 0"),),
    ),
    # Verify blocks with small tiles, then prefill chunks with large ones; each skips the other's requests.
    passes=(
        _attention(
            "most_verify_rows(T, R, max_verify_rows)", equal=_STEP, when="is_verify_step(T, R, max_verify_rows) == 1"
        ),
        _attention(
            "max_verify_rows",
            equal=_STEP,
            when="is_verify_step(T, R, max_verify_rows) == 0 and R > 1",
            max_rows="max_verify_rows",
        ),
        _attention("T", equal=_STEP, when="is_verify_step(T, R, max_verify_rows) == 0", min_rows="max_verify_rows + 1"),
    ),
)
SPLIT_LENGTH: Final = FieldRule("split_length", 1, ANY)  # keys
CHECK_GRID: Final = Check(
    subject="programs of attention",
    holds="tile_capacity + work_slots <= MAX_GRID_Y",
    expected="at most {MAX_GRID_Y}",
    found="{tile_capacity + work_slots}",
    hint="Build with a smaller max_num_tokens.",
)
CHECK_SPLITS: Final = Check(
    subject="split_length",
    holds="split_length % key_block == 0",
    expected="a multiple of {key_block}",
    found="{split_length}",
    hint="Splits are made of whole blocks of keys.",
)
_PLANNED: Final = {"HEAD_DIM": "D", "PLANNED": "1", "HAS_BLOCK": "0", "CHUNK": "chunk"}
_ATTENTION_IN_SPLITS: Final = Kernel(
    name="attention_kernel",
    types={"attended": "F", "pages": "pages"},
    equal=_PLANNED | {"HAS_SOFTCAP": "softcap > 0.0", "FIRST_KEY": "0", "POOLED": "1"},
    at_least={"REQUESTS": "R"},
)
_ATTEND_IN_SPLITS: Final = Stage(
    sizes={
        "tile": Constant(name="TILE", kernel=_ATTENTION_IN_SPLITS),
        "key_block": Constant(name="KEY_BLOCK", kernel=_ATTENTION_IN_SPLITS),
        "rows_per_tile": "max(1, tile // heads_per_kv)",
        "tile_capacity": "T // rows_per_tile + R",
        "work_slots": "tile_capacity * (P * page_size // split_length + 2)",  # a window may touch one split more
        "split_blocks": "split_length // key_block",
    },
    checks=(
        Check(
            subject="query heads of a K/V head",
            holds="heads_per_kv <= tile",
            expected="at most {tile}",
            found="{heads_per_kv}",
            hint="Build the engine without --deterministic.",
        ),
        CHECK_GRID,
        CHECK_SPLITS,
    ),
    arguments={"min_rows": "1", "max_rows": "ANY_ROWS", "groups": "kv_heads"},  # groups: as latents call them
    scratch={
        "plan": "4 * PLAN_WORDS * (tile_capacity + work_slots)",
        "partials": "4 * num_partials(tile, kv_heads, D, work_slots)",
        "partial_stats": "4 * num_stats(tile, kv_heads, work_slots)",
    },
    launches=(
        Launch(
            kernel=Kernel(
                name="attention_plan_kernel",
                equal={"TILE": "tile", "KEY_BLOCK": "key_block", "HAS_BLOCK": "0", "CHUNK": "chunk"},
                at_least={"REQUESTS": "R"},
            )
        ),
        Launch(kernel=replace(_ATTENTION_IN_SPLITS, sized={"TILE": "tile"})),
        Launch(
            kernel=Kernel(
                name="attention_reduction_kernel",
                types={"attended": "F"},
                equal=_PLANNED,
                sized={"TILE": "tile"},
                at_least={"REQUESTS": "R"},
            )
        ),
    ),
)
# A row's bits depend on its own position and keys alone: splits of a fixed length, and one tile for all rows.
ATTEND_IN_SPLITS: Final = replace(
    ATTEND_PAGES,
    name="AttendInSplits",
    fields=(SPLIT_LENGTH, *ATTEND_PAGES.fields),
    passes=(_ATTEND_IN_SPLITS,),
    stage=replace(
        ATTEND_PAGES.stage,
        arguments={name: value for name, value in ATTEND_PAGES.stage.arguments.items() if name != "plan"}
        | {"num_rows": "T"},
    ),
)
ATTEND_DRAFT: Final = Program(
    name="AttendDraft",
    inputs=(
        TensorRule("context_k", "F [T, kv_heads, D]", when="shares_kv == 0"),
        TensorRule("context_v", "F [T, kv_heads, D]", when="shares_kv == 0"),
        TensorRule("q", "F [R * S, heads, D]"),
        TensorRule("block_k", "F [R * S, kv_heads, D]"),
        TensorRule("block_v", "F [R * S, kv_heads, D]"),
        *(STATE_POOLS, POSITIONS, TOKEN_OFFSETS, PAGE_TABLE, NEXT_CONTEXT_LENS),
    ),
    outputs=(TensorRule("attended", "F [R * S, heads * D]"),),
    fields=(
        *PAGE_FIELDS,
        WINDOW,
        *(flag("is_causal"), flag("is_window_anchored"), flag("first_key"), flag("shares_kv")),
        *PAGE_SCALES,
        *SCORE_FACTORS,
    ),
    checks=(*_PAGE_CHECKS, _CHECK_HEADS),
    stage=Stage(
        sizes={"heads_per_kv": "heads // kv_heads", "lag": "max_lag(window, NO_CHUNK, is_window_anchored)"},
        arguments=_ATTENTION_ARGUMENTS
        | {"context_lens": "next_context_lens", "block_rows": "S", "sinks": None, "has_sinks": "0"}
        | {"max_lag": "lag", "max_lead": "max_lead(lag, is_causal, is_window_anchored)"}
        | {"window_step": "1 - is_window_anchored"},
        launches=(_write("context_k", "context_v", limits="next_context_lens", when="shares_kv == 0"),),
    ),
    passes=(
        _attention("S", num_rows="R * S", equal={"HAS_BLOCK": "1", "CHUNK": "NO_CHUNK", "FIRST_KEY": "first_key"}),
    ),
)
WRITE_DRAFT_CONTEXT: Final = Program(
    name="WriteDraftContext",
    inputs=(
        TensorRule("context_k", "F [T, kv_heads, D]"),
        TensorRule("context_v", "F [T, kv_heads, D]"),
        *(STATE_POOLS, POSITIONS, TOKEN_OFFSETS, PAGE_TABLE, NEXT_CONTEXT_LENS),
    ),
    outputs=(TensorRule("written", "[1]"),),  # for who reads the pages later in the step; its value means nothing
    fields=(*PAGE_FIELDS, *PAGE_SCALES),
    checks=_PAGE_CHECKS,
    stage=Stage(arguments=REQUEST_ARGUMENTS, launches=(_write("context_k", "context_v", limits="next_context_lens"),)),
)
PREVIOUS_ROWS: Final = Program(
    name="PreviousRows",
    inputs=(TensorRule("x", "F [T, C]"), *(STATE_POOLS, POSITIONS, TOKEN_OFFSETS, CONTEXT_LENS, PAGE_TABLE)),
    outputs=(TensorRule("before", "F [T, C]"),),
    fields=(STATE, PAGE_SIZE),
    checks=(CHECK_PAGE_SIZE,),
    stage=Stage(
        arguments=REQUEST_ARGUMENTS | {"width": "C"},
        launches=(
            Launch(
                kernel=Kernel(
                    name="previous_rows_kernel", types={"x": "F"}, equal={"POOLED": "1"}, at_least={"REQUESTS": "R"}
                )
            ),
        ),
    ),
)
