"""sample_and_accept on a CPU against its definition, row by row; no kernel is needed to tell right from wrong."""

import math

import pytest
import torch

from dflash_trt.backends.torch.philox import DRAFTS, token_words
from dflash_trt.backends.torch.sampling import _smallest_kept, draft_tokens, filtered_weights, sample_and_accept
from dflash_trt.network.ops import Acceptance, StepInputs
from tests.logit_rows import columns_off

VOCAB_SIZE = 16
WIDTH = 4  # K + 1


def step_inputs(
    rows: list[list[int]],
    *,
    context_lens: list[int],
    num_candidates: list[int],
    temperature: float = 0.0,
    top_k: int = 0,
    seeds: list[int] | None = None,
) -> StepInputs[torch.Tensor]:
    """`rows` are each request's tokens; the last num_candidates of them are drafts."""
    lengths = [len(row) for row in rows]
    offsets = [sum(lengths[:r]) for r in range(len(rows) + 1)]
    firsts = [offsets[r + 1] - 1 - num_candidates[r] for r in range(len(rows))]
    logit_rows = [[min(first + j, offsets[r + 1] - 1) for j in range(WIDTH)] for r, first in enumerate(firsts)]

    def each(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((len(rows),), value, dtype=dtype)

    return StepInputs(
        token_ids=torch.tensor([token for row in rows for token in row], dtype=torch.int32),
        positions=torch.tensor(
            [start + i for start, n in zip(context_lens, lengths, strict=True) for i in range(n)], dtype=torch.int32
        ),
        token_offsets=torch.tensor(offsets, dtype=torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        page_table=torch.zeros(len(rows), 1, dtype=torch.int32),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int32),
        num_candidates=torch.tensor(num_candidates, dtype=torch.int32),
        **columns_off(len(rows))
        | {
            "temperature": each(temperature, torch.float32),
            "top_k": each(top_k, torch.int32),
            "seed": torch.tensor(seeds or [0] * len(rows), dtype=torch.int64),
        },
    )


def accept(logits: torch.Tensor, inputs: StepInputs[torch.Tensor]) -> Acceptance[torch.Tensor]:
    """`logits` has one row per token of the step."""
    return sample_and_accept(logits[inputs.logit_rows.flatten().long()], inputs)


@pytest.mark.parametrize("shift", [0, 2**16, 2**20])
def test_a_draw_is_that_of_the_position_its_token_will_have(shift: int) -> None:
    """All tokens are equally likely, so that the token is the one with the smallest random word."""
    seeds = [5, 2**40 + 1]
    inputs = step_inputs(
        [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]], context_lens=[0, 100], num_candidates=[3, 3], temperature=0.7, seeds=seeds
    )
    inputs.positions.add_(shift)
    emitted = accept(torch.zeros(10, VOCAB_SIZE), inputs).emitted_tokens
    for request, anchor in enumerate((0, 102)):  # the second request's first two rows are prompt
        positions = shift + anchor + 1 + torch.arange(WIDTH)  # of the tokens after the anchor and after each draft
        words = token_words(torch.full_like(positions, seeds[request]), positions, VOCAB_SIZE)
        assert emitted[request].tolist() == words.argmin(dim=1).tolist()  # -log(-log(1 - v)) falls with the word


def test_logprobs_are_those_of_the_unfiltered_distribution_at_temperature_1() -> None:
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 3
    expected = logits.log_softmax(dim=1)
    for temperature, top_k in ((0.0, 0), (0.25, 0), (2.0, 0), (2.0, 3)):
        inputs = step_inputs([[1, 2, 3, 4]], context_lens=[0], num_candidates=[3], temperature=temperature, top_k=top_k)
        found = accept(logits, inputs)
        rows = expected.gather(1, found.emitted_tokens[0].long()[:, None])[:, 0]
        torch.testing.assert_close(found.emitted_logprobs[0], rows)


@pytest.mark.parametrize("num_right", range(WIDTH))
@pytest.mark.parametrize("num_prompt_tokens", [0, 2])
def test_the_bonus_token_is_the_targets_own_after_the_last_accepted_draft(
    num_right: int, num_prompt_tokens: int
) -> None:
    """Two requests of different lengths; the second verifies one draft less."""
    liked = torch.tensor([3, 7, 1, 12, 5, 9, 2, 4, 8, 6])  # what the target prefers after each row
    logits = torch.nn.functional.one_hot(liked, VOCAB_SIZE).float()
    first, second = [0] * num_prompt_tokens + [0], [0]
    for row, num_drafts in ((first, 3), (second, 2)):
        start = len(row) - 1 + (0 if row is first else len(first))
        row += [int(liked[start + j]) if j < num_right else 15 for j in range(num_drafts)]
    inputs = step_inputs([first, second], context_lens=[10, 20], num_candidates=[3, 2])
    found = accept(logits, inputs)
    num_accepted = [min(num_right, 3), min(num_right, 2)]
    anchors = [num_prompt_tokens, len(first)]
    assert found.num_accepted.tolist() == num_accepted
    assert found.bonus_tokens.tolist() == [int(liked[a + n]) for a, n in zip(anchors, num_accepted, strict=True)]
    assert found.next_context_lens.tolist() == [10 + num_prompt_tokens + 1 + num_accepted[0], 21 + num_accepted[1]]
    for request, count in enumerate(num_accepted):
        emitted = found.emitted_tokens[request, : count + 1].tolist()
        assert emitted == liked[anchors[request] : anchors[request] + count + 1].tolist()


def test_a_right_draft_after_a_wrong_one_is_not_accepted() -> None:
    liked = torch.tensor([3, 7, 1, 12])
    logits = torch.nn.functional.one_hot(liked, VOCAB_SIZE).float()
    inputs = step_inputs([[0, 3, 15, 1]], context_lens=[0], num_candidates=[3])
    assert accept(logits, inputs).num_accepted.tolist() == [1]


