"""Penalties, biases and bans under speculation: the tokens of `transformers.generate` with the same processors.

For every K, in both loops, through prefix hits and preemption; and the exact distribution where tokens are drawn.
"""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from dflash_trt.backends.slots import DeviceSlots
from dflash_trt.core.request import Request, SamplingParams
from dflash_trt.network.proposal import Proposal
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import FixedDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from tests.engines import make_executor
from tests.factories import make_target, make_zlab_drafter
from tests.parity.test_laws import chi_square_p, merge_rare

SHARED = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
PROMPTS = [SHARED + tail for tail in ([8, 4], [6, 2, 6], [4], [3, 3, 8, 3, 2, 7, 9])]
NUM_NEW = 24
BAD_WORDS = ((5,), (2, 2), (3, 9), (1, 7, 4), (9, 10), (6, 6), (8, 3, 8))
CASES = {
    "repetition": {"repetition_penalty": 1.4},
    "presence and frequency": {"presence_penalty": 0.4, "frequency_penalty": 0.15},
    "bias": {"logit_bias": {2: -1.5, 7: 1.25, 5: -3.0, 10: -2.0}},
    "bad words": {"bad_words": "x"},
    "all": {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "logit_bias": {7: 0.5}, "bad_words": "x"},
}


class OutputPenalties(LogitsProcessor):
    """Presence and frequency penalties by OpenAI's formula, which transformers has not."""

    def __init__(self, num_prompt: int, presence: float, frequency: float) -> None:
        self.num_prompt, self.presence, self.frequency = num_prompt, presence, frequency

    def __call__(self, input_ids, scores):
        counts = torch.stack([torch.bincount(row[self.num_prompt :], minlength=scores.shape[1]) for row in input_ids])
        return scores - counts * self.frequency - (counts > 0) * self.presence


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """With heads for the CPU kernels, and texts that every case changes."""
    root = tmp_path_factory.mktemp("pair")
    target = make_target(root / "target", vocab_size=12, tokenizer=False, head_dim=32, seed=1)
    return target, make_zlab_drafter(root / "drafter", target_dir=target, block_size=8, head_dim=32)


@pytest.fixture(scope="module")
def model(pair):
    return AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32).eval()


def generated(model, prompt, *, eos=None, **sampling) -> list[int]:
    """Greedy tokens of transformers."""
    params = SamplingParams(**sampling)
    own = OutputPenalties(len(prompt), params.presence_penalty, params.frequency_penalty)
    settings = {}
    if params.logit_bias:
        settings["sequence_bias"] = {(token,): bias for token, bias in params.logit_bias}
    if params.bad_words:
        settings["bad_words_ids"] = [list(word) for word in BAD_WORDS]
    if params.min_tokens:
        settings["min_new_tokens"] = params.min_tokens
    ids = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NUM_NEW,
        eos_token_id=eos,
        pad_token_id=0,
        repetition_penalty=params.repetition_penalty,
        logits_processor=LogitsProcessorList([own]),
        **settings,
    )
    return ids[0, len(prompt) :].tolist()


def make_request(name, prompt, *, seed=0, stop=(), max_new_tokens=NUM_NEW, **sampling) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_new_tokens=max_new_tokens, **sampling),
        stop_token_ids=frozenset(stop),
        bad_word_ids=BAD_WORDS if "bad_words" in sampling else (),
        seed=seed,
    )


def make_loop(executor, *, k, overlaps=False, **config) -> EngineLoop:
    return EngineLoop(
        executor, Scheduler(executor.limits, SchedulerConfig(**config), FixedDraftLength(k)), overlaps=overlaps
    )


def outputs_of(loop, requests):
    streams = [loop.submit(each) for each in requests]
    while loop.step():
        loop.check_integrity()
    return [stream.result(timeout_s=1) for stream in streams]


@pytest.fixture(scope="module")
def opened():
    """Opens an executor over a pair of checkpoints: the modules that run these laws over others have their own."""
    return make_executor


@pytest.fixture(scope="module")
def executor(opened, pair):
    return opened(*pair)


def slots_of(executor) -> DeviceSlots:
    staged = getattr(executor, "_buffers", None)
    return executor._slots if staged is None else staged.staging.slots


