"""Launches of the kernels that adjust, sample, draft and score: scratch memory and constants.

The cuda backend calls them; `programs/sampling.py` has the plugin's launches.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import torch
from torch import Tensor

from dflash_trt.core.dtype import torch_dtype
from dflash_trt.core.logit_rules import MAX_BAD_WORD_TOKENS, MAX_BIASES
from dflash_trt.core.sampling import MAX_TOP_LOGPROBS, SamplingColumns
from dflash_trt.kernels import argmax, logit_rules, rejection, sampling, top_logprobs
from dflash_trt.kernels.launching import MAX_CANDIDATES, launch, next_power_of_2, topk_capacity
from dflash_trt.kernels.rejection import draft_block_kernel
from dflash_trt.kernels.rule_tensors import MaskTensors, RuleTensors
from dflash_trt.kernels.sampling_scratch import (
    BINS,
    DRAFT_GRIDS,
    DRAFT_SCRATCH,
    LIST_CAPACITY,
    PIECES,
    RULE_GRIDS,
    SAMPLING_GRIDS,
    SCORE_GRIDS,
    SCRATCH,
    TILE,
    num_tiles,
)

NUM_WARPS: Final = 8
WARPS: Final = {"test_drafts": 2, "accept": 1}  # where it is not NUM_WARPS
UNFUSED: Final = (*RULE_GRIDS, *SCORE_GRIDS)  # a penalty is rounded before it is subtracted
RULE_CONSTANTS: Final = {"TILE": TILE, "CHUNK": 1024, "MAX_BIASES": MAX_BIASES, "PREFIX": MAX_BAD_WORD_TOKENS}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingInputs(SamplingColumns[Tensor]):
    """The step tensors the sampler reads; names and shapes of `core/step_spec.STEP_INPUTS`, contiguous."""

    token_ids: Tensor
    positions: Tensor
    token_offsets: Tensor
    context_lens: Tensor
    logit_rows: Tensor
    num_candidates: Tensor
    draft_topk_ids: Tensor | None = None  # for rejection sampling
    draft_topk_probs: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOutputs:
    """Shapes of `core/step_spec.STEP_OUTPUTS`; bonus_tokens int32 [R]."""

    emitted_tokens: Tensor
    emitted_logprobs: Tensor
    num_accepted: Tensor
    bonus_tokens: Tensor
    next_context_lens: Tensor


def workspace_shapes(num_rows: int, vocab_size: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Scratch tensors by argument name. No content survives a call and none need be cleared before one."""
    tiles = num_tiles(vocab_size)
    return {
        scratch.name: (torch_dtype(scratch.dtype), (num_rows, scratch.per_row + scratch.per_tile * tiles))
        for scratch in SCRATCH
    }


def allocate_workspace(num_rows: int, vocab_size: int, device: torch.device) -> dict[str, Tensor]:
    """Scratch memory for steps of at most `num_rows` rows."""
    shapes = workspace_shapes(num_rows, vocab_size)
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, (dtype, shape) in shapes.items()}


def allocate_outputs(num_requests: int, width: int, device: torch.device) -> SamplingOutputs:
    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return SamplingOutputs(
        emitted_tokens=integers(num_requests, width),
        emitted_logprobs=torch.empty((num_requests, width), dtype=torch.float32, device=device),
        num_accepted=integers(num_requests),
        bonus_tokens=integers(num_requests),
        next_context_lens=integers(num_requests),
    )


def sample_and_accept(
    logits: Tensor,  # F [R*(K+1), V], contiguous
    inputs: SamplingInputs,
    outputs: SamplingOutputs,
    workspace: Mapping[str, Tensor],  # `allocate_workspace`, of at least these rows
) -> None:
    """See `Ops.sample_and_accept`. Nine launches on the current stream; writes `outputs`."""
    num_requests, width = inputs.logit_rows.shape
    num_rows, vocab_size = logits.shape
    assert num_rows == num_requests * width and logits.is_contiguous()
    assert workspace["row_max"].numel() >= num_rows and workspace["tile_max"].shape[1] == num_tiles(vocab_size)
    arguments: dict[str, Any] = {name: getattr(inputs, name) for name in SamplingInputs.__dataclass_fields__}
    arguments |= {name: getattr(outputs, name) for name in SamplingOutputs.__dataclass_fields__}
    arguments |= workspace
    arguments |= _choices(inputs)
    arguments |= {"logits": logits, "vocab_size": vocab_size, "width": width, "num_tiles": num_tiles(vocab_size)}
    sizes = {"num_requests": num_requests, "num_rows": num_rows, "num_tiles": num_tiles(vocab_size)}
    _launch_all(SAMPLING_GRIDS, sizes, arguments, sampling_constants(vocab_size=vocab_size, width=width))


