"""Rejection sampling of drafts: tokens follow the target, and as many drafts are accepted as possible."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_trt.backends.step_inputs import step_inputs
from dflash_trt.backends.torch import rejection, sampling
from dflash_trt.backends.torch.philox import DRAFTS, TOKENS, gumbel_noise, gumbel_noise_of, noise_and_numbers
from dflash_trt.backends.torch.sampling import draft_tokens, filtered_weights, sample_and_accept
from dflash_trt.core.batch import ScheduledRequest, StepBatch, StepSampling
from dflash_trt.network.ops import Acceptance, StepInputs
from dflash_trt.network.proposal import Proposal
from tests.parity.test_laws import chi_square_p

NUM_REQUESTS, K, VOCAB_SIZE, DRAFT_TOPK, CONTEXT_LEN = 8000, 2, 9, 5, 20
TEMPERATURE = 0.8
FILTERS: list[dict[str, float]] = [
    {},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.15},
    {"top_k": 6, "top_p": 0.9, "min_p": 0.05},
]


def logits_of(seed: int) -> Tensor:  # float32 [V]
    return 1.2 * torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


TARGET = torch.stack([logits_of(1), logits_of(2), logits_of(3)])  # of the rows of every request
DRAFTER = TARGET[:K] + 0.8 * torch.stack([logits_of(4), logits_of(5)])


@dataclass(frozen=True)
class Step:
    """Verify blocks of as many requests as there are seeds."""

    inputs: StepInputs[Tensor]
    acceptance: Acceptance[Tensor]
    proposal: Proposal[Tensor]

    def tokens(self, slot: int) -> Tensor:
        """Emitted there, of the requests that came so far."""
        return self.acceptance.emitted_tokens[self.acceptance.num_accepted >= slot, slot]


def run_step(
    filters: dict[str, Any],
    *,
    draft_stream: int = DRAFTS,
    target: Tensor = TARGET,
    drafter: Tensor = DRAFTER,
    draft_to_target: Tensor | None = None,
    num_requests: int = NUM_REQUESTS,
    change: Callable[[Proposal[Tensor]], Proposal[Tensor]] = lambda proposal: proposal,
) -> Step:
    """Draft for every request, and verify what `change` makes of it."""
    samplings = [
        StepSampling(temperature=TEMPERATURE, seed=seed, draft_stream=draft_stream, **filters)
        for seed in range(num_requests)
    ]
    first = verify_inputs(samplings, torch.zeros(num_requests, K, dtype=torch.int64))
    before: Any = Acceptance(**dict.fromkeys(Acceptance.__dataclass_fields__, first.context_lens))
    logits = drafter.repeat(num_requests, 1)
    proposal = change(draft_tokens(logits, first, before, draft_to_target, draft_topk=DRAFT_TOPK))
    inputs = verify_inputs(samplings, proposal.tokens)
    inputs = replace(inputs, draft_topk_ids=proposal.draft_topk_ids, draft_topk_probs=proposal.draft_topk_probs)
    return Step(inputs, sample_and_accept(target.repeat(num_requests, 1), inputs), proposal)


def verify_inputs(samplings: list[StepSampling], drafts: Tensor) -> StepInputs[Tensor]:
    requests = tuple(
        ScheduledRequest(
            request_id=str(r),
            token_ids=(0, *drafts[r].tolist()),
            context_len=CONTEXT_LEN,
            num_candidates=K,
            page_ids=(0,) * 23,
            sampling=sampling,
        )
        for r, sampling in enumerate(samplings)
    )
    return step_inputs(StepBatch(requests=requests, num_draft_tokens=K))


def distribution(logits: Tensor, filters: dict[str, float]) -> Tensor:
    """What the target gives, by the definition of the filters: [V]."""
    off = {"top_k": 0.0, "top_p": 1.0, "min_p": 0.0} | filters
    columns = {name: torch.tensor([value]) for name, value in off.items()}
    weights = filtered_weights(logits[None] / TEMPERATURE, **columns)[0]
    return weights / weights.sum()


def p_value(tokens: Tensor, expected: Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    is_there = expected > 0
    return float(chi_square_p(counts[is_there], len(tokens) * expected[is_there]))


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_every_token_follows_the_filtered_target_whatever_was_drawn(filters: dict[str, float]) -> None:
    step = run_step(filters)
    for slot in range(K + 1):
        tokens = step.tokens(slot)
        assert len(tokens) > 500
        assert p_value(tokens, distribution(TARGET[slot], filters)) > 1e-3  # fixed seeds: never flaky


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_draft_is_accepted_as_often_as_the_two_distributions_agree(filters: dict[str, float]) -> None:
    """1 - d_TV(p, q): q is the drafter's softmax over its candidates, and knows no filter."""
    scores, draft_topk_ids = (DRAFTER[0] / TEMPERATURE).topk(DRAFT_TOPK)
    q = torch.zeros(VOCAB_SIZE).scatter(0, draft_topk_ids, scores.softmax(0))
    agreed = float(torch.minimum(distribution(TARGET[0], filters), q).sum())
    deviation = (agreed * (1 - agreed) / NUM_REQUESTS) ** 0.5
    accepted = float((run_step(filters).acceptance.num_accepted > 0).float().mean())
    assert abs(accepted - agreed) < 4 * deviation
    if not filters:  # of distributions that the drafter knows
        shared = float((run_step(filters, draft_stream=TOKENS).acceptance.num_accepted > 0).float().mean())
        assert shared < agreed - 8 * deviation


