"""Launches of `sampling.py` and `rejection.py`: scratch memory and constants.

The cuda backend calls `sample_and_accept`; `programs/sampling.py` has the plugin's launches. Allocates nothing while a
step runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_trt.core.dtype import torch_dtype
from dflash_trt.core.sampling import SamplingColumns
from dflash_trt.kernels import rejection, sampling
from dflash_trt.kernels.capacity import MAX_CANDIDATES, next_power_of_2
from dflash_trt.kernels.next_inputs import draft_block_kernel
from dflash_trt.kernels.sampling_scratch import BINS, LIST_CAPACITY, PIECES, SAMPLING_GRIDS, SCRATCH, TILE, num_tiles

CHUNK = 2048  # list elements per iteration of a histogram
NUM_WARPS = 8


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
    for name, grid in SAMPLING_GRIDS.items():
        kernel = sampling_kernel(name)
        constants = sampling_constants(name, vocab_size=vocab_size, width=width)
        given = {key: arguments[key] for key in kernel.arg_names if key not in constants}
        kernel[tuple(sizes.get(size, 1) for size in grid)](
            **given, **constants, num_warps=SAMPLING_WARPS[name], enable_fp_fusion=True
        )


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


def sampling_constants(name: str, *, vocab_size: int, width: int) -> dict[str, int]:
    known = {
        "TILE": TILE,
        "TILES": next_power_of_2(num_tiles(vocab_size)),
        "PIECES": PIECES,
        "CHUNK": CHUNK,
        "LIST_CAPACITY": LIST_CAPACITY,
        "BINS": BINS,
        "WIDTH": next_power_of_2(width),
        "DRAFT_TOPK": MAX_CANDIDATES,
    }
    return {key: known[key] for key in sampling_kernel(name).arg_names if key in known}


def sampling_kernel(name: str) -> Any:
    """`name` is of SAMPLING_GRIDS."""
    module = rejection if hasattr(rejection, f"{name}_kernel") else sampling
    return getattr(module, f"{name}_kernel")


SAMPLING_WARPS = dict.fromkeys(SAMPLING_GRIDS, NUM_WARPS) | {"test_drafts": 2, "accept": 1}
