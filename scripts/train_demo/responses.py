"""The drafter's training text: corpus prompts continued by the target itself, greedily.

Knows how to run a small Qwen3 quickly over large batches. It refuses to know about the drafter.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb


@dataclass(frozen=True, kw_only=True)
class ResponseRecipe:
    """How many sequences, how long, and how varied. Lengths in tokens, prompt included."""

    num_sequences: int = 4096
    seq_len: int = 320  # little more than a user asks for: a small target loops later on, and loops teach nothing
    prompt_lens: tuple[int, ...] = (192, 128, 160)
    batch_size: int = 128
    sampled_fraction: float = 0.5  # of the sequences: their continuation starts with a sampled stretch ...
    sampled_lens: tuple[int, int] = (4, 24)  # ... of so many tokens, so that greedy text starts from many places
    temperature: float = 0.7
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Responses:
    tokens: NDArray[np.int64]  # [num_sequences, seq_len]
    greedy_from: NDArray[np.int64]  # [num_sequences]: from this position on, each token is the target's argmax

    def save(self, path: Path) -> None:
        np.savez_compressed(path, tokens=self.tokens.astype(np.int32), greedy_from=self.greedy_from)

    @staticmethod
    def load(path: Path) -> "Responses":
        with np.load(path) as arrays:
            return Responses(tokens=arrays["tokens"].astype(np.int64), greedy_from=arrays["greedy_from"])


def generate_responses(
    target: Qwen3ForCausalLM,
    rows: NDArray[np.int64],  # [num_rows, row_len]
    recipe: ResponseRecipe,
    *,
    end_id: int,
    report: Callable[[str], None],
) -> Responses:
    """Prompts are cut from rows drawn without repetition; each batch shares one prompt length, so nothing is padded."""
    random = np.random.default_rng(recipe.seed)
    sampler = torch.Generator(target.device).manual_seed(recipe.seed)
    chosen = random.permutation(len(rows))[: recipe.num_sequences]
    batches = [chosen[i : i + recipe.batch_size] for i in range(0, len(chosen), recipe.batch_size)]
    prompt_lens = [recipe.prompt_lens[i % len(recipe.prompt_lens)] for i in range(len(batches))]
    num_total = sum(len(b) * (recipe.seq_len - p) for b, p in zip(batches, prompt_lens, strict=True))
    tokens, greedy_from, num_done, start_s = [], [], 0, time.monotonic()
    for batch, prompt_len in zip(batches, prompt_lens, strict=True):
        prompts = np.stack([_cut_prompt(rows[row], prompt_len, random, end_id) for row in batch])
        num_sampled = random.integers(*recipe.sampled_lens, size=len(batch), endpoint=True)
        num_sampled[random.random(len(batch)) >= recipe.sampled_fraction] = 0
        tokens.append(_continue(target, torch.from_numpy(prompts), num_sampled, recipe, sampler).numpy())
        greedy_from.append(prompt_len + num_sampled)
        num_done += len(batch) * (recipe.seq_len - prompt_len)
        speed = num_done / (time.monotonic() - start_s)
        left_s = (num_total - num_done) / speed
        report(f"responses {len(tokens)}/{len(batches)}  {speed:.0f} tok/s  {left_s:.0f} s left")
    return Responses(tokens=np.concatenate(tokens), greedy_from=np.concatenate(greedy_from))


def distinct_4gram_fraction(
    tokens: NDArray[np.int64],  # [num_tokens] of one continuation
) -> float:
    """1.0 when no four tokens in a row ever come back; near 0 for a loop."""
    grams = np.lib.stride_tricks.sliding_window_view(tokens, 4)
    return float(len(np.unique(grams, axis=0)) / len(grams))


def distinct_fraction(responses: Responses) -> float:
    """Mean distinct 4-gram fraction of the greedy parts."""
    pairs = zip(responses.tokens, responses.greedy_from, strict=True)
    return float(np.mean([distinct_4gram_fraction(tokens[start:]) for tokens, start in pairs]))


def _cut_prompt(row: NDArray[np.int64], prompt_len: int, random: np.random.Generator, end_id: int) -> NDArray[np.int64]:
    """Where a file begins within the row, from there: readers of the demo prompt with beginnings of files."""
    last_start = len(row) - prompt_len
    beginnings = np.flatnonzero(row[:last_start] == end_id) + 1
    start = beginnings[0] if len(beginnings) else random.integers(0, last_start, endpoint=True)
    return row[start : start + prompt_len]


@torch.inference_mode()
def _continue(
    target: Qwen3ForCausalLM,
    prompts: Tensor,  # int64 [batch, prompt_len]
    num_sampled: NDArray[np.int64],  # [batch]: continuation tokens drawn at the temperature before greedy ones
    recipe: ResponseRecipe,
    sampler: torch.Generator,
) -> Tensor:  # int64 [batch, seq_len], on the CPU
    decoder = CachedDecoder(target, batch_size=len(prompts), max_seq_len=recipe.seq_len)
    prompt_len = prompts.shape[1]
    is_sampled = torch.arange(recipe.seq_len) < prompt_len + torch.from_numpy(num_sampled)[:, None]
    is_sampled = is_sampled.to(target.device)
    tokens = torch.empty(len(prompts), recipe.seq_len, dtype=torch.int64, device=target.device)
    tokens[:, :prompt_len] = prompts.to(target.device)
    logits = decoder.next_logits(tokens[:, :prompt_len])
    for position in range(prompt_len, recipe.seq_len):
        chosen = logits.argmax(-1)
        if bool(is_sampled[:, position].any()):
            drawn = torch.multinomial((logits / recipe.temperature).softmax(-1), 1, generator=sampler).squeeze(1)
            chosen = torch.where(is_sampled[:, position], drawn, chosen)
        tokens[:, position] = chosen
        logits = decoder.next_logits(tokens[:, position : position + 1])
    return tokens.cpu()


class CachedDecoder:
    """The target's layers over a cache allocated once, all requests of equal length.

    The library's `generate` copies its cache at every token, which costs a CPU more than the arithmetic does.
    """

    def __init__(self, target: Qwen3ForCausalLM, *, batch_size: int, max_seq_len: int) -> None:
        config = target.config
        assert config.num_key_value_heads is not None
        self._target = target
        self._len = 0
        shape = (config.num_hidden_layers, 2, batch_size, config.num_key_value_heads, max_seq_len, config.head_dim)
        self._cache = torch.empty(shape, dtype=target.dtype, device=target.device)

    def next_logits(
        self,
        token_ids: Tensor,  # int64 [batch, num_tokens]: a whole prompt first, then one token at a time
    ) -> Tensor:  # float32 [batch, vocab]
        assert self._len == 0 or token_ids.shape[1] == 1, "only the first call may bring several tokens"
        model: Any = self._target.model
        hidden = model.embed_tokens(token_ids)
        positions = torch.arange(self._len, self._len + token_ids.shape[1], device=token_ids.device)[None]
        rope = model.rotary_emb(hidden, positions)
        for layer, cache in zip(model.layers, self._cache, strict=True):
            hidden = hidden + self._attention(layer.self_attn, layer.input_layernorm(hidden), cache, rope)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        self._len += token_ids.shape[1]
        last = model.norm(hidden[:, -1])
        return functional.linear(last.float(), self._target.lm_head.weight.float())  # fp32: bf16 logits tie

    def _attention(self, attention: Any, x: Tensor, cache: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        heads = (*x.shape[:2], -1, attention.head_dim)
        queries = attention.q_norm(attention.q_proj(x).view(heads)).transpose(1, 2)
        keys = attention.k_norm(attention.k_proj(x).view(heads)).transpose(1, 2)
        queries, keys = apply_rotary_pos_emb(queries, keys, *rope)
        end = self._len + x.shape[1]
        cache[0, :, :, self._len : end] = keys
        cache[1, :, :, self._len : end] = attention.v_proj(x).view(heads).transpose(1, 2)
        attended = _attend(queries, cache[0, :, :, :end], cache[1, :, :, :end])
        projected: Tensor = attention.o_proj(attended.transpose(1, 2).reshape(*x.shape[:2], -1))
        return projected


def _attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    if queries.shape[2] > 1:
        return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    # One token: the query heads of a K/V head stand in for query positions, five times as fast as enable_gqa.
    folded = queries.view(len(queries), keys.shape[1], -1, queries.shape[-1])
    return functional.scaled_dot_product_attention(folded, keys, values).reshape(queries.shape)
