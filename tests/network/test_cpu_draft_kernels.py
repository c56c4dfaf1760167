"""The CPU kernels of DFlash2's ops against the same ops in PyTorch, in every instruction set."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_trt.backends.step_inputs import step_inputs
from dflash_trt.backends.torch.dflash2 import most_likely
from dflash_trt.backends.torch.native.library import Candidates, CpuKernels, NoKernels, cpu_kernels
from dflash_trt.backends.torch.native.ops import NativeOps
from dflash_trt.backends.torch.ops import TorchOps
from dflash_trt.core.batch import ScheduledRequest, StepBatch, StepSampling
from dflash_trt.network.ops import Acceptance, Codebooks

if isinstance(found := cpu_kernels(), NoKernels):
    pytest.skip(f"no CPU kernels: {found.reason}", allow_module_level=True)

REQUESTS, K, VOCAB, RANK = 3, 4, 101, 37


def make_ops(
    kernels: CpuKernels | None, *, temperatures: tuple[float, ...] = (0.0,) * REQUESTS, has_confidence: bool = False
) -> Any:
    requests = tuple(
        ScheduledRequest(
            request_id=str(index),
            token_ids=(5,) * (K + 1),
            context_len=10 * index,
            num_candidates=K,
            page_ids=tuple(range(4 * index, 4 * index + 4)),
            sampling=StepSampling(temperature=temperature, seed=2**40 + index),
        )
        for index, temperature in enumerate(temperatures)
    )
    inputs = step_inputs(StepBatch(requests=requests, num_draft_tokens=K))
    common: dict[str, Any] = {"page_size": 16, "num_draft_tokens": K, "has_confidence": has_confidence}
    return TorchOps(inputs, {}, **common) if kernels is None else NativeOps(inputs, {}, kernels=kernels, **common)


@pytest.mark.parametrize("group_size", [16, 8, 3])
@pytest.mark.parametrize("num_taps", [1, 2, 4])
def test_the_block_convolution_is_that_of_pytorch(kernels: CpuKernels, num_taps: int, group_size: int) -> None:
    torch.manual_seed(0)
    width, coefficients = 5 * group_size, 5 * num_taps
    x, base = torch.randn(REQUESTS * (K + 1), width), torch.randn(1, num_taps, width)
    both = torch.randn(len(x), 2 * coefficients)  # of the two sides of a sublayer
    for filters in both.split(coefficients, dim=1):
        expected = make_ops(None).block_conv(x, filters, base)
        torch.testing.assert_close(make_ops(kernels).block_conv(x, filters, base), expected, rtol=0, atol=2e-6)
        assert (make_ops(kernels).block_conv(x, filters.roll(1, 0), base) - expected).abs().max() > 0.1


def selected(ops: Any, logits: Tensor, top_k: int, *, codebooks_from: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(codebooks_from)
    predecessor, successor = (torch.randn(VOCAB, RANK, generator=generator) / 3 for _ in range(2))
    hidden = torch.randn(REQUESTS * K, RANK, generator=generator)
    none = torch.zeros(REQUESTS, dtype=torch.int32)
    acceptance = Acceptance(
        emitted_tokens=none,
        emitted_logprobs=none,
        num_accepted=none,
        bonus_tokens=torch.tensor([7, 0, 100], dtype=torch.int32),
        next_context_lens=torch.tensor([3, 40, 0], dtype=torch.int32),
    )
    codebooks = Codebooks(predecessor=predecessor, successor=successor, top_k=top_k)
    tokens = ops.select_tokens(logits, hidden, codebooks, acceptance).tokens
    assert tokens.dtype == torch.int32
    return tokens.tolist()


@pytest.mark.parametrize("temperatures", [(0.0, 0.0, 0.0), (0.0, 0.8, 2.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("top_k", [1, 5, 16])
def test_the_walk_through_candidates_is_that_of_pytorch(
    kernels: CpuKernels, temperatures: tuple[float, ...], top_k: int
) -> None:
    torch.manual_seed(2)
    logits = 2 * torch.randn(REQUESTS * K, VOCAB)
    ours, theirs = (make_ops(each, temperatures=temperatures) for each in (kernels, None))
    expected = selected(theirs, logits, top_k)
    assert selected(ours, logits, top_k) == expected
    if top_k > 1:
        assert selected(ours, logits, top_k, codebooks_from=9) != expected
        assert (selected(make_ops(kernels), logits, top_k) == expected) is (max(temperatures) == 0)


def test_ties_nan_and_infinities_choose_the_candidates_that_pytorch_chooses(kernels: CpuKernels) -> None:
    torch.manual_seed(3)
    logits = torch.randn(REQUESTS * K, VOCAB).mul(2).round()  # a handful of values
    logits[0, ::2], logits[1] = torch.nan, torch.nan
    logits[2, 4], logits[3, 9] = torch.inf, -torch.inf
    logits[4, ::2] = -0.0
    expected = selected(make_ops(None), logits, 6)
    assert selected(make_ops(kernels), logits, 6) == expected
    assert all(0 <= token < VOCAB for row in selected(make_ops(kernels), logits, 6) for token in row)


def test_the_candidates_are_those_of_pytorch_to_the_last_tie(kernels: CpuKernels) -> None:
    torch.manual_seed(3)
    logits = torch.randn(40, VOCAB).mul(2).round()
    logits[0, ::2], logits[1], logits[2] = torch.nan, torch.nan, 0.0
    for top_k in (1, 5, 16):
        scores, tokens = torch.empty(40, top_k), torch.empty(40, top_k, dtype=torch.int32)
        kernels.call(Candidates(logits.data_ptr(), *logits.shape, top_k, scores.data_ptr(), tokens.data_ptr()))
        expected = most_likely(logits, top_k)
        assert torch.equal(tokens.long(), expected)
        assert torch.equal(scores, logits.nan_to_num(-torch.inf, neginf=-torch.inf).gather(1, expected))


def test_a_step_without_requests_that_sample_has_no_noise(kernels: CpuKernels) -> None:
    ops = make_ops(kernels)
    ops._inputs = replace(ops._inputs, seed=None)  # type: ignore[arg-type]
    selected(ops, torch.randn(REQUESTS * K, VOCAB), 4)


@pytest.mark.parametrize("from_anchor", [False, True])
def test_blocks_follow_the_accepted_tokens_as_in_pytorch(kernels: CpuKernels, from_anchor: bool) -> None:
    none = torch.zeros(REQUESTS, dtype=torch.int32)
    acceptance = Acceptance(
        emitted_tokens=none,
        emitted_logprobs=none,
        num_accepted=none,
        bonus_tokens=torch.tensor([7, 0, 100], dtype=torch.int32),
        next_context_lens=torch.tensor([3, 40, 0], dtype=torch.int32),
    )
    found, expected = (
        make_ops(each).token_blocks(acceptance, fill=9, drafts_from_anchor=from_anchor) for each in (kernels, None)
    )
    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.equal(found.rows.positions, expected.rows.positions)


def test_greedy_drafts_are_those_of_pytorch(kernels: CpuKernels) -> None:
    torch.manual_seed(5)
    logits, none = torch.randn(REQUESTS * K, VOCAB), torch.zeros(REQUESTS, dtype=torch.int32)
    acceptance = Acceptance(
        emitted_tokens=none, emitted_logprobs=none, num_accepted=none, bonus_tokens=none, next_context_lens=none
    )
    for mapping in (None, torch.randperm(VOCAB).int()):
        found, expected = (
            make_ops(each).draft_tokens(logits, acceptance, mapping, draft_topk=4).tokens for each in (kernels, None)
        )
        assert torch.equal(found, expected)


def test_the_confidence_of_drafts_is_that_of_pytorch(kernels: CpuKernels) -> None:
    torch.manual_seed(6)
    logits, none = 3 * torch.randn(REQUESTS * K, VOCAB), torch.zeros(REQUESTS, dtype=torch.int32)
    logits[1, 3], logits[2] = torch.nan, -torch.inf
    acceptance = Acceptance(
        emitted_tokens=none, emitted_logprobs=none, num_accepted=none, bonus_tokens=none, next_context_lens=none
    )
    found, expected = (
        make_ops(each, has_confidence=True).draft_tokens(logits, acceptance, None, draft_topk=4).confidence
        for each in (kernels, None)
    )
    assert found.isnan().sum() == 2 and found.shape == (REQUESTS, K)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("num_accepted", range(K + 1))
def test_greedy_verification_is_that_of_pytorch(kernels: CpuKernels, num_accepted: int) -> None:
    torch.manual_seed(num_accepted)
    logits = 3 * torch.randn(REQUESTS * (K + 1), VOCAB)
    drafts = logits.argmax(dim=1).view(REQUESTS, K + 1)[:, :-1].clone()
    if num_accepted < K:
        drafts[1, num_accepted] = (drafts[1, num_accepted] + 1) % VOCAB
    acceptances = []
    for each in (kernels, None):
        ops = make_ops(each)
        ops._inputs.token_ids.view(REQUESTS, K + 1)[:, 1:] = drafts
        acceptances.append(ops.sample_and_accept(logits))
    found, expected = acceptances
    for name in ("emitted_tokens", "num_accepted", "bonus_tokens", "next_context_lens"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert found.num_accepted.tolist() == [K, num_accepted, K]
    torch.testing.assert_close(found.emitted_logprobs, expected.emitted_logprobs, rtol=0, atol=2e-6)


def test_rows_without_a_token_have_no_log_probability(kernels: CpuKernels) -> None:
    logits = torch.randn(REQUESTS * (K + 1), VOCAB)
    logits[0, 3], logits[1], logits[2, 100], logits[3] = torch.nan, torch.nan, torch.inf, -torch.inf
    logits[4, 5:] = -torch.inf
    found, expected = (make_ops(each).sample_and_accept(logits) for each in (kernels, None))
    assert found.emitted_logprobs.isnan().flatten().tolist() == [True] * 4 + [False] * (REQUESTS * (K + 1) - 4)
    assert torch.equal(found.emitted_logprobs.isnan(), expected.emitted_logprobs.isnan())
    assert found.emitted_tokens.min() >= 0 and found.emitted_tokens.max() < VOCAB


def test_nan_hides_no_token_of_its_lane(kernels: CpuKernels) -> None:
    """Tokens 9, 25 and 41 are in one lane of 8 and of 16."""
    logits = torch.zeros(REQUESTS * (K + 1), VOCAB)
    logits[0, 9], logits[0, 25] = 2.0, torch.nan
    logits[1, 41], logits[1, 25] = 2.0, torch.nan
    assert make_ops(kernels).sample_and_accept(logits).emitted_tokens.flatten()[:2].tolist() == [9, 41]