def _choices(inputs: SamplingInputs) -> dict[str, Any]:
    """Without any, other tensors of the types stand in, which are not read."""
    if inputs.draft_topk_ids is None or inputs.draft_topk_probs is None:
        return {"draft_topk_ids": inputs.token_ids, "draft_topk_probs": inputs.temperature, "draft_topk": 0}
    num_drafts = inputs.logit_rows.shape[1] - 1
    draft_topk = inputs.draft_topk_ids.shape[1] // max(num_drafts, 1)
    assert inputs.draft_topk_probs.shape == inputs.draft_topk_ids.shape == (len(inputs.seed), num_drafts * draft_topk)
    assert draft_topk <= MAX_CANDIDATES
    return {
        "draft_topk_ids": inputs.draft_topk_ids,
        "draft_topk_probs": inputs.draft_topk_probs,
        "draft_topk": draft_topk,
    }


def draft_block(
    bonus_tokens: Tensor,  # int32 [R]
    next_context_lens: Tensor,  # int32 [R]
    token_ids: Tensor,  # int32 [R, S], written
    positions: Tensor,  # int32 [R, S], written
    *,
    mask_token_id: int,
) -> None:
    """[bonus, MASK ..] at next_context_lens and on."""
    num_requests, width = token_ids.shape
    draft_block_kernel[(num_requests,)](
        bonus_tokens,
        next_context_lens,
        token_ids,
        positions,
        mask_token_id,
        width,
        WIDTH=next_power_of_2(width),
        num_warps=1,
        enable_fp_fusion=True,
    )


def sampling_constants(*, vocab_size: int, width: int) -> dict[str, int]:
    return {
        "TILE": TILE,
        "TILES": next_power_of_2(num_tiles(vocab_size)),
        "PIECES": PIECES,
        "CHUNK": 2048,  # list elements per iteration of a histogram
        "LIST_CAPACITY": LIST_CAPACITY,
        "BINS": BINS,
        "WIDTH": next_power_of_2(width),
        "DRAFT_TOPK": MAX_CANDIDATES,
    }


def adjusted_scores(
    logits: Tensor,  # F [R*(K+1), V], contiguous
    rules: RuleTensors,
    masks: MaskTensors,
    *,
    slot_ids: Tensor,  # int64 [R]
    positions: Tensor,  # int32 [T]
    logit_rows: Tensor,  # int32 [R, K+1]
) -> Tensor:
    """float32 [R*(K+1), V]. Two launches; allocates the scores and the counts of tokens."""
    num_requests, width = logit_rows.shape
    num_rows, vocab_size = logits.shape
    assert num_rows == num_requests * width and logits.is_contiguous()
    scores = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=logits.device)
    counts = torch.empty((num_requests, vocab_size), dtype=torch.int32, device=logits.device)
    given: dict[str, Any] = {item.name: getattr(rules, item.name) for item in fields(RuleTensors)}
    given |= {"row_masks": masks.row_masks, "mask_bits": masks.mask_bits}
    given |= {"logits": logits, "scores": scores, "slot_ids": slot_ids, "positions": positions}
    given |= {"logit_rows": logit_rows, "counts": counts, "vocab_size": vocab_size, "width": width}
    given |= {"max_positions": rules.tokens.shape[1]}
    sizes = {"num_requests": num_requests, "num_rows": num_rows, "num_tiles": num_tiles(vocab_size)}
    grids = {name: RULE_GRIDS[name] for name in ("count_tokens", "adjust")}
    _launch_all(grids, sizes, given, RULE_CONSTANTS)
    return scores


def write_raw_logprobs(
    logits: Tensor,  # F [R*(K+1), V], contiguous
    scores: Tensor,  # float32 [R*(K+1), V]
    rules: RuleTensors,
    masks: MaskTensors,
    *,
    slot_ids: Tensor,  # int64 [R]
    emitted_tokens: Tensor,  # int32 [R, K+1]
    emitted_logprobs: Tensor,  # float32 [R, K+1], rows with rules or masks are written
) -> None:
    given = {"logits": logits, "scores": scores, "slot_ids": slot_ids, "has_rules": rules.has_rules}
    given |= {"row_masks": masks.row_masks, "emitted_tokens": emitted_tokens, "emitted_logprobs": emitted_logprobs}
    sizes = {"vocab_size": logits.shape[1], "width": emitted_tokens.shape[1]}
    grids = {"raw_logprobs": RULE_GRIDS["raw_logprobs"]}
    _launch_all(grids, {"num_rows": len(logits)}, given | sizes, RULE_CONSTANTS)