def test_the_tokens_of_the_next_request_are_no_drafts_of_this_one() -> None:
    """The second request begins with what the target would emit after the first one's only draft, and then again."""
    liked = torch.full((5,), 3)
    logits = torch.nn.functional.one_hot(liked, VOCAB_SIZE).float()
    inputs = step_inputs([[0, 3], [3, 3, 3]], context_lens=[0, 0], num_candidates=[1, 0])
    assert accept(logits, inputs).num_accepted.tolist() == [1, 0]


# Boundaries of the filters


def test_top_p_keeps_no_token_beyond_a_prefix_that_has_exactly_its_mass() -> None:
    weights = torch.tensor([[0.125, 0.5, 0.125, 0.25]])  # exact in float32
    for top_p, smallest in ((0.5, 0.5), (0.75, 0.25), (0.7500001, 0.125), (0.4999999, 0.5)):
        kept = _smallest_kept(weights, torch.tensor([0]), torch.tensor([top_p]))
        assert float(kept) == smallest, top_p


def test_top_p_counts_of_what_top_k_left() -> None:
    weights = torch.tensor([[0.125, 0.5, 0.125, 0.25]])
    kept = _smallest_kept(weights, torch.tensor([2]), torch.tensor([0.6666]))  # 0.5 of 0.75
    assert float(kept) == 0.5


def test_min_p_keeps_a_token_of_exactly_its_share() -> None:
    weights = torch.tensor([[0.0, -math.log(2.0), -3.0]]).softmax(dim=1)
    share = float(weights[0, 1] / weights[0, 0])
    filters = {"top_k": torch.tensor([0]), "top_p": torch.tensor([1.0])}
    kept = filtered_weights(weights.log(), min_p=torch.tensor([share * 0.999]), **filters)
    assert kept[0].nonzero()[:, 0].tolist() == [0, 1]
    kept = filtered_weights(weights.log(), min_p=torch.tensor([share * 1.001]), **filters)
    assert kept[0].nonzero()[:, 0].tolist() == [0]


@pytest.mark.parametrize("drawn_first", [False, True])
def test_greedy_and_sampled_requests_share_a_step(drawn_first: bool) -> None:
    logits = torch.randn(8, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    rows, contexts, candidates = [[1, 2, 3, 4]] * 2, [0, 50], [3, 3]
    mixed = step_inputs(rows, context_lens=contexts, num_candidates=candidates, seeds=[11, 11])
    temperatures = [0.9, 0.0] if drawn_first else [0.0, 0.9]
    mixed.temperature.copy_(torch.tensor(temperatures))
    found = accept(logits, mixed).emitted_tokens
    for request, temperature in enumerate(temperatures):
        alone = step_inputs(
            rows[:1],
            context_lens=contexts[request : request + 1],
            num_candidates=[3],
            temperature=temperature,
            seeds=[11],
        )
        expected = accept(logits[4 * request : 4 * request + 4], alone).emitted_tokens
        assert found[request].tolist() == expected[0].tolist()


@pytest.mark.parametrize("draft_stream", [0, DRAFTS])
@pytest.mark.parametrize("is_reduced", [False, True])
def test_drafts_made_one_at_a_time_are_those_made_together(draft_stream: int, is_reduced: bool) -> None:
    """As a chain makes them: slot by slot, each with the noise of its own place."""
    num_drafts, draft_topk = WIDTH - 1, 4
    seeds = list(range(20))
    rows = [[1, 2, 3, 4]] * len(seeds)
    inputs = step_inputs(rows, context_lens=seeds, num_candidates=[3] * len(seeds), temperature=0.8, seeds=seeds)
    inputs.draft_stream.fill_(draft_stream)
    generator = torch.Generator().manual_seed(1)
    acceptance = accept(torch.randn(inputs.token_ids.numel(), VOCAB_SIZE, generator=generator), inputs)
    draft_to_target = torch.tensor([1, 2, 3, 5, 7, 8, 11, 15]) if is_reduced else None
    size = VOCAB_SIZE if draft_to_target is None else len(draft_to_target)
    logits = torch.randn(len(seeds), num_drafts, size, generator=generator)
    together = draft_tokens(logits.flatten(0, 1), inputs, acceptance, draft_to_target, draft_topk=draft_topk)
    alone = [
        draft_tokens(
            logits[:, slot].contiguous(),
            inputs,
            acceptance,
            draft_to_target,
            draft_topk=draft_topk,
            first_slot=slot + 1,
        )
        for slot in range(num_drafts)
    ]
    assert torch.equal(torch.cat([each.tokens for each in alone], 1), together.tokens)
    assert not torch.equal(together.tokens, logits.argmax(2)) and (together.draft_topk_ids is None) == (
        draft_stream == 0
    )
    if draft_stream == 0 and not is_reduced:  # the noise in which a target of the same logits gives the same tokens
        starts = acceptance.next_context_lens.tolist()
        verifying = step_inputs(
            rows, context_lens=starts, num_candidates=[3] * len(seeds), temperature=0.8, seeds=seeds
        )
        of_target = torch.cat([logits, logits[:, :1]], 1).flatten(0, 1)
        assert torch.equal(accept(of_target, verifying).emitted_tokens[:, :num_drafts], together.tokens)
    if together.draft_topk_ids is not None:
        assert torch.equal(torch.cat([each.draft_topk_ids for each in alone], 1), together.draft_topk_ids)
        torch.testing.assert_close(torch.cat([each.draft_topk_probs for each in alone], 1), together.draft_topk_probs)
