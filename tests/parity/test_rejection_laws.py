"""Laws 2 and 4 with rejection sampling: texts follow the target through scheduler and loops, whatever drafts."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dflash_trt.backends.slots import DeviceSlots
from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.core.array import Array
from dflash_trt.core.batch import StepBatch, StepSampling, chained, plan_of, run_batch
from dflash_trt.core.request import Request, SamplingParams
from dflash_trt.network.proposal import Proposal
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import BatchSizeDraftLength, DraftLengthPolicy, FixedDraftLength, StepObservation
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.scheduler.verify_budget import best_budget
from dflash_trt.serving.engine_loop import EngineLoop
from tests.dflash2_files import make_dflash2_drafter
from tests.dspark_files import save_dspark_drafter
from tests.eagle3_files import save_eagle3_head
from tests.engines import Decoding, make_executor
from tests.factories import make_target, make_zlab_drafter
from tests.mtp_files import make_mtp_target
from tests.parity.test_laws import chi_square_p, merge_rare
from tests.scheduler.toy_constraint import ToyConstraint

PROMPT = (1, 4)
NUM_NEW = 3
CELLS = list(itertools.product(range(5), repeat=NUM_NEW))
DRAFTERS = ("dflash", "dflash2", "dspark", "eagle3")
MAKERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dflash": (make_zlab_drafter, {"block_size": 4}),
    "dflash2": (make_dflash2_drafter, {"block_size": 4, "top_k": 4}),
    "dspark": (
        save_dspark_drafter,
        {"block_size": 4, "draft_tokens": (0, 1, 3, 4), "aux_hidden_state_layer_ids": (1, 3)},
    ),
    "eagle3": (save_eagle3_head, {}),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("five") / "target", vocab_size=5, tokenizer=False, seed=3)


@pytest.fixture(scope="module", params=DRAFTERS)
def executor(request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory) -> TorchExecutor:
    return open_executor(request.param, target, tmp_path_factory.mktemp("drafter") / "drafter")


def open_executor(name: str, target: Path, path: Path) -> TorchExecutor:
    make, options = MAKERS[name]
    drafter = make(path, target_dir=target, **options)
    return make_executor(target, drafter, max_batch_size=64, has_confidence=True)


@pytest.fixture(scope="module")
def logprobs(target: Path) -> Tensor:
    return logprobs_after(target, PROMPT)


def logprobs_after(target: Path, prompt: Sequence[int]) -> Tensor:
    """transformers' of every token of every text, [cells, NUM_NEW, 5]."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([[*prompt, *cell] for cell in CELLS])).logits
    return logits[:, len(prompt) - 1 : len(prompt) - 1 + NUM_NEW].log_softmax(-1)


def probabilities(logprobs: Tensor, *, temperature: float = 1.0, top_k: int = 5) -> Tensor:
    """Of every text."""
    scaled = logprobs / temperature
    smallest = scaled.topk(top_k, dim=-1).values[..., -1:]
    kept = scaled.masked_fill(scaled < smallest, -torch.inf).log_softmax(-1)
    return kept.gather(2, torch.tensor(CELLS)[:, :, None])[:, :, 0].sum(1).exp()


def texts_of(
    loop: EngineLoop,
    sampling: SamplingParams,
    num_samples: int,
    constraint: ToyConstraint | None = None,
    *,
    prompt: Sequence[int] = PROMPT,
    is_reproducible: bool = False,
) -> tuple[Tensor, float]:
    """How often each text came out, and the part of the drafts that was accepted."""
    counts, num_candidates, num_accepted = torch.zeros(len(CELLS)), 0, 0
    index = {cell: i for i, cell in enumerate(CELLS)}
    requests = [
        Request(
            request_id=str(seed),
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            seed=seed,
            is_reproducible=is_reproducible,
            constraint=constraint,
        )
        for seed in range(num_samples)
    ]
    streams = [loop.submit(request) for request in requests]
    while loop.step():
        pass
    for stream in streams:
        output = stream.result(timeout_s=1)
        counts[index[tuple(output.token_ids)]] += 1
        num_candidates += sum(step.num_candidates for step in output.steps)
        num_accepted += sum(step.num_accepted for step in output.steps)
    loop.check_integrity()
    return counts, num_accepted / max(1, num_candidates)


