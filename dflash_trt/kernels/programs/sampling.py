"""Sampling with acceptance, under logit rules and token masks if a step has any, log probabilities, and drafts."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from dflash_trt.core.dtype import num_bytes_of
from dflash_trt.core.logit_rules import MAX_BAD_WORD_TOKENS, MAX_BIASES
from dflash_trt.core.sampling import MAX_TOP_LOGPROBS, STEP_SAMPLING_FIELDS
from dflash_trt.kernels.programs.program import Check, FieldRule, Kernel, Launch, Program, Stage, TensorRule, flag
from dflash_trt.kernels.sampling_scratch import DRAFT_GRIDS, DRAFT_SCRATCH, SAMPLING_GRIDS, SCRATCH, TILE, Scratch

_MAX_TOPK: Final = 1 << 16
_TILES: Final = {"TILES": "num_tiles"}
_CAPACITIES: Final = {  # of kernels with room for a size
    "row_bounds": _TILES,
    "row_threshold": _TILES,
    "test_drafts": _TILES | {"DRAFT_TOPK": "draft_topk"},
    "draw": _TILES,
    "accept": {"WIDTH": "S"},
    "combine_argmax": _TILES | {"DRAFT_TOPK": "draft_topk"},
}
_WITHOUT_LOGITS: Final = ("row_bounds", "accept", "count_tokens")

# Rules by slot: `kernels.rule_tensors.RuleTensors`.
RULE_TENSORS: Final = (
    TensorRule("has_rules", "[slots]"),
    TensorRule("num_prompt_tokens", "[slots]"),
    TensorRule("penalties", "float32 [slots, 3]"),
    TensorRule("num_biases", "[slots]"),
    TensorRule("bias_tokens", f"[slots, {MAX_BIASES}]"),
    TensorRule("bias_values", f"float32 [slots, {MAX_BIASES}]"),
    TensorRule("bias_ends", f"[slots, {MAX_BIASES}]"),
    TensorRule("prefixes", f"[slots, {MAX_BIASES}, {MAX_BAD_WORD_TOKENS}]"),
    TensorRule("tokens", "[slots, max_positions]"),
)
# Masks of the step: `kernels.rule_tensors.MaskTensors`. One entry of `row_masks` says that nothing is adjusted.
MASK_TENSORS: Final = (
    TensorRule("row_masks", "[adjusted]"),
    TensorRule("mask_bits", "[masks, ceil_div(vocabulary, 32)]"),
)


def _sizes_of_rows(width: str) -> Stage:
    """Sizes of launches over `width` rows of logits of each request."""
    return Stage(
        sizes={"num_tiles": f"ceil_div(vocabulary, {TILE})"},
        arguments={"num_requests": "R", "num_rows": f"R * {width}", "width": width, "num_slots": width}
        | {"vocab_size": "vocabulary"},
    )


def _scratch(tensors: Iterable[Scratch], *, width: str) -> dict[str, str]:
    return {
        x.name: f"{num_bytes_of(x.dtype)} * R * {width} * ({x.per_row} + {x.per_tile} * num_tiles)" for x in tensors
    }


def _launches(
    kernels: Iterable[str], *, equal: Mapping[str, str] | None = None, logits: str = "logits"
) -> tuple[Launch, ...]:
    """In the order of `kernels`, which read `logits`: the node's, or float32 scores."""
    is_given = logits == "logits"
    return tuple(
        Launch(
            kernel=Kernel(
                name=f"{name}_kernel",
                types={} if name in _WITHOUT_LOGITS else {"logits": "F" if is_given else "float32"},
                equal=equal or {},
                at_least=_CAPACITIES.get(name, {}),
            ),
            arguments={} if is_given else {"logits": logits},
        )
        for name in kernels
    )


