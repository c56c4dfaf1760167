"""Launches of the kernels of `logit_rules.py`."""

from dataclasses import fields
from typing import Any, Final

import torch
from torch import Tensor

from dflash_trt.core.logit_rules import MAX_BAD_WORD_TOKENS, MAX_BIASES
from dflash_trt.kernels.logit_rules import adjust_kernel, count_tokens_kernel, raw_logprobs_kernel
from dflash_trt.kernels.rule_tensors import MaskTensors, RuleTensors
from dflash_trt.kernels.sampling_scratch import TILE

CHUNK: Final = 1024
NUM_WARPS: Final = 8
CONSTANTS: Final = {
    "count_tokens": {"TILE": TILE, "CHUNK": CHUNK},
    "adjust": {"TILE": TILE, "MAX_BIASES": MAX_BIASES, "PREFIX": MAX_BAD_WORD_TOKENS},
    "raw_logprobs": {"TILE": TILE},
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
    num_tiles = -(-vocab_size // TILE)
    _launch(count_tokens_kernel, "count_tokens", (num_requests, num_tiles), given)
    _launch(adjust_kernel, "adjust", (num_rows, num_tiles), given)
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
    _launch(raw_logprobs_kernel, "raw_logprobs", (len(logits),), given | sizes)


def _launch(kernel: Any, name: str, grid: tuple[int, ...], given: dict[str, Any]) -> None:
    constants = CONSTANTS[name]
    arguments = {key: given[key] for key in kernel.arg_names if key not in constants}
    kernel[grid](**arguments, **constants, num_warps=NUM_WARPS, enable_fp_fusion=False)