def draft_nearly_right(monkeypatch, executor, expected: list[list[int]]) -> None:
    """Store drafts whose first n tokens are right, any n from 0 to K: request i is in slot i."""
    store = slots_of(executor).store

    def store_others(slot_ids, bonus_tokens, proposal, next_context_lens) -> None:
        draft_tokens = None if proposal is None else proposal.tokens
        for row, (slot, position) in enumerate(zip(slot_ids.tolist(), next_context_lens.tolist(), strict=True)):
            start = position - len(PROMPTS[slot]) + 1
            if draft_tokens is None or start < 1:
                continue
            right = torch.tensor(expected[slot][start : start + draft_tokens.shape[1]], dtype=torch.int32)
            draft_tokens[row, : len(right)] = right
            draft_tokens[row, start % (draft_tokens.shape[1] + 1) :] += 1
        changed = None if draft_tokens is None else Proposal(tokens=draft_tokens % 12)
        store(slot_ids, bonus_tokens, changed, next_context_lens)

    monkeypatch.setattr(slots_of(executor), "store", store_others)


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers_for_every_k_and_loop(model, executor, case, monkeypatch) -> None:
    expected = [generated(model, prompt, **CASES[case]) for prompt in PROMPTS]
    assert all(found != generated(model, prompt) for found, prompt in zip(expected, PROMPTS, strict=True))
    requests = [make_request(str(i), prompt, **CASES[case]) for i, prompt in enumerate(PROMPTS)]
    draft_nearly_right(monkeypatch, executor, expected)
    for k, overlaps in ((0, False), (3, False), (7, False), (7, True)):
        loop = make_loop(executor, k=k, overlaps=overlaps)
        outputs = outputs_of(loop, requests)
        loop.close()
        assert [list(output.token_ids) for output in outputs] == expected, (k, overlaps)
        accepted = {step.num_accepted for output in outputs for step in output.steps if step.num_candidates}
        assert k == 0 or (len(accepted) > 1 and max(accepted) > 1), accepted


def test_requests_with_rules_leave_the_others_alone_and_a_slot_forgets_them(model, executor) -> None:
    """Eight places for twelve requests, so that those without rules get slots of those with rules."""
    cases = [CASES["all"] if i % 2 else {} for i in range(12)]
    prompts = [PROMPTS[i % 4][i % 3 :] for i in range(12)]
    expected = [generated(model, prompt, **case) for prompt, case in zip(prompts, cases, strict=True)]
    for overlaps in (False, True):
        loop = make_loop(executor, k=7, overlaps=overlaps)
        together = [
            make_request(str(i), prompt, max_new_tokens=NUM_NEW - i, **case)
            for i, (prompt, case) in enumerate(zip(prompts, cases, strict=True))
        ]
        outputs = outputs_of(loop, together)
        loop.close()
        for i, output in enumerate(outputs):
            assert list(output.token_ids) == expected[i][: NUM_NEW - i], (overlaps, i)


def test_a_stop_token_waits_for_min_tokens(model, executor) -> None:
    prompt = PROMPTS[1]
    plain = generated(model, prompt)
    stop = plain[4]
    expected = generated(model, prompt, eos=stop, min_tokens=9)
    assert generated(model, prompt, eos=stop) == plain[: plain.index(stop) + 1] and len(expected) >= 9
    assert stop not in expected[:9]
    for k in (0, 3, 7):
        (output,) = outputs_of(make_loop(executor, k=k), [make_request("r", prompt, stop=(stop,), min_tokens=9)])
        assert list(output.token_ids) == expected


def test_a_prefix_hit_and_chunks_of_a_prompt_change_nothing(model, opened, pair) -> None:
    executor = opened(*pair)
    executor.limits = type(executor.limits)(
        **{name: getattr(executor.limits, name) for name in executor.limits.__dataclass_fields__}
        | {"max_num_tokens": 9}  # a prompt takes three steps
    )
    loop = make_loop(executor, k=7)
    for i, prompt in enumerate(PROMPTS):
        (output,) = outputs_of(loop, [make_request(str(i), prompt, **CASES["all"])])
        assert list(output.token_ids) == generated(model, prompt, **CASES["all"])
    assert loop.statistics().scheduler.num_prefix_hit_tokens >= 3 * (len(SHARED) // 4) * 4  # pages of four tokens


@pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "overlapped"])
def test_preemption_and_a_pause_in_the_middle_change_nothing(model, opened, pair, overlaps) -> None:
    expected = [generated(model, prompt, **CASES["all"]) for prompt in PROMPTS]
    loop = make_loop(opened(*pair), k=3, overlaps=overlaps)
    streams = [loop.submit(make_request(str(i), prompt, **CASES["all"])) for i, prompt in enumerate(PROMPTS)]
    for turn in range(1000):
        if turn in (3, 5, 8):
            assert loop._scheduler.preempt(str(turn % 4))
        if turn == 6:
            assert loop._scheduler.pause("2")
        if not loop.step() or (turn == 9 and loop._scheduler.resume("2")):
            loop._scheduler.resume("2")
            if not loop.step():
                break
    outputs = [stream.result(timeout_s=1) for stream in streams]
    loop.close()
    assert [list(output.token_ids) for output in outputs] == expected
    assert loop.statistics().scheduler.num_preemptions == 3


