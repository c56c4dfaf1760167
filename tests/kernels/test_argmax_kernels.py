"""The greedy token of low-precision logits, however the vocabulary is cut."""

import pytest
import torch

from dflash_trt.kernels.argmax import TILE
from dflash_trt.kernels.argmax_launch import argmax_tokens, combine_shards, shard_argmax
from tests.kernels import reference_sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_logits(num_rows, vocab_size, *, dtype=torch.float32, seed=0):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 2, 63, 272, TILE - 1, TILE, 3 * TILE + 1])
def test_the_token_is_the_first_largest(vocab_size, dtype):
    logits = make_logits(5, vocab_size, dtype=dtype)
    tokens = argmax_tokens(logits)
    assert tokens.dtype == torch.int32
    assert tokens.tolist() == logits.argmax(dim=1).tolist() == reference_sampling.argmax_tokens(logits).tolist()


def test_ties_go_to_the_smallest_index_across_tiles():
    logits = torch.full((3, 3 * TILE), -1.0, device=DEVICE)
    logits[0, [TILE + 7, TILE + 8, 2 * TILE + 1]] = 0.5
    logits[2] = -torch.inf
    assert argmax_tokens(logits).tolist() == reference_sampling.argmax_tokens(logits).tolist() == [TILE + 7, 0, 0]


@pytest.mark.parametrize("vocab_size", [1, 272, TILE, TILE + 1, 2 * TILE])
def test_nan_is_below_every_number_so_that_the_token_is_in_the_vocabulary(vocab_size):
    logits = make_logits(3, vocab_size)
    logits[0] = torch.nan
    logits[1, : vocab_size // 2] = torch.nan
    logits[2] = torch.nan
    logits[2, -1] = -1e30
    tokens = argmax_tokens(logits).tolist()
    assert tokens == reference_sampling.argmax_tokens(logits).tolist()
    assert tokens[::2] == [0, vocab_size - 1]
    assert tokens[1] == logits[1].nan_to_num(-torch.inf).argmax()


def test_a_shard_of_nan_gives_way_to_the_others():
    logits = make_logits(2, 2 * TILE)
    logits[0, :TILE] = torch.nan
    logits[1] = torch.nan
    shards = [shard_argmax(shard.contiguous(), first_token_id=i * TILE) for i, shard in enumerate(logits.chunk(2, 1))]
    values, tokens = (torch.stack(parts) for parts in zip(*shards, strict=True))
    assert combine_shards(values, tokens).tolist() == reference_sampling.argmax_tokens(logits).tolist()


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
def test_shards_agree_with_the_whole_vocabulary(num_shards):
    shard_size = TILE + 40
    logits = (make_logits(4, num_shards * shard_size) * 4).round()  # with ties between shards
    shards = [
        shard_argmax(shard.contiguous(), first_token_id=i * shard_size)
        for i, shard in enumerate(logits.chunk(num_shards, dim=1))
    ]
    values, tokens = (torch.stack(parts) for parts in zip(*shards, strict=True))
    assert combine_shards(values, tokens).tolist() == reference_sampling.argmax_tokens(logits).tolist()
    if num_shards > 1:  # the negative control: shards in a wrong place
        wrong = combine_shards(values, tokens.roll(1, dims=0)).tolist()
        assert wrong != reference_sampling.argmax_tokens(logits).tolist()