class HistoryBudget(FixedDraftLength):
    """Verifies as many drafts as the slot's last blocks and its place among the rows say."""

    has_budget = True

    def __init__(self) -> None:
        super().__init__(3)
        self._num_accepted = np.zeros(64, np.int64)

    def limit(self, slots: Array, epochs: Array, num_candidates: Array, confidence: Array) -> Array:
        return np.minimum(num_candidates, (self._num_accepted[slots] + np.arange(len(slots))) % 4)

    def observe(self, step: StepObservation) -> None:
        self._num_accepted[step.slots] += step.num_accepted


class ConfidenceBudget(FixedDraftLength):
    """The adaptive policy's rule, for times that are fixed."""

    has_budget = True

    def limit(self, slots: Array, epochs: Array, num_candidates: Array, confidence: Array) -> Array:
        known = np.where(np.isnan(confidence), 0.5, confidence)
        reach = np.cumprod(np.where(np.arange(known.shape[1]) < num_candidates[:, None], known, 0.0), axis=1)
        return best_budget(reach, fixed_s=0.5 * len(slots), row_s=0.12).num_candidates(reach)


class PeekingBudget(HistoryBudget):
    """Verifies a first draft by its value: what no budget may do."""

    def __init__(self, executor: TorchExecutor) -> None:
        super().__init__()
        self._drafts = executor._slots.token_ids

    def limit(self, slots: Array, epochs: Array, num_candidates: Array, confidence: Array) -> Array:
        return np.where(self._drafts.numpy()[slots, 1] == 2, num_candidates, 0)


def make_loop(
    executor: TorchExecutor,
    *,
    overlaps: bool = False,
    draft_lengths: Any = None,
    policy: DraftLengthPolicy | None = None,
    ngram: bool = False,
) -> EngineLoop:
    policy = policy if draft_lengths is None else BatchSizeDraftLength(draft_lengths)
    return EngineLoop(executor, Scheduler(executor.limits, SchedulerConfig(ngram=ngram), policy), overlaps=overlaps)


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapped": {"overlaps": True},
    "another K in every batch": {"draft_lengths": {1: 3, 16: 1, 40: 2, 60: 3}},
    "a budget by history": {"policy": HistoryBudget()},
    "a budget by confidence": {"policy": ConfidenceBudget(3)},
}


TOP_K = {"temperature": 0.7, "top_k": 3}


@pytest.mark.parametrize(
    ("mode", "filters"),
    [
        *(pytest.param(mode, {}, id=name) for name, mode in MODES.items()),
        *(
            pytest.param(mode, TOP_K, id=f"{name}, top_k", marks=pytest.mark.slow if mode else ())
            for name, mode in MODES.items()
        ),
    ],
)
def test_texts_follow_the_targets_distribution(
    executor: TorchExecutor, logprobs: Tensor, mode: dict[str, Any], filters: dict[str, Any]
) -> None:
    sampling = SamplingParams(**{"temperature": 1.0} | filters, max_new_tokens=NUM_NEW)
    counts, accepted = texts_of(make_loop(executor, **mode), sampling, num_samples=2560)
    expected = probabilities(logprobs, **filters) * counts.sum()
    assert counts[expected == 0].sum() == 0
    assert chi_square_p(*merge_rare(counts, expected)) > 1e-3  # fixed seeds: never flaky
    assert 0.05 < accepted < 0.95  # both ways are taken


def test_a_budget_that_looks_at_drafts_is_noticed(tmp_path: Path, target: Path, logprobs: Tensor) -> None:
    executor = open_executor("dflash", target, tmp_path / "drafter")
    loop = make_loop(executor, policy=PeekingBudget(executor))
    counts, _ = texts_of(loop, SamplingParams(temperature=1.0, max_new_tokens=NUM_NEW), num_samples=2560)
    assert chi_square_p(*merge_rare(counts, probabilities(logprobs) * counts.sum())) < 1e-6


