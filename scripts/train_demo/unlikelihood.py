"""Teaches the demo target not to run in circles: sequence-level unlikelihood (Welleck et al., arXiv 1908.04319).

A small model decoded greedily falls into loops. Each step continues corpus prompts greedily, lowers the probability of
every token that repeats a long n-gram of its own text, and trains on corpus rows as before, so that nothing is
forgotten. It refuses to know about the drafter.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from scripts.train_demo.responses import CachedDecoder
from scripts.train_demo.train_target import descend, lr_factor, optimizers_for, set_lr


@dataclass(frozen=True, kw_only=True)
class UnlikelihoodRecipe:
    """Lengths in tokens. A token is a repetition when it ends an n-gram of `ngram` tokens that stood before."""

    num_steps: int = 60
    prompt_len: int = 64
    continuation_len: int = 200
    num_prompts: int = 24  # per step
    num_rows: int = 6  # corpus rows per step
    ngram: int = 10
    weight: float = 1.0
    matrix_lr: float = 1e-3
    vector_lr: float = 5e-4
    seed: int = 0


def unlearn_repetition(
    model: Qwen3ForCausalLM,
    rows: NDArray[np.int64],  # [num_rows, row_len]
    recipe: UnlikelihoodRecipe,
    *,
    report: Callable[[str], None],
) -> Qwen3ForCausalLM:
    """Fine-tune in place, float32 weights under bfloat16 autocast."""
    optimizers = optimizers_for(model, matrix_lr=recipe.matrix_lr, vector_lr=recipe.vector_lr)
    random = np.random.default_rng(recipe.seed)
    start_s = time.monotonic()
    for step in range(recipe.num_steps):
        set_lr(optimizers, lr_factor(step, recipe.num_steps, 0.1))
        chosen = random.permutation(len(rows))[: recipe.num_prompts + recipe.num_rows]
        texts = torch.from_numpy(rows[chosen[: recipe.num_rows]]).to(model.device)
        prompts = torch.from_numpy(rows[chosen[recipe.num_rows :], : recipe.prompt_len]).to(model.device)
        continued = continue_greedily(model, prompts, recipe.continuation_len)
        repeats = is_repetition(continued, recipe.ngram, start=recipe.prompt_len)
        with torch.autocast(model.device.type, dtype=torch.bfloat16):
            likelihood = _token_logprobs(_next_logits(model, texts), texts).mean()
            own = _next_logits(model, continued)
        penalty = (unlikelihood(own, continued[:, 1:]) * repeats[:, 1:]).sum() / repeats.numel()
        descend(recipe.weight * penalty - likelihood, model, optimizers)
        if step % 5 == 0 or step == recipe.num_steps - 1:
            left_s = (time.monotonic() - start_s) * (recipe.num_steps / (step + 1) - 1)
            fraction = repeats[:, recipe.prompt_len :].float().mean().item()
            report(
                f"unlikelihood step {step + 1}/{recipe.num_steps}  loss {-likelihood.item():.3f}  "
                f"repeated {fraction:.3f} of its tokens  {left_s:.0f} s left"
            )
    return model


def is_repetition(
    tokens: Tensor,  # int64 [batch, num_tokens]
    ngram: int,
    *,
    start: int,
) -> Tensor:  # bool [batch, num_tokens]
    """True where a token at `start` or later ends an n-gram that already stood in the same row."""
    found = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, line in enumerate(tokens.tolist()):
        seen: set[tuple[int, ...]] = set()
        for end in range(ngram, len(line) + 1):
            gram = tuple(line[end - ngram : end])
            found[row, end - 1] = end > start and gram in seen
            seen.add(gram)
    return found.to(tokens.device)


@torch.inference_mode()
def _decode(model: Qwen3ForCausalLM, prompts: Tensor, num_tokens: int) -> Tensor:
    decoder = CachedDecoder(model, batch_size=len(prompts), max_seq_len=prompts.shape[1] + num_tokens)
    tokens, logits = [prompts], decoder.next_logits(prompts)
    for _ in range(num_tokens):
        tokens.append(logits.argmax(-1, keepdim=True))
        logits = decoder.next_logits(tokens[-1])
    return torch.cat(tokens, dim=1)


def continue_greedily(model: Qwen3ForCausalLM, prompts: Tensor, num_tokens: int) -> Tensor:
    """int64 [batch, prompt_len] -> [batch, prompt_len + num_tokens], decoded in bfloat16."""
    narrow: Any = copy.deepcopy(model)
    return _decode(narrow.to(torch.bfloat16), prompts, num_tokens).clone()


def unlikelihood(
    logits: Tensor,  # float32 [batch, num_tokens, vocab]
    tokens: Tensor,  # int64 [batch, num_tokens]
) -> Tensor:  # float32 [batch, num_tokens]
    """-log(1 - p) of the tokens, summed over the others' logits: a token as good as certain has a gradient, too."""
    others = logits.scatter(-1, tokens.unsqueeze(-1), float("-inf"))
    return logits.logsumexp(-1) - others.logsumexp(-1)


def _next_logits(model: Qwen3ForCausalLM, tokens: Tensor) -> Tensor:
    """Of the tokens 1 .. in context, float32 [batch, num_tokens - 1, vocab]."""
    hidden = model.model(input_ids=tokens).last_hidden_state
    logits: Tensor = model.lm_head(hidden[:, :-1])
    return logits.float()


def _token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    return -functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
