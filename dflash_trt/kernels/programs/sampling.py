"""Sampling with acceptance, and drafts."""

from collections.abc import Iterable
from typing import Final

from dflash_trt.core.dtype import num_bytes_of
from dflash_trt.core.sampling import STEP_SAMPLING_FIELDS
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
_WITHOUT_LOGITS: Final = ("row_bounds", "accept")


def _stage(kernels: Iterable[str], scratch: Iterable[Scratch], *, width: str, equal: dict[str, str]) -> Stage:
    """Launches over `width` rows of logits of each request, in the order of `kernels`."""
    return Stage(
        sizes={"num_tiles": f"ceil_div(vocabulary, {TILE})"},
        arguments={"num_requests": "R", "num_rows": f"R * {width}", "width": width, "num_slots": width}
        | {"vocab_size": "vocabulary"},
        scratch={
            x.name: f"{num_bytes_of(x.dtype)} * R * {width} * ({x.per_row} + {x.per_tile} * num_tiles)" for x in scratch
        },
        launches=tuple(
            Launch(
                kernel=Kernel(
                    name=f"{name}_kernel",
                    types={} if name in _WITHOUT_LOGITS else {"logits": "F"},
                    equal=equal,
                    at_least=_CAPACITIES.get(name, {}),
                )
            )
            for name in kernels
        ),
    )


SAMPLE_AND_ACCEPT: Final = Program(
    name="SampleAndAccept",
    inputs=(
        TensorRule("logits", "F [R * S, vocabulary]"),
        TensorRule("token_ids", "[T]"),
        TensorRule("positions", "[T]"),
        TensorRule("token_offsets", "[R + 1]"),
        TensorRule("context_lens", "[R]"),
        TensorRule("logit_rows", "[R, S]"),
        TensorRule("num_candidates", "[R]"),
        TensorRule("draft_topk_ids", "[R, (S - 1) * draft_topk]", when="draft_topk > 0"),
        TensorRule("draft_topk_probs", "float32 [R, (S - 1) * draft_topk]", when="draft_topk > 0"),
        *(TensorRule(row.name, f"{row.dtype} [R]".removeprefix("int32 ")) for row in STEP_SAMPLING_FIELDS),
    ),
    outputs=(
        TensorRule("emitted_tokens", "[R, S]"),
        TensorRule("emitted_logprobs", "float32 [R, S]"),
        TensorRule("num_accepted", "[R]"),
        TensorRule("bonus_tokens", "[R]"),
        TensorRule("next_context_lens", "[R]"),
    ),
    fields=(FieldRule("draft_topk", 0, _MAX_TOPK),),
    stage=_stage(SAMPLING_GRIDS, SCRATCH, width="S", equal={}),
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
    stage=_stage(DRAFT_GRIDS, DRAFT_SCRATCH, width="K", equal={"HAS_MAP": "has_map"}),
)