SAMPLE_AND_ACCEPT: Final = Program(
    name="SampleAndAccept",
    inputs=(
        TensorRule("logits", "F [L, vocabulary]"),
        TensorRule("token_ids", "[T]"),
        TensorRule("positions", "[T]"),
        TensorRule("token_offsets", "[R + 1]"),
        TensorRule("context_lens", "[R]"),
        TensorRule("logit_rows", "[R, S]"),
        TensorRule("num_candidates", "[R]"),
        TensorRule("draft_topk_ids", "[R, (S - 1) * draft_topk]", when="draft_topk > 0"),
        TensorRule("draft_topk_probs", "float32 [R, (S - 1) * draft_topk]", when="draft_topk > 0"),
        *(TensorRule(row.name, f"{row.dtype} [R]".removeprefix("int32 ")) for row in STEP_SAMPLING_FIELDS),
        TensorRule("slot_ids", "int64 [R]"),
        *MASK_TENSORS,
        *RULE_TENSORS,
    ),
    outputs=(
        TensorRule("emitted_tokens", "[R, S]"),
        TensorRule("emitted_logprobs", "float32 [R, S]"),
        TensorRule("num_accepted", "[R]"),
        TensorRule("bonus_tokens", "[R]"),
        TensorRule("next_context_lens", "[R]"),
    ),
    fields=(FieldRule("draft_topk", 0, _MAX_TOPK),),
    checks=(
        Check(
            subject="logits",
            holds="L >= R * S",
            expected="{R * S} rows or more",
            found="{L}",
            hint="Pass the rows of all tokens of each verify block.",
        ),
        Check(
            subject="row_masks",
            holds="adjusted == 1 or adjusted == R * S + 1",
            expected="1 entry, or 1 more than rows of logits, {R * S}",
            found="{adjusted}",
            hint="The last entry belongs to no row.",
        ),
    ),
    stage=replace(_sizes_of_rows("S"), scratch=_scratch(SCRATCH, width="S")),
    passes=(
        Stage(when="adjusted == 1", launches=_launches(SAMPLING_GRIDS)),
        Stage(
            when="adjusted > 1",
            scratch={"scores": "4 * (adjusted - 1) * vocabulary", "counts": "4 * R * vocabulary"},
            launches=(
                *_launches(("count_tokens", "adjust")),
                *_launches(SAMPLING_GRIDS, logits="scores"),
                *_launches(("raw_logprobs",)),
            ),
        ),
    ),
)
SCORE_ROWS: Final = Program(
    name="ScoreRows",
    inputs=(
        TensorRule("logits", "F [L, vocabulary]"),
        TensorRule("scored_rows", "int64 [scored]"),
        TensorRule("scored_tokens", "int64 [scored]"),
    ),
    outputs=(
        TensorRule("top_tokens", "[scored, num_top]"),
        TensorRule("top_logprobs", "float32 [scored, num_top]"),
        TensorRule("token_logprobs", "float32 [scored]"),
    ),
    fields=(FieldRule("num_top", 1, MAX_TOP_LOGPROBS),),
    checks=(
        Check(
            subject="num_top",
            holds="num_top <= vocabulary",
            expected="at most the vocabulary, {vocabulary}",
            found="{num_top}",
            hint="They are distinct tokens.",
        ),
    ),
    stage=Stage(
        sizes={"num_tiles": f"ceil_div(vocabulary, {TILE})"},
        scratch={
            "values": "4 * scored * num_tiles * num_top",
            "columns": "4 * scored * num_tiles * num_top",
            "tile_max": "4 * scored * num_tiles",
            "tile_sum": "4 * scored * num_tiles",
        },
        arguments={"rows": "scored_rows", "tokens": "scored_tokens", "vocab_size": "vocabulary"}
        | {"num_rows": "scored - 1"},
        launches=(
            Launch(kernel=Kernel(name="tile_top_kernel", types={"logits": "F"}), when="scored > 1"),
            Launch(
                kernel=Kernel(
                    name="row_top_kernel",
                    types={"logits": "F"},
                    at_least={"TILES": "num_tiles", "CANDIDATES": "num_tiles * num_top"},
                ),
                when="scored > 1",
            ),
        ),
    ),
)
DRAFT_TOKENS: Final = Program(
    name="DraftTokens",
    inputs=(
        TensorRule("logits", "F [R * K, vocabulary]"),
        TensorRule("temperature", "float32 [R]"),
        TensorRule("seed", "int64 [R]"),
        TensorRule("draft_stream", "[R]"),
        TensorRule("next_context_lens", "[R]"),
        TensorRule("draft_to_target", "int64 [vocabulary]", when="has_map == 1"),
    ),
    outputs=(
        TensorRule("token_ids", "[R, K]"),
        TensorRule("next_draft_topk_ids", "[R, K * draft_topk]"),
        TensorRule("next_draft_topk_probs", "float32 [R, K * draft_topk]"),
    ),
    fields=(flag("has_map"), FieldRule("draft_topk", 1, _MAX_TOPK)),
    checks=(
        Check(
            subject="draft_topk",
            holds="draft_topk <= vocabulary",
            expected="at most the vocabulary, {vocabulary}",
            found="{draft_topk}",
            hint="A draft is sampled from distinct tokens.",
        ),
    ),
    stage=replace(
        _sizes_of_rows("K"),
        scratch=_scratch(DRAFT_SCRATCH, width="K"),
        launches=_launches(DRAFT_GRIDS, equal={"HAS_MAP": "has_map"}),
    ),
)
