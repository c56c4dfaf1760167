"""Memory and launches of the kernels of `logit_rules.py`."""

from dataclasses import dataclass, fields
from typing import Any, Final

import torch
from torch import Tensor

from dflash_trt.core.logit_rules import MAX_BAD_WORD_TOKENS, MAX_BIASES
from dflash_trt.kernels.logit_rules import adjust_kernel, count_tokens_kernel, raw_logprobs_kernel

TILE: Final = 4096
CHUNK: Final = 1024
NUM_WARPS: Final = 8
CONSTANTS: Final = {
    "count_tokens": {"TILE": TILE, "CHUNK": CHUNK},
    "adjust": {"TILE": TILE, "MAX_BIASES": MAX_BIASES, "PREFIX": MAX_BAD_WORD_TOKENS},
    "raw_logprobs": {"TILE": TILE},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleTensors:
    """Rules by slot."""

    has_rules: Tensor  # int32 [S]
    num_prompt_tokens: Tensor  # int32 [S]
    penalties: Tensor  # float32 [S, 3]: repetition, presence, frequency
    num_biases: Tensor  # int32 [S]
    bias_tokens: Tensor  # int32 [S, MAX_BIASES]
    bias_values: Tensor  # float32 [S, MAX_BIASES]
    bias_ends: Tensor  # int32 [S, MAX_BIASES]
    prefixes: Tensor  # int32 [S, MAX_BIASES, MAX_BAD_WORD_TOKENS]
    tokens: Tensor  # int32 [S, max_positions]

    @classmethod
    def allocate(cls, num_slots: int, max_positions: int, device: torch.device) -> "RuleTensors":
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros((num_slots, *shape), dtype=dtype, device=device)

        return cls(
            has_rules=zeros(),
            num_prompt_tokens=zeros(),
            penalties=zeros(3, dtype=torch.float32),
            num_biases=zeros(),
            bias_tokens=zeros(MAX_BIASES),
            bias_values=zeros(MAX_BIASES, dtype=torch.float32),
            bias_ends=zeros(MAX_BIASES),
            prefixes=zeros(MAX_BIASES, MAX_BAD_WORD_TOKENS),
            tokens=zeros(max_positions),
        )


def adjusted_scores(
    logits: Tensor,  # F [R*(K+1), V], contiguous
    rules: RuleTensors,
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
    *,
    slot_ids: Tensor,  # int64 [R]
    emitted_tokens: Tensor,  # int32 [R, K+1]
    emitted_logprobs: Tensor,  # float32 [R, K+1], rows with rules are written
) -> None:
    given = {"logits": logits, "scores": scores, "slot_ids": slot_ids, "has_rules": rules.has_rules}
    given |= {"emitted_tokens": emitted_tokens, "emitted_logprobs": emitted_logprobs}
    sizes = {"vocab_size": logits.shape[1], "width": emitted_tokens.shape[1]}
    _launch(raw_logprobs_kernel, "raw_logprobs", (len(logits),), given | sizes)


def _launch(kernel: Any, name: str, grid: tuple[int, ...], given: dict[str, Any]) -> None:
    constants = CONSTANTS[name]
    arguments = {key: given[key] for key in kernel.arg_names if key not in constants}
    kernel[grid](**arguments, **constants, num_warps=NUM_WARPS, enable_fp_fusion=False)