def test_requests_with_and_without_a_seed_of_their_own_share_a_step() -> None:
    """The tokens and drafts of either kind are those of a step of that kind alone."""
    num_requests = 200
    alone = {stream: run_step({}, draft_stream=stream, num_requests=num_requests) for stream in (TOKENS, DRAFTS)}
    uses_rejection = torch.arange(num_requests) % 2 == 1
    drafts = torch.where(uses_rejection[:, None], alone[DRAFTS].proposal.tokens, alone[TOKENS].proposal.tokens)
    samplings = [
        StepSampling(temperature=TEMPERATURE, seed=seed, draft_stream=DRAFTS if seed % 2 else TOKENS)
        for seed in range(num_requests)
    ]
    inputs = verify_inputs(samplings, drafts)
    before: Any = Acceptance(**dict.fromkeys(Acceptance.__dataclass_fields__, inputs.context_lens))
    before = replace(before, next_context_lens=verify_inputs(samplings, torch.zeros_like(drafts)).context_lens)
    proposal = draft_tokens(DRAFTER.repeat(num_requests, 1), inputs, before, None, draft_topk=DRAFT_TOPK)
    assert torch.equal(proposal.tokens, drafts)
    inputs = replace(inputs, draft_topk_ids=proposal.draft_topk_ids, draft_topk_probs=proposal.draft_topk_probs)
    found = sample_and_accept(TARGET.repeat(num_requests, 1), inputs)
    for name in ("emitted_tokens", "num_accepted"):
        apart, shared = (getattr(alone[stream].acceptance, name) for stream in (DRAFTS, TOKENS))
        assert torch.equal(getattr(found, name)[uses_rejection], apart[uses_rejection])
        assert torch.equal(getattr(found, name)[~uses_rejection], shared[~uses_rejection])


def test_drafts_follow_the_drafters_top_candidates() -> None:
    step = run_step({})
    assert step.proposal.draft_topk_ids is not None and step.proposal.draft_topk_probs is not None
    for slot in range(K):
        columns = slice(slot * DRAFT_TOPK, (slot + 1) * DRAFT_TOPK)
        [draft_topk_ids], [draft_topk_probs] = (
            x[:1, columns] for x in (step.proposal.draft_topk_ids, step.proposal.draft_topk_probs)
        )
        scores, expected = (DRAFTER[slot] / TEMPERATURE).topk(DRAFT_TOPK)
        assert draft_topk_ids.tolist() == expected.tolist()
        torch.testing.assert_close(draft_topk_probs, scores.softmax(0))
        q = torch.zeros(VOCAB_SIZE).scatter(0, expected, draft_topk_probs)
        assert p_value(step.proposal.tokens[:, slot], q) > 1e-3