def test_so_they_do_with_the_target_s_own_mtp_head(tmp_path: Path) -> None:
    target = make_mtp_target(tmp_path / "target", family="glm4_moe", vocab_size=5, tokenizer=False, seed=3)
    executor = make_executor(target, target, max_batch_size=64)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=NUM_NEW)
    counts, accepted = texts_of(make_loop(executor), sampling, num_samples=2560)
    expected = probabilities(logprobs_after(target, PROMPT)) * counts.sum()
    assert chi_square_p(*merge_rare(counts, expected)) > 1e-3
    assert 0.05 < accepted < 0.95


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("fault", ["draft_topk_probs of the token before", "draft_topk_probs of an earlier step"])
def test_a_slot_that_keeps_the_wrong_probabilities_is_noticed(
    tmp_path: Path, target: Path, logprobs: Tensor, monkeypatch: pytest.MonkeyPatch, name: str, fault: str
) -> None:
    """The negative controls."""
    honest = DeviceSlots.store

    def store(slots: DeviceSlots, slot_ids: Tensor, bonus: Tensor, proposal: Any, context_lens: Tensor) -> None:
        if proposal is not None and proposal.draft_topk_probs is not None:
            kept = slots.draft_topk_probs[slot_ids, : proposal.draft_topk_probs.shape[1]]
            moved = proposal.draft_topk_probs.roll(1, 1) if "token before" in fault else kept
            proposal = replace(proposal, draft_topk_probs=torch.where(kept.sum() > 0, moved, proposal.draft_topk_probs))
        honest(slots, slot_ids, bonus, proposal, context_lens)

    monkeypatch.setattr(DeviceSlots, "store", store)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=NUM_NEW)
    loop = make_loop(open_executor(name, target, tmp_path / "drafter"))
    counts, _ = texts_of(loop, sampling, num_samples=2560)
    assert chi_square_p(*merge_rare(counts, probabilities(logprobs) * counts.sum())) < 1e-6


def test_penalties_reach_the_test_of_a_draft(executor: TorchExecutor, logprobs: Tensor) -> None:
    """The tested distribution is that of the rules: a token that has come is half as likely, whoever drafts it."""
    sampling = SamplingParams(temperature=1.0, max_new_tokens=NUM_NEW, presence_penalty=0.7)
    counts, _ = texts_of(make_loop(executor), sampling, num_samples=2560)
    scores = logprobs.clone()
    for i, cell in enumerate(CELLS):
        for position in range(1, NUM_NEW):
            scores[i, position, list(set(cell[:position]))] -= 0.7
    expected = probabilities(scores.log_softmax(-1)) * counts.sum()
    assert chi_square_p(*merge_rare(counts, expected)) > 1e-3
    assert chi_square_p(*merge_rare(counts, probabilities(logprobs) * counts.sum())) < 1e-6


def test_a_step_that_runs_again_gives_the_same_and_stores_the_same(executor: TorchExecutor) -> None:
    sampling = StepSampling(temperature=1.0, seed=9, draft_stream=1)
    runs = [Decoding(executor, [*PROMPT, i], tuple(range(4 * i, 4 * i + 4)), sampling) for i in range(3)]
    prefill = StepBatch(requests=tuple(run.prefill_part(9) for run in runs), num_draft_tokens=3)
    results = run_batch(executor, prefill)
    for run, part, result in zip(runs, prefill.requests, results, strict=True):
        run.take(part, result)
    verify = chained(plan_of(StepBatch(requests=tuple(run.verify_part(3) for run in runs), num_draft_tokens=3)))
    before = [tensor.clone() for tensor in executor._slots.tensors]
    found = []
    for _ in range(2):
        for tensor, kept in zip(executor._slots.tensors, before, strict=True):
            tensor.copy_(kept)
        found.append((tokens_of(executor.submit(verify).result()), [x.clone() for x in executor._slots.tensors]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))
    draft_topk = executor.limits.draft_topk
    draft_topk_probs = executor._slots.draft_topk_probs[:3, : 3 * draft_topk].view(3, 3, draft_topk)
    torch.testing.assert_close(draft_topk_probs.sum(2), torch.ones(3, 3))


def tokens_of(result: Any) -> Sequence[Any]:
    return result.emitted_tokens.tolist(), result.num_accepted.tolist(), result.draft_tokens.tolist()


