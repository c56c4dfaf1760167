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
from scripts.train_demo.train_target import descend, lr_factor, set_lr


@dataclass(frozen=True, kw_only=True)
class UnlikelihoodRecipe:
    """Lengths in tokens. A token is a repetition when it ends an n-gram that stood before."""

    ngrams: tuple[int, ...] = (4, 5, 6)  # one run for each; the target is their mean
    num_steps: int = 40
    prompt_lens: tuple[int, ...] = (64, 128, 192)
    continuation_len: int = 128
    num_prompts: int = 24  # per step
    num_rows: int = 16  # corpus rows per step
    weight: float = 2.0
    lr: float = 2e-4
    seed: int = 0


def unlearn_repetition(
    model: Qwen3ForCausalLM,
    rows: NDArray[np.int64],  # [num_rows, row_len]
    recipe: UnlikelihoodRecipe,
    *,
    report: Callable[[str], None],
) -> Qwen3ForCausalLM:
    """Fine-tune in place, float32 weights under bfloat16 autocast: the mean of runs that all start from the model.

    A run alone forgets text while it unlearns loops; the mean of several keeps more of one and as much of the other
    (model soups, Wortsman et al., arXiv 2203.05482).
    """
    mean: dict[str, Tensor] = {}
    for index, ngram in enumerate(recipe.ngrams):
        run: Any = copy.deepcopy(model)
        _run(run, rows, recipe, ngram=ngram, seed=recipe.seed + index, report=report)
        for name, parameter in run.named_parameters():
            mean[name] = mean.get(name, 0) + parameter.detach() / len(recipe.ngrams)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(mean.get(name, parameter))
    return model


def _run(
    model: Qwen3ForCausalLM,
    rows: NDArray[np.int64],
    recipe: UnlikelihoodRecipe,
    *,
    ngram: int,
    seed: int,
    report: Callable[[str], None],
) -> None:
    """AdamW throughout: an orthogonalised step of a few dozen texts is mostly noise."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0)
    optimizer.param_groups[0]["peak_lr"] = recipe.lr
    random = np.random.default_rng(seed)
    start_s = time.monotonic()
    for step in range(recipe.num_steps):
        set_lr([optimizer], lr_factor(step, recipe.num_steps, 0.1))
        prompt_len = int(random.choice(recipe.prompt_lens))
        chosen = random.permutation(len(rows))[: recipe.num_prompts + recipe.num_rows]
        texts = torch.from_numpy(rows[chosen[: recipe.num_rows]]).to(model.device)
        prompts = torch.from_numpy(rows[chosen[recipe.num_rows :], :prompt_len]).to(model.device)
        continued = continue_greedily(model, prompts, recipe.continuation_len)
        repeats = is_repetition(continued, ngram, start=prompt_len)
        with torch.autocast(model.device.type, dtype=torch.bfloat16):
            likelihood = _token_logprobs(_next_logits(model, texts), texts).mean()
            own = _next_logits(model, continued)
        penalty = (unlikelihood(own, continued[:, 1:]) * repeats[:, 1:]).sum() / repeats[:, prompt_len:].numel()
        descend(recipe.weight * penalty - likelihood, model, [optimizer])
        if step % 5 == 0 or step == recipe.num_steps - 1:
            left_s = (time.monotonic() - start_s) * (recipe.num_steps / (step + 1) - 1)
            fraction = repeats[:, prompt_len:].float().mean().item()
            report(
                f"unlikelihood of {ngram}-grams, step {step + 1}/{recipe.num_steps}  loss {-likelihood.item():.3f}  "
                f"repeated {fraction:.3f} of its tokens  {left_s:.0f} s left"
            )


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
