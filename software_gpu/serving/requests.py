"""Requests of a serving run: prompts of 3 to 900 tokens, some with one beginning, under every kind of sampling."""

from typing import Any, Final

import numpy as np

from dflash_trt.core.request import SamplingParams

NUM_DISTINCT: Final = 60
NUM_SHARED: Final = 20  # with a prefix in common
PREFIX_LEN: Final = 190
_LENS: Final = (3, 900)
_TOKEN_IDS: Final = (10, 300)
_NUM_NEW_TOKENS: Final = (20, 70)

# What a CUDA graph holds; and what changes or reads the logits.
PLAIN: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.1},
)
RULED: Final[tuple[dict[str, Any], ...]] = (
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "temperature": 0.8},
    {"logit_bias": ((5, 1.0), (7, -2.0))},
    {"logprobs": True, "top_logprobs": 3},
    {"prompt_logprobs": 2},
)
CONSTRAINED: Final[dict[str, Any]] = {"regex": "[a-z]+"}  # needs a tokenizer


def prompts(seed: int, *, max_len: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    prefix = random.integers(*_TOKEN_IDS, PREFIX_LEN).tolist()
    lens = random.integers(*_LENS, NUM_DISTINCT)
    distinct = [random.integers(*_TOKEN_IDS, min(int(length), max_len)).tolist() for length in lens]
    return [*distinct, *([*prefix, last][-max_len:] for last in range(NUM_SHARED))]


def sampling(kinds: tuple[dict[str, Any], ...]) -> list[SamplingParams]:
    """One for each prompt; the kinds take turns."""
    first, last = _NUM_NEW_TOKENS
    return [
        SamplingParams(max_new_tokens=first + i % (last - first), ignore_eos=True, **kinds[i % len(kinds)])
        for i in range(NUM_DISTINCT + NUM_SHARED)
    ]