def test_a_step_without_such_requests_keeps_no_probabilities(executor: TorchExecutor) -> None:
    """And costs nothing for them."""
    seen: list[Proposal[Tensor]] = []
    slots = executor._slots
    with pytest.MonkeyPatch.context() as patch:
        honest = slots.store
        patch.setattr(slots, "store", lambda *given: seen.append(given[2]) or honest(*given))
        part = Decoding(executor, [*PROMPT], (0, 1), StepSampling(temperature=1.0, seed=4)).prefill_part(9)
        run_batch(executor, StepBatch(requests=(part,), num_draft_tokens=3))
    assert seen[0].draft_topk_ids is None and seen[0].draft_topk_probs is None


@pytest.mark.parametrize("mode", ["plain", "overlapped"])
def test_a_draft_that_a_constraint_refuses_is_tested_and_not_just_left_out(
    executor: TorchExecutor, logprobs: Tensor, mode: str
) -> None:
    """Were its row sampled as if nothing had been drawn, drafts that are allowed would come too often."""
    constraint = ToyConstraint(length=9, one_in=2, vocab_size=5)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=NUM_NEW)
    counts, _ = texts_of(make_loop(executor, **MODES[mode]), sampling, num_samples=2560, constraint=constraint)
    matcher, masked = constraint.start(()), logprobs.clone()
    for i, cell in enumerate(CELLS):
        for position in range(NUM_NEW):
            refused = set(range(5)) - set(matcher.allowed(cell[:position]))
            masked[i, position, list(refused)] = -torch.inf
    is_text = torch.tensor([matcher.num_allowed(cell) == NUM_NEW for cell in CELLS])
    assert counts[~is_text].sum() == 0 and 5 < is_text.sum() < len(CELLS) / 2
    expected = probabilities(masked.log_softmax(-1)) * counts.sum()
    assert chi_square_p(*merge_rare(counts[is_text], expected[is_text])) > 1e-3


# Whatever the first new token is, the prompt has it after the same four tokens, followed by others.
BEFORE = (0, 1, 2, 3)
REPEATING = [token for first in range(5) for token in (*BEFORE, first, (2 * first + 1) % 5, (first + 3) % 5)]
REPEATING += BEFORE


@pytest.mark.parametrize(
    "filters", [pytest.param({}, id="all tokens"), pytest.param(TOP_K, id="top_k", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("is_reproducible", [False, True], ids=["rejection sampling", "seeded"])
def test_drafts_from_the_text_leave_the_distribution_as_it_is(
    executor: TorchExecutor, target: Path, is_reproducible: bool, filters: dict[str, Any]
) -> None:
    sampling = SamplingParams(**{"temperature": 1.0} | filters, max_new_tokens=NUM_NEW)
    loop = make_loop(executor, ngram=True)
    options: dict[str, Any] = {"prompt": REPEATING, "is_reproducible": is_reproducible}
    counts, _ = texts_of(loop, sampling, 2560, **options)
    expected = probabilities(logprobs_after(target, REPEATING), **filters) * counts.sum()
    assert counts[expected == 0].sum() == 0
    assert chi_square_p(*merge_rare(counts, expected)) > 1e-3  # fixed seeds: never flaky
    scheduler = loop.statistics().scheduler
    assert scheduler.num_ngram_draft_tokens > 2000  # most requests have them
    assert 0.05 < scheduler.num_ngram_accepted_tokens / scheduler.num_ngram_draft_tokens < 0.95
    if is_reproducible:
        assert torch.equal(counts, texts_of(make_loop(executor), sampling, 2560, **options)[0])


def test_drafts_from_the_text_with_the_drafters_probabilities_are_noticed(
    executor: TorchExecutor, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: they are no samples of what the slot keeps."""
    kind = type(executor._slots)
    honest = kind.assemble

    def assemble(slots: DeviceSlots, plan: Any, inputs: Any, page_tables: Any = None) -> None:
        honest(slots, plan, inputs, page_tables)
        kept = slots.draft_topk_probs[plan.slot_ids, : inputs.draft_topk_probs.shape[1]]
        is_decoding = inputs.num_candidates > 0
        inputs.draft_topk_probs.copy_(torch.where(is_decoding[:, None], kept, inputs.draft_topk_probs))

    monkeypatch.setattr(kind, "assemble", assemble)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=NUM_NEW)
    counts, _ = texts_of(make_loop(executor, ngram=True), sampling, 2560, prompt=REPEATING)
    assert chi_square_p(*merge_rare(counts, probabilities(logprobs_after(target, REPEATING)) * counts.sum())) < 1e-6
