"""The sampler against its definition in PyTorch, and against the network's own sampling."""

import itertools
from dataclasses import fields, replace

import pytest
import torch

from dflash_trt.backends.torch import sampling as torch_sampling
from dflash_trt.kernels.sampling_launch import (
    SamplingInputs,
    allocate_outputs,
    allocate_workspace,
    draft_block,
    sample_and_accept,
)
from dflash_trt.kernels.sampling_scratch import LIST_CAPACITY, TILE
from dflash_trt.network.ops import StepInputs
from tests.kernels import reference_sampling
from tests.kernels.reference_sampling import kept_masses
from tests.kernels_on import DEVICE
from tests.logit_rows import EXTREMES, columns_off, device_sampling, rows_without_a_token

VOCAB_SIZE = 2 * TILE + 777  # an odd size that ends inside a tile


def make_inputs(sampling, *, width, num_candidates=None, prefill_len=None, seed=0):
    """Verify blocks of `width` tokens, one per entry of `sampling` (temperature, top_k, top_p, min_p, seed)."""
    num_requests = len(sampling)
    generator = torch.Generator().manual_seed(seed)
    lengths = [width] * num_requests
    if prefill_len is not None:
        lengths[0] = prefill_len
    offsets = [0, *itertools.accumulate(lengths)]
    candidates = [width - 1] * num_requests if num_candidates is None else num_candidates
    context_lens = [100 * r + 3 for r in range(num_requests)]
    rows = []
    for stop, count in zip(offsets[1:], candidates, strict=True):
        rows.append([min(stop - 1 - count + j, stop - 1) for j in range(width)])
    temperature, top_k, top_p, min_p, seeds = zip(*sampling, strict=True)
    positions = [context_lens[r] + i for r in range(num_requests) for i in range(lengths[r])]
    return SamplingInputs(
        token_ids=torch.randint(VOCAB_SIZE, (offsets[-1],), generator=generator, dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32),
        token_offsets=torch.tensor(offsets, dtype=torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        logit_rows=torch.tensor(rows, dtype=torch.int32),
        num_candidates=torch.tensor(candidates, dtype=torch.int32),
        **columns_off(num_requests)
        | {
            "temperature": torch.tensor(temperature, dtype=torch.float32),
            "top_k": torch.tensor(top_k, dtype=torch.int32),
            "top_p": torch.tensor(top_p, dtype=torch.float32),
            "min_p": torch.tensor(min_p, dtype=torch.float32),
            "seed": torch.tensor(seeds, dtype=torch.int64),
        },
    )


def make_logits(num_rows, vocab_size=VOCAB_SIZE, *, dtype=torch.float32, spread=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(num_rows, vocab_size, generator=generator)).to(dtype)


def run_kernels(logits, inputs):
    return run_kernels_in_workspace(logits, inputs)[0]


def run_kernels_in_workspace(logits, inputs):
    """On the device the kernels run on; results are on the host."""
    num_requests, width = inputs.logit_rows.shape
    outputs = allocate_outputs(num_requests, width, DEVICE)
    workspace = allocate_workspace(len(logits), logits.shape[1], DEVICE)
    for tensor in workspace.values():  # whatever was there before
        tensor.fill_(7)
    sample_and_accept(logits.to(DEVICE), moved(inputs, DEVICE), outputs, workspace)
    return moved(outputs, "cpu"), {name: tensor.cpu() for name, tensor in workspace.items()}


def moved(tensors, device):
    given = {item.name: getattr(tensors, item.name) for item in fields(tensors)}
    return type(tensors)(**{name: None if value is None else value.to(device) for name, value in given.items()})


def network_inputs(inputs):
    tensors = {item.name: getattr(inputs, item.name) for item in fields(inputs)}
    return StepInputs(page_table=torch.zeros(len(inputs.seed), 1, dtype=torch.int32), **tensors)


def assert_same(outputs, expected):
    assert outputs.emitted_tokens.tolist() == expected.emitted_tokens.tolist()
    assert outputs.num_accepted.tolist() == expected.num_accepted.tolist()
    assert outputs.bonus_tokens.tolist() == expected.bonus_tokens.tolist()
    assert outputs.next_context_lens.tolist() == expected.next_context_lens.tolist()
    torch.testing.assert_close(outputs.emitted_logprobs, expected.emitted_logprobs, rtol=1e-5, atol=2e-5)


MIXED = (
    (0.0, 0, 1.0, 0.0, 1),
    (1.0, 0, 1.0, 0.0, 2),
    (0.7, 50, 1.0, 0.0, 2**40 + 3),  # a seed with a high word
    (1.3, 0, 0.9, 0.0, 2**63 - 1),
    (0.9, 1000, 0.95, 0.02, 5),
    (1.0, 0, 1.0, 0.05, 6),
    (2.0, 1, 1.0, 0.0, 7),
    (1.0, VOCAB_SIZE, 0.5, 0.0, 8),
    (1.0, 0, 1e-6, 0.0, 9),
    (0.01, 0, 0.999, 0.0, 10),
    (1.5, VOCAB_SIZE - 1, 1.0, 0.0, 11),  # more than the pieces of a row: searched in full
    (4.0, 0, 0.9999, 0.0, 12),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_batch_of_every_kind_of_request_is_sampled_as_defined(dtype):
    inputs = make_inputs(MIXED, width=1)
    logits = make_logits(len(MIXED), dtype=dtype)
    outputs = run_kernels(logits, inputs)
    assert_same(outputs, reference_sampling.sample_and_accept(logits, inputs))
    assert_same(outputs, torch_sampling.sample_and_accept(logits, network_inputs(inputs)))


def test_another_seed_position_or_filter_gives_other_tokens():
    """The negative controls of the test above."""
    inputs = make_inputs(MIXED, width=2)
    logits = make_logits(2 * len(MIXED))
    tokens = reference_sampling.sample_and_accept(logits, inputs).emitted_tokens  # the kernels', as shown above
    changes = {"seed": inputs.seed + 1, "positions": inputs.positions + 1, "temperature": inputs.temperature * 1.2}
    for name, value in changes.items():
        changed = reference_sampling.sample_and_accept(logits, replace(inputs, **{name: value})).emitted_tokens
        assert changed.tolist() != tokens.tolist(), name
    assert changed[0].tolist() == tokens[0].tolist()  # greedy knows none of them


@pytest.mark.parametrize("vocab_size", [1, 3, 63, 272, TILE - 1, TILE, TILE + 1])
def test_any_vocabulary_size_will_do(vocab_size):
    sampling = [(0.0, 0, 1.0, 0.0, 1), (1.0, 5, 0.9, 0.0, 2), (1.0, 0, 1.0, 0.0, 3)]
    inputs = make_inputs(sampling, width=1, seed=vocab_size)
    logits = make_logits(3, vocab_size, seed=vocab_size)
    outputs = run_kernels(logits, inputs)
    assert_same(outputs, reference_sampling.sample_and_accept(logits, inputs))
    assert int(outputs.emitted_tokens.max()) < vocab_size


def test_greedy_takes_the_first_of_equals_across_tiles():
    inputs = make_inputs([(0.0, 0, 1.0, 0.0, 0)] * 3, width=1)
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[1, [TILE + 5, TILE + 6, 2 * TILE]] = 1.0
    logits[2] = -torch.inf
    assert run_kernels(logits, inputs).emitted_tokens.flatten().tolist() == [0, TILE + 5, 0]


# Numpy, under the interpreter, says that it computes with infinities; on a GPU nobody does.
ignores_infinities = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


@ignores_infinities
@pytest.mark.parametrize("vocab_size", [300, TILE])
def test_rows_that_are_not_finite_have_the_log_probability_nan_and_their_mates_theirs(vocab_size):
    samplings = [(0.0, 0, 1.0, 0.0, 0), (1.0, 0, 1.0, 0.0, 0), (1.0, 5, 0.9, 0.0, 0), (0.5, 0, 1.0, 0.1, 4)]
    bad = list(rows_without_a_token(vocab_size).values())
    good = make_logits(1, vocab_size)[0]
    rows, asked = [], []
    for sampling in samplings:
        for row in bad:
            rows += [row, good]
            asked += [sampling, sampling]
    inputs, logits = make_inputs(asked, width=1), torch.stack(rows)
    outputs = run_kernels(logits, inputs)
    expected = reference_sampling.sample_and_accept(logits, inputs)
    assert outputs.emitted_logprobs[0::2].isnan().all() and expected.emitted_logprobs[0::2].isnan().all()
    tokens = outputs.emitted_tokens.flatten().tolist()
    assert all(0 <= token < vocab_size for token in tokens)
    assert tokens[1::2] == expected.emitted_tokens.flatten().tolist()[1::2]
    torch.testing.assert_close(
        outputs.emitted_logprobs[1::2], expected.emitted_logprobs[1::2], rtol=1e-5, atol=2e-5
    )  # finite ones


@ignores_infinities
def test_the_ends_of_every_number_mean_what_they_mean_on_the_cpu():
    samplings = [device_sampling(params, seed) for params, _ in EXTREMES for seed in range(3)]
    inputs = make_inputs([(s.temperature, s.top_k, s.top_p, s.min_p, s.seed) for s in samplings], width=1)
    most_likely = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    logits = torch.empty(300).index_copy_(0, most_likely, -torch.arange(300.0)).expand(len(samplings), -1).contiguous()
    outputs = run_kernels(logits, inputs)
    assert_same(outputs, torch_sampling.sample_and_accept(logits, network_inputs(inputs)))
    ranks = [most_likely.tolist().index(token) for token in outputs.emitted_tokens.flatten().tolist()]
    for index, (_, num_likely) in enumerate(EXTREMES):
        assert max(ranks[3 * index : 3 * index + 3]) < (num_likely or 300)


def kept_tokens(logits, *, top_k=0, top_p=1.0, min_p=0.0):
    """What the kernels' threshold keeps of one row at temperature 1, and a few tokens drawn from it."""
    inputs = make_inputs([(1.0, top_k, top_p, min_p, seed) for seed in range(4)], width=1)
    outputs, workspace = run_kernels_in_workspace(logits.expand(4, -1).contiguous(), inputs)
    exponentials = (logits - logits.max()).exp()
    kept = (exponentials >= workspace["row_threshold"][0] * (1 - 1e-6)).logical_and(exponentials > 0)
    return set(kept.nonzero().flatten().tolist()), set(outputs.emitted_tokens.flatten().tolist())


def test_masked_tokens_are_never_drawn():
    logits = torch.full((VOCAB_SIZE,), -torch.inf)
    open_tokens = [3, TILE - 1, TILE, VOCAB_SIZE - 1]
    logits[open_tokens] = 0.0
    for filters in ({}, {"top_k": 100}, {"top_p": 0.999}, {"top_k": 3}):
        kept, drawn = kept_tokens(logits, **filters)
        assert kept == set(open_tokens) and drawn <= kept and len(drawn) > 1, filters


def test_ties_with_the_last_token_kept_are_kept():
    logits = torch.full((300,), -3.0)
    logits[[10, 20, 30, 40]] = 2.0
    logits[5] = 3.0
    for filters in ({"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.367}):
        assert kept_tokens(logits, **filters)[0] == {5, 10, 20, 30, 40}, filters
    for filters in ({"top_k": 1}, {"top_p": 0.3}, {"min_p": 0.369}):
        assert kept_tokens(logits, **filters) == ({5}, {5}), filters


def test_of_tied_tokens_only_those_with_room_count_in_the_mass_that_top_p_sees():
    logits = torch.tensor([0.0] + [-1.0] * 20)
    # top_k 2 leaves e^0 + e^-1 = 1.37, whose 0.74 is 1.01: the second token is needed, and its ties come along.
    for top_p, num_kept in ((0.74, 21), (0.72, 1)):
        masses = kept_masses(logits, temperature=1.0, top_k=2, top_p=top_p, min_p=0.0)
        assert masses.count_nonzero() == num_kept
        assert len(kept_tokens(logits, top_k=2, top_p=top_p)[0]) == num_kept


FLAT = LIST_CAPACITY + 999


@pytest.mark.parametrize(
    ("top_k", "top_p", "spread"),
    [(0, 0.97, 0.01), (0, 0.97, 1.0), (0, 0.9999, 0.0), (FLAT - 50, 1.0, 1.0), (LIST_CAPACITY + 1, 0.98, 0.01)],
)
def test_the_histograms_of_a_flat_row_that_overflows_its_list_keep_what_pytorch_keeps(top_k, top_p, spread):
    logits = make_logits(1, FLAT, spread=spread)
    inputs = make_inputs([(1.5, top_k, top_p, 0.0, 3)], width=1)
    outputs, workspace = run_kernels_in_workspace(logits, inputs)
    assert int(workspace["list_count"][0]) > LIST_CAPACITY
    filters = {"top_k": torch.tensor([top_k]), "top_p": torch.tensor([top_p]), "min_p": torch.zeros(1)}
    expected = int((torch_sampling.filtered_weights(logits / 1.5, **filters) > 0).sum())
    exponentials = ((logits - logits.max()) / 1.5).exp()
    # a float32 sum of the tail ends a token or two elsewhere; e^x of numpy may differ in its last bit
    assert abs(int((exponentials >= workspace["row_threshold"] * (1 - 1e-7)).sum()) - expected) <= 3
    assert_same(outputs, torch_sampling.sample_and_accept(logits, network_inputs(inputs)))


@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}])
def test_the_reference_keeps_what_the_network_keeps(filters):
    settings = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    for seed in range(20):
        scores = make_logits(1, 500, dtype=torch.bfloat16, seed=seed).float()  # with many ties
        tensors = {name: torch.tensor([value]) for name, value in settings.items()}
        expected = torch_sampling.filtered_weights(scores / 0.8, **tensors)[0]
        masses = kept_masses(scores[0], temperature=0.8, **settings)
        assert torch.equal(masses > 0, expected > 2**-40)
        torch.testing.assert_close(masses / masses.sum(), expected / expected.sum(), rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("num_agreeing", range(4))
@pytest.mark.parametrize("num_candidates", range(4))
def test_a_prefix_of_candidates_is_accepted(num_candidates, num_agreeing):
    inputs = make_inputs([(0.0, 0, 1.0, 0.0, 0)] * 2, width=4, num_candidates=[num_candidates, 3])
    logits = make_logits(8, 300)
    tokens = logits.argmax(dim=1).view(2, 4)
    for j in range(num_agreeing):
        inputs.token_ids[inputs.logit_rows[:, j] + 1] = tokens[:, j].int()
    outputs = run_kernels(logits, inputs)
    assert_same(outputs, torch_sampling.sample_and_accept(logits, network_inputs(inputs)))
    assert outputs.num_accepted[0] <= min(num_candidates, num_agreeing)


def test_a_prefill_chunk_beside_verify_blocks_gives_one_token():
    inputs = make_inputs([(0.0, 0, 1.0, 0.0, 0), (1.0, 0, 0.9, 0.0, 4)], width=4, num_candidates=[0, 3], prefill_len=9)
    logits = make_logits(8, 300)
    outputs = run_kernels(logits, inputs)
    assert_same(outputs, torch_sampling.sample_and_accept(logits, network_inputs(inputs)))
    assert outputs.num_accepted[0] == 0 and outputs.next_context_lens[0] == inputs.context_lens[0] + 9


def test_the_draft_block_s_inputs_are_made_on_the_device():
    inputs = make_inputs([(0.0, 0, 1.0, 0.0, 0)] * 3, width=4)
    outputs = run_kernels(make_logits(12, 300), inputs)
    outputs = moved(outputs, DEVICE)
    token_ids, positions = (torch.empty(3, 4, dtype=torch.int32, device=DEVICE) for _ in range(2))
    draft_block(outputs.bonus_tokens, outputs.next_context_lens, token_ids, positions, mask_token_id=99)
    assert token_ids.tolist() == [[bonus, 99, 99, 99] for bonus in outputs.bonus_tokens.tolist()]
    starts = outputs.next_context_lens.tolist()
    assert positions.tolist() == [[start + slot for slot in range(4)] for start in starts]