FAULTS = [
    "the tests' numbers",
    "the drafts' noise",
    "draft_topk_probs of another draft",
    "draft_topk_probs of another token",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_changed_part_is_noticed(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The negative controls: streams that are not apart, and a distribution that nothing was drawn from."""
    change: Callable[[Proposal[Tensor]], Proposal[Tensor]] = lambda proposal: proposal  # noqa: E731
    if fault == "the tests' numbers":  # those of the draft that most likely was drawn
        likely = DRAFTER[0].argmax()
        monkeypatch.setattr(
            sampling,
            "noise_and_numbers",
            lambda seed, position, size: (gumbel_noise(seed, position, size), drafts_number(seed, position, likely)),
        )
    elif fault == "the drafts' noise":
        monkeypatch.setattr(rejection, "gumbel_noise_of", lambda *given: gumbel_noise_of(*given[:3], TOKENS))
    else:
        shift = DRAFT_TOPK if fault == "draft_topk_probs of another draft" else 1
        change = lambda given: replace(given, draft_topk_probs=given.draft_topk_probs.roll(shift, 1))  # type: ignore[union-attr] # noqa: E731
    step = run_step({}, change=change, num_requests=3 * NUM_REQUESTS)
    assert p_value(step.tokens(0), distribution(TARGET[0], {})) < 1e-6


def drafts_number(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """The uniform number behind the noise of a draft."""
    noise = gumbel_noise_of(seed, position, token.expand(len(seed), 1), DRAFTS)[:, 0]
    return 1 - (-(-noise).exp()).exp()


def test_a_draft_that_was_not_drawn_is_tested_as_the_only_choice() -> None:
    """As the host gives them, or a drafter whose logits are none: exact, whatever they are."""
    fixed = torch.tensor([[3, 7]])

    def given(proposal: Proposal[Tensor]) -> Proposal[Tensor]:
        assert proposal.draft_topk_probs is not None
        tokens = fixed.expand(NUM_REQUESTS, -1).int()
        return replace(proposal, tokens=tokens, draft_topk_probs=torch.zeros_like(proposal.draft_topk_probs))

    step, expected = run_step({"top_p": 0.95}, change=given), distribution(TARGET[0], {"top_p": 0.95})
    assert p_value(step.tokens(0), expected) > 1e-3
    accepted = float((step.acceptance.num_accepted > 0).float().mean())
    assert abs(accepted - float(expected[3])) < 0.02


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_a_drafter_that_gives_no_distribution_changes_no_distribution(value: float) -> None:
    broken = DRAFTER.clone()
    broken[0, 2:] = value
    if value < 0:
        broken[0] = value
    step = run_step({}, drafter=broken)
    assert step.proposal.draft_topk_probs is not None and step.proposal.draft_topk_probs.isfinite().all()
    assert p_value(step.tokens(0), distribution(TARGET[0], {})) > 1e-3


def test_the_same_distribution_is_always_accepted() -> None:
    """Also where rounding leaves nothing of the residual: a token that the filters keep is drawn, never another."""
    target = torch.full((K + 1, VOCAB_SIZE), -torch.inf)
    target[:, 4:7] = torch.tensor([0.3, 0.1, 0.2])
    step = run_step({}, target=target, drafter=target[:K])
    assert set(step.acceptance.emitted_tokens.unique().tolist()) == {4, 5, 6}
    assert (step.acceptance.num_accepted == K).float().mean() > 0.999

    def certain(proposal: Proposal[Tensor]) -> Proposal[Tensor]:
        """q is p and a hair more on every choice, so that every draft is rejected and no residual is left."""
        assert proposal.draft_topk_probs is not None
        return replace(proposal, draft_topk_probs=1e6 * proposal.draft_topk_probs)

    step = run_step({}, target=target, drafter=target[:K], change=certain, num_requests=300)
    assert set(step.acceptance.emitted_tokens[:, 0].unique().tolist()) <= {4, 5, 6}


def test_drafts_of_a_draft_vocabulary_are_tested_by_the_targets_ids() -> None:
    ids = torch.tensor([1, 2, 5, 6, 8])
    step = run_step({}, drafter=DRAFTER[:, ids], draft_to_target=ids)
    assert step.proposal.draft_topk_ids is not None
    assert set(step.proposal.draft_topk_ids.unique().tolist()) == set(ids.tolist())
    assert p_value(step.tokens(0), distribution(TARGET[0], {})) > 1e-3
    q = torch.zeros(VOCAB_SIZE).scatter(0, ids, (DRAFTER[0, ids] / TEMPERATURE).softmax(0))
    agreed = float(torch.minimum(distribution(TARGET[0], {}), q).sum())
    assert abs(float((step.acceptance.num_accepted > 0).float().mean()) - agreed) < 0.02


def test_log_probabilities_are_those_of_the_unfiltered_target() -> None:
    step = run_step({"top_k": 4}, num_requests=100)
    tokens = step.acceptance.emitted_tokens.long()
    expected = TARGET.log_softmax(1).expand(100, -1, -1).gather(2, tokens[:, :, None])[:, :, 0]
    torch.testing.assert_close(step.acceptance.emitted_logprobs, expected)


def test_other_requests_of_the_step_are_sampled_as_if_nobody_tested() -> None:
    """Greedy ones, those with shared noise, and those that verify fewer drafts."""
    mixed = [
        StepSampling(),
        StepSampling(temperature=TEMPERATURE, seed=5),
        StepSampling(temperature=TEMPERATURE, seed=6, draft_stream=DRAFTS),
    ]
    drafts = torch.tensor([[1, 2], [3, 4], [5, 6]])
    inputs = verify_inputs(mixed, drafts)
    draft_topk_ids = torch.arange(DRAFT_TOPK).repeat(3, K).int()
    tested = replace(
        inputs, draft_topk_ids=draft_topk_ids, draft_topk_probs=torch.full(draft_topk_ids.shape, 1 / DRAFT_TOPK)
    )
    logits = TARGET.repeat(3, 1)
    expected = sample_and_accept(logits, replace(inputs, draft_stream=torch.zeros(3).int()))
    found = sample_and_accept(logits, tested)
    assert found.emitted_tokens[:2].tolist() == expected.emitted_tokens[:2].tolist()
    none = replace(tested, num_candidates=torch.zeros(3).int())
    assert sample_and_accept(logits, none).emitted_tokens.tolist() == expected.emitted_tokens.tolist()


def test_streams_are_apart() -> None:
    seeds, position = torch.arange(4000), torch.full((4000,), 7)
    tokens = torch.zeros(4000, 1)
    noise = [gumbel_noise_of(seeds, position, tokens, stream)[:, 0] for stream in (TOKENS, DRAFTS)]
    numbers = [*(1 - (-(-x).exp()).exp() for x in noise), noise_and_numbers(seeds, position, 4)[1]]
    correlations = torch.corrcoef(torch.stack(numbers)) - torch.eye(3)
    assert correlations.abs().max() < 0.06  # 4 deviations of independent ones
    assert torch.equal(noise_and_numbers(seeds, position, 6)[0], gumbel_noise(seeds, position, 6))
    histogram = torch.histc(numbers[2], bins=20, min=0, max=1)
    assert ((histogram - 200) ** 2 / 200).sum() < 43.8  # 19 degrees of freedom, p = 0.001
