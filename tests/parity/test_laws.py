"""Laws 2 and 4: the distribution at T > 0 is the target's; a request does not depend on what shares its step."""

import itertools
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_trt.backends.torch import sampling as torch_sampling
from dflash_trt.core.batch import StepBatch, StepSampling, run_batch
from tests.engines import Decoding, decode, make_executor
from tests.factories import make_target, make_zlab_drafter

PROMPTS = [[5, 9, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [7], [3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3]]
NUM_NEW = 24
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    target = make_target(root / "target", vocab_size=12, tokenizer=False)
    return target, make_zlab_drafter(root / "drafter", target_dir=target, block_size=6)


@pytest.fixture(scope="module")
def executor(pair):
    return make_executor(*pair)


def decode_together(executor, samplings, *, num_draft_tokens, chunk):
    """All prompts at once, each entering one step after the last, with prefill chunks beside verify blocks."""
    pages = iter(range(executor.limits.num_pages))
    runs = [
        Decoding(executor, prompt, tuple(itertools.islice(pages, 14)), sampling)
        for prompt, sampling in zip(PROMPTS, samplings, strict=True)
    ]
    for step in itertools.count():
        live = [run for i, run in enumerate(runs) if i <= step and len(run.tokens) < NUM_NEW]
        if not live:
            return runs
        parts = [run.verify_part(num_draft_tokens) if run.tokens else run.prefill_part(chunk) for run in live]
        results = run_batch(executor, StepBatch(requests=tuple(parts), num_draft_tokens=num_draft_tokens))
        for run, part, result in zip(live, parts, results, strict=True):
            run.take(part, result)
    raise AssertionError


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("num_draft_tokens", [0, 2, 5])
@pytest.mark.parametrize("temperature", [0.0, TEMPERATURE])
def test_tokens_do_not_depend_on_batch_mates_or_chunks(executor, temperature, num_draft_tokens, chunk):
    samplings = [StepSampling(temperature=temperature, top_k=9, top_p=0.95, seed=7 + i) for i in range(len(PROMPTS))]
    together = decode_together(executor, samplings, num_draft_tokens=num_draft_tokens, chunk=chunk)
    for prompt, sampling, run in zip(PROMPTS, samplings, together, strict=True):
        alone = decode(executor, prompt, NUM_NEW, num_draft_tokens=num_draft_tokens, sampling=sampling)
        assert run.tokens[:NUM_NEW] == alone.tokens[:NUM_NEW]
        assert run.blocks[:5] == alone.blocks[:5]  # the drafts too


def test_sampled_tokens_do_not_depend_on_the_number_of_drafts(executor):
    sampling = StepSampling(temperature=TEMPERATURE, seed=3)
    runs = [decode(executor, PROMPTS[1], NUM_NEW, num_draft_tokens=k, sampling=sampling) for k in (0, 1, 5)]
    assert runs[0].tokens[:NUM_NEW] == runs[1].tokens[:NUM_NEW] == runs[2].tokens[:NUM_NEW]
    assert sum(runs[2].num_accepted) > 0


def test_drafting_resumes_after_steps_without_drafts(executor):
    """K = 0 keeps feeding the draft context: the drafts after a pause equal those made straight after a prefill."""
    paused = Decoding(executor, PROMPTS[1], tuple(range(14)))
    for k in (5, 5, 0, 0, 5, 5):
        part = paused.verify_part(min(k, len(paused.drafts))) if paused.tokens else paused.prefill_part(100)
        paused.take(part, run_batch(executor, StepBatch(requests=(part,), num_draft_tokens=k))[0])
    last_block = paused.blocks[-1]
    anchor_position = paused.context_len - paused.num_accepted[-1] - 1
    assert len(last_block) == 6
    prompt = (PROMPTS[1] + paused.tokens)[:anchor_position]
    assert decode(executor, prompt, 2, num_draft_tokens=5).blocks[0] == last_block


def chi_square_p(counts, expected):
    """Upper tail of the chi-square distribution with cells - 1 degrees of freedom."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(expected) - 1.0)
    return 1 - torch.special.gammainc(freedom / 2, statistic / 2)


def sampled_counts(executor, num_draft_tokens, cells, *, num_samples=3200):
    """How often each triple of first tokens came out, over seeds."""
    counts = torch.zeros(len(cells))
    index = {cell: i for i, cell in enumerate(cells)}
    width = executor.limits.max_batch_size
    for start in range(0, num_samples, width):
        runs = [
            Decoding(executor, [1, 4], tuple(range(4 * i, 4 * i + 4)), StepSampling(temperature=1.0, seed=start + i))
            for i in range(width)
        ]
        while live := [run for run in runs if len(run.tokens) < 3]:
            parts = [run.verify_part(num_draft_tokens) if run.tokens else run.prefill_part(9) for run in live]
            results = run_batch(executor, StepBatch(requests=tuple(parts), num_draft_tokens=num_draft_tokens))
            for run, part, result in zip(live, parts, results, strict=True):
                run.take(part, result)
        for run in runs:
            counts[index[tuple(run.tokens[:3])]] += 1
    return counts


@pytest.fixture(scope="module")
def five_tokens(tmp_path_factory):
    """A target over five tokens, every triple's exact probability by `transformers`, and an executor."""
    root = tmp_path_factory.mktemp("five")
    target = make_target(root / "target", vocab_size=5, tokenizer=False, seed=3)
    drafter = make_zlab_drafter(root / "drafter", target_dir=target, block_size=4)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    cells = list(itertools.product(range(5), repeat=3))
    with torch.no_grad():
        logprobs = model(torch.tensor([[1, 4, *cell] for cell in cells])).logits[:, 1:4].log_softmax(-1)
    triples = torch.tensor(cells)[:, :, None]
    probabilities = logprobs.gather(2, triples)[:, :, 0].sum(1).exp()
    return make_executor(target, drafter, max_batch_size=64), cells, probabilities


def merge_rare(counts, expected, *, least=5.0):
    """Cells expected fewer than `least` times become one, as the chi-square approximation asks."""
    is_rare = expected < least
    if not is_rare.any():
        return counts, expected
    merged = [torch.cat((x[~is_rare], x[is_rare].sum()[None])) for x in (counts, expected)]
    return merged[0], merged[1]


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3])
def test_sampling_follows_the_targets_distribution_for_every_k(five_tokens, num_draft_tokens):
    executor, cells, probabilities = five_tokens
    counts = sampled_counts(executor, num_draft_tokens, cells)
    assert chi_square_p(*merge_rare(counts, probabilities * counts.sum())) > 1e-3  # fixed seeds: never flaky