def draft_tokens(
    logits: Tensor,  # F [R*K, V], contiguous
    temperature: Tensor,  # float32 [R]
    seed: Tensor,  # int64 [R]
    draft_stream: Tensor,  # int32 [R]
    next_context_lens: Tensor,  # int32 [R]
    draft_to_target: Tensor | None = None,  # int64 [V]
    *,
    draft_topk: int,  # C
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Ops.draft_tokens`; int32 tokens [R, K] and top-k ids [R, K*C], float32 top-k probs [R, K*C].

    Requests without rejection sampling have zeros. Two launches; allocates results and scratch tensors.
    """
    num_rows, vocab_size = logits.shape
    num_requests, tiles = len(temperature), num_tiles(vocab_size)
    assert num_rows % num_requests == 0 and logits.is_contiguous()
    assert 0 < draft_topk <= min(MAX_CANDIDATES, vocab_size)
    num_slots = num_rows // num_requests

    def new(dtype: torch.dtype, num_columns: int) -> Tensor:
        return torch.empty((num_requests, num_slots * num_columns), dtype=dtype, device=logits.device)

    drafts = new(torch.int32, 1), new(torch.int32, draft_topk), new(torch.float32, draft_topk)
    arguments: dict[str, Any] = dict(
        zip(("token_ids", "next_draft_topk_ids", "next_draft_topk_probs"), drafts, strict=True)
    )
    arguments |= {s.name: new(torch_dtype(s.dtype), tiles * s.per_tile) for s in DRAFT_SCRATCH}
    arguments |= {"logits": logits, "temperature": temperature, "seed": seed, "draft_stream": draft_stream}
    arguments |= {"next_context_lens": next_context_lens, "vocab_size": vocab_size, "num_tiles": tiles}
    # without a draft vocabulary it is not read: any tensor of the type stands in
    arguments |= {"draft_to_target": seed if draft_to_target is None else draft_to_target}
    arguments |= {"num_slots": num_slots, "draft_topk": draft_topk}
    sizes = {"num_rows": num_rows, "num_tiles": tiles}
    has_map = draft_to_target is not None
    constants = draft_constants(vocab_size=vocab_size, has_map=has_map, draft_topk=draft_topk)
    _launch_all(DRAFT_GRIDS, sizes, arguments, constants)
    return drafts


def draft_constants(*, vocab_size: int, has_map: bool, draft_topk: int) -> dict[str, int]:
    return {
        "TILE": TILE,
        "TILES": next_power_of_2(num_tiles(vocab_size)),
        "PIECES": PIECES,
        "HAS_MAP": has_map,
        "DRAFT_TOPK": topk_capacity(draft_topk),
    }


def score_rows(
    logits: Tensor,  # F [any, V], contiguous
    num_top: int,
    *,
    rows: Tensor | None = None,  # int64 [M]; None means all
    tokens: Tensor | None = None,  # int64 [M]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Implements `backends.torch.logprobs.ScoreRows`.

    NaN is never a candidate; its row has NaN as results.
    """
    assert logits.is_contiguous() and num_top <= MAX_TOP_LOGPROBS
    rows = torch.arange(len(logits), device=logits.device) if rows is None else rows
    num_rows, vocab_size = len(rows), logits.shape[1]
    num_top, tiles = min(num_top, vocab_size), num_tiles(vocab_size)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((num_rows, *shape), dtype=dtype, device=logits.device)

    given: dict[str, Any] = {"logits": logits, "rows": rows, "tokens": rows if tokens is None else tokens}
    given |= {
        "values": empty(tiles, num_top),
        "columns": empty(tiles, num_top, dtype=torch.int32),
        "tile_max": empty(tiles),
        "tile_sum": empty(tiles),
        "top_tokens": empty(num_top, dtype=torch.int32),
        "top_logprobs": empty(num_top),
        "token_logprobs": empty(),
    }
    given |= {"vocab_size": vocab_size, "num_top": num_top, "num_tiles": tiles}
    constants = score_constants(vocab_size, has_tokens=tokens is not None)
    _launch_all(SCORE_GRIDS, {"num_rows": num_rows, "num_tiles": tiles}, given, constants)
    return given["top_tokens"], given["top_logprobs"], None if tokens is None else given["token_logprobs"]


def score_constants(vocab_size: int, *, has_tokens: bool) -> dict[str, int]:
    return {
        "TILE": TILE,
        "TILES": next_power_of_2(num_tiles(vocab_size)),
        "CANDIDATES": next_power_of_2(num_tiles(vocab_size) * MAX_TOP_LOGPROBS),
        "HAS_TOKENS": has_tokens,
    }


def kernel_of(name: str) -> Any:
    """The kernel of a name in the grids of `sampling_scratch.py`."""
    modules = (sampling, rejection, argmax, logit_rules, top_logprobs)
    return next(getattr(module, f"{name}_kernel") for module in modules if hasattr(module, f"{name}_kernel"))


def _launch_all(
    grids: Mapping[str, tuple[str, str, str]],
    sizes: Mapping[str, int],
    arguments: Mapping[str, Any],
    constants: Mapping[str, int],
) -> None:
    for name, grid in grids.items():
        launch(
            kernel_of(name),
            tuple(sizes.get(size, 1) for size in grid),
            arguments,
            constants,
            num_warps=WARPS.get(name, NUM_WARPS),
            has_fp_fusion=name not in UNFUSED,
        )