def test_log_probabilities_are_those_of_the_target_before_the_rules(model, executor) -> None:
    request = make_request("r", PROMPTS[0], logprobs=True, **CASES["all"])
    (output,) = outputs_of(make_loop(executor, k=7), [request])
    ids = torch.tensor([[*PROMPTS[0], *output.token_ids]])
    with torch.no_grad():
        logprobs = model(ids).logits[0, len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
    expected = logprobs.gather(1, ids[0, len(PROMPTS[0]) :, None])[:, 0]
    torch.testing.assert_close(torch.tensor(output.logprobs), expected, rtol=1e-4, atol=1e-4)


def test_a_request_whose_tokens_are_all_banned_ends_with_an_error_alone(executor) -> None:
    banned = make_request("banned", PROMPTS[0], stop=range(12), min_tokens=3)
    output, other = outputs_of(make_loop(executor, k=3), [banned, make_request("other", PROMPTS[1])])
    assert (output.finish_reason, output.token_ids) == ("error", ())
    assert other.finish_reason == "length"


@pytest.fixture(scope="module")
def five_tokens(tmp_path_factory, opened):
    root = tmp_path_factory.mktemp("five")
    target = make_target(root / "target", vocab_size=5, tokenizer=False, seed=3)
    drafter = make_zlab_drafter(root / "drafter", target_dir=target, block_size=4)
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval(), opened(
        target, drafter, max_batch_size=64
    )


DRAWN = {"repetition_penalty": 2.5, "presence_penalty": 0.7, "frequency_penalty": 0.9, "logit_bias": {2: 0.8}}


def probabilities_of_triples(model, prompt, cells, **sampling) -> torch.Tensor:
    """Of the first three tokens, by transformers' logits and processors."""
    params = SamplingParams(**sampling)
    total = torch.zeros(len(cells))
    repetition = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
    own = OutputPenalties(len(prompt), params.presence_penalty, params.frequency_penalty)
    bias = torch.zeros(5)
    for token, value in params.logit_bias:
        bias[token] = value
    triples = torch.tensor(cells)
    for n in range(3):
        ids = torch.cat((torch.tensor([prompt]).expand(len(cells), -1), triples[:, :n]), dim=1)
        with torch.no_grad():
            scores = model(ids).logits[:, -1] + bias
        scores = own(ids, repetition(ids, scores))
        total += scores.log_softmax(-1).gather(1, triples[:, n : n + 1])[:, 0]
    return total.exp()


@pytest.mark.parametrize("k", [0, 3])
def test_drawn_tokens_follow_the_penalized_distribution(five_tokens, k) -> None:
    model, executor = five_tokens
    prompt, num_samples = [1, 4], 1600
    cells = list(itertools.product(range(5), repeat=3))
    index = {cell: i for i, cell in enumerate(cells)}
    requests = [
        make_request(str(seed), prompt, seed=seed, temperature=1.0, max_new_tokens=3, **DRAWN)
        for seed in range(num_samples)
    ]
    loop = make_loop(executor, k=k, max_queue_len=None)
    streams = [loop.submit(each) for each in requests]
    while loop.step():
        pass
    outputs = [stream.result(timeout_s=1) for stream in streams]
    counts = torch.zeros(len(cells))
    for output in outputs:
        counts[index[output.token_ids]] += 1
    expected = num_samples * probabilities_of_triples(model, prompt, cells, **DRAWN)
    plain = num_samples * probabilities_of_triples(model, prompt, cells)
    assert chi_square_p(*merge_rare(counts, expected)) > 1e-3  # fixed seeds: never flaky
    assert chi_square_p(*merge_rare(counts, plain)) < 1e-6