def test_accepting_every_draft_is_noticed_by_the_distribution_test(five_tokens, monkeypatch):
    honest_sample_and_accept = torch_sampling.sample_and_accept

    def accept_everything(logits, inputs, *rules):
        honest = honest_sample_and_accept(logits, inputs, *rules)
        tokens = honest.emitted_tokens.clone()
        candidates = inputs.token_ids[(inputs.logit_rows[:, :-1] + 1).clamp(max=len(inputs.token_ids) - 1).long()]
        is_candidate = torch.arange(candidates.shape[1]) < inputs.num_candidates[:, None]
        tokens[:, :-1] = torch.where(is_candidate, candidates, tokens[:, :-1])
        num_accepted = inputs.num_candidates
        return replace(
            honest,
            emitted_tokens=tokens,
            num_accepted=num_accepted,
            bonus_tokens=tokens.gather(1, num_accepted[:, None].long())[:, 0],
            next_context_lens=honest.next_context_lens - honest.num_accepted + num_accepted,
        )

    executor, cells, probabilities = five_tokens
    monkeypatch.setattr(torch_sampling, "sample_and_accept", accept_everything)
    counts = sampled_counts(executor, 3, cells)
    assert chi_square_p(*merge_rare(counts, probabilities * counts.sum())) < 1e-6
