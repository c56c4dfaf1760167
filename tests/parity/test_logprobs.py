"""Log probabilities of the most likely tokens and of prompts equal those that transformers' logits give, in float32."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_trt.backends.torch import logprobs as torch_logprobs
from dflash_trt.core.request import GenerationOutput, Request, SamplingParams
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import FixedDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from tests.engines import make_executor
from tests.factories import make_target, make_zlab_drafter

TOLERANCE = 1e-4  # measured 3e-6
SHARED = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
PROMPTS = [SHARED + tail for tail in ([8, 4], [6, 2, 6], [4], [3, 3, 8, 3, 2, 7, 9])]
WANTED = [(20, 2), (0, None), (3, 0), (1, 20)]  # top_logprobs and prompt_logprobs of each prompt
NUM_NEW = 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    target = make_target(root / "target", vocab_size=48, tokenizer=False)
    return target, make_zlab_drafter(root / "drafter", target_dir=target, block_size=8)


@pytest.fixture(scope="module")
def opened():
    """Opens an executor over a pair of checkpoints: the modules that run these laws over others have their own."""
    return make_executor


@pytest.fixture(scope="module")
def model(pair):
    return AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32).eval()


def make_requests(**sampling) -> list[Request]:
    return [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(
                max_new_tokens=NUM_NEW, logprobs=True, top_logprobs=top, prompt_logprobs=of_prompt, **sampling
            ),
            seed=i,
        )
        for i, (prompt, (top, of_prompt)) in enumerate(zip(PROMPTS, WANTED, strict=True))
    ]


def run(executor, requests, *, overlaps=False, num_draft_tokens=7, **config) -> list[GenerationOutput]:
    policy = FixedDraftLength(num_draft_tokens)
    loop = EngineLoop(executor, Scheduler(executor.limits, SchedulerConfig(**config), policy), overlaps=overlaps)
    streams = [loop.submit(request) for request in requests]
    while loop.step():
        loop.check_integrity()
    run.statistics = loop.statistics().scheduler
    loop.close()
    return [stream.result(timeout_s=1) for stream in streams]


def difference(model, prompt, output, *, top_logprobs, prompt_logprobs) -> float:
    """The largest one of any log probability; infinite where a token, an order or a number of entries is another."""
    with torch.no_grad():
        logprobs = model(torch.tensor([[*prompt, *output.token_ids]])).logits[0, :-1].log_softmax(-1)
    first = len(prompt) - 1
    assert len(output.top_logprobs) == (len(output.token_ids) if top_logprobs else 0)
    worst = 0.0
    for i, entries in enumerate(output.top_logprobs):
        worst = max(worst, _difference(logprobs[first + i], entries, top_logprobs))
    if prompt_logprobs is None:
        assert output.prompt_logprobs is None
        return worst
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
    for i, entry in enumerate(output.prompt_logprobs[1:]):
        assert entry.token_id == prompt[i + 1]
        worst = max(worst, abs(logprobs[i, entry.token_id].item() - entry.logprob))
        worst = max(worst, _difference(logprobs[i], entry.top_logprobs, prompt_logprobs))
    return worst


def _difference(row, entries, count) -> float:
    expected = row.topk(count)
    token_ids = [entry.token_id for entry in entries]
    assert len(set(token_ids)) == len(token_ids) == count
    found = torch.tensor([entry.logprob for entry in entries])
    # Near-ties may change places: each entry has the log probability of its place, and that of its token.
    return max([0.0, *(found - expected.values).abs().tolist(), *(found - row[token_ids]).abs().tolist()])


def worst_of(model, outputs) -> float:
    return max(
        difference(model, prompt, output, top_logprobs=top, prompt_logprobs=of_prompt)
        for prompt, output, (top, of_prompt) in zip(PROMPTS, outputs, WANTED, strict=True)
    )


@pytest.mark.parametrize("num_draft_tokens", [0, 3, 7])
@pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "chained"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_they_equal_those_of_transformers(opened, pair, model, overlaps, num_draft_tokens, temperature):
    requests = make_requests(temperature=temperature, top_k=5)
    outputs = run(opened(*pair), requests, overlaps=overlaps, num_draft_tokens=num_draft_tokens)
    assert worst_of(model, outputs) <= TOLERANCE
    for output in outputs:  # the emitted token's own entry is the same number
        for token_id, logprob, entries in zip(output.token_ids, output.logprobs, output.top_logprobs, strict=False):
            assert dict(entries).get(token_id, logprob) == logprob


@pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "chained"])
def test_chunks_of_prompts_and_logits_in_parts_change_nothing(opened, pair, model, overlaps, monkeypatch):
    monkeypatch.setattr(torch_logprobs, "LOGPROBS_ROWS", 3)
    outputs = run(opened(*pair), make_requests(), overlaps=overlaps, max_prefill_tokens=5)
    assert worst_of(model, outputs) <= TOLERANCE


@pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "chained"])
def test_too_few_pages_preempt_and_change_nothing(opened, pair, model, overlaps):
    executor = opened(*pair, max_seq_len=60, max_batch_size=4)
    executor.limits = replace(executor.limits, num_pages=15)
    outputs = run(executor, make_requests(), overlaps=overlaps, max_prefill_tokens=7)
    assert run.statistics.num_preemptions > 0
    assert worst_of(model, outputs) <= TOLERANCE


def test_a_prompt_whose_log_probabilities_are_wanted_takes_no_cached_prefix(opened, pair, model):
    executor = opened(*pair)
    loop = EngineLoop(executor)
    for request in make_requests():
        stream = loop.submit(request)
        while loop.step():
            pass
        output = stream.result(timeout_s=1)
        hit = output.statistics.num_prefix_hit_tokens
        assert (hit == 0) == (request.sampling.prompt_logprobs is not None)
    index = PROMPTS.index(list(request.prompt_token_ids))
    top, of_prompt = WANTED[index]
    assert difference(model, PROMPTS[index], output, top_logprobs=top, prompt_logprobs=of_prompt) <= TOLERANCE


@pytest.mark.parametrize("shift", ["of the rows", "of the prompt"])
def test_values_of_the_row_beside_are_noticed(pair, model, monkeypatch, shift):
    reader = torch_logprobs.LogprobsReader
    name = "read" if shift == "of the rows" else "read_prompt"
    right = getattr(reader, name)
    monkeypatch.setattr(reader, name, lambda self, logits: right(self, logits.roll(1, dims=0)))
    assert worst_of(model, run(make_executor(*pair), make_requests())) > 100 * TOLERANCE


def test_a_prompt_of_one_token_has_one_entry_without_a_value(opened, pair):
    sampling = SamplingParams(max_new_tokens=2, prompt_logprobs=5)
    (output,) = run(opened(*pair), [Request(request_id="r", prompt_token_ids=(3,), sampling=sampling)])
    assert output.prompt_logprobs == (None,)


def test_steps_that_want_none_show_nobody_their_logits(pair, monkeypatch):
    monkeypatch.setattr(torch_logprobs.LogprobsReader, "__init__", lambda *_: pytest.fail("it was made"))
    sampling = SamplingParams(max_new_tokens=4, logprobs=True)
    (output,) = run(make_executor(*pair), [Request(request_id="r", prompt_token_ids=(3, 4), sampling=sampling)])
    assert output.top_logprobs == () and output.prompt_logprobs is None


def test_ties_go_to_the_smaller_token_id():
    values = torch.tensor([[0.0, -1.0, -0.0, -1.0, -1.0, -2.0], [-3.0, -3.0, -3.0, -3.0, -3.0, -3.0]])
    token_ids, logprobs = torch_logprobs.top_tokens(values, 4)
    assert token_ids.tolist() == [[0, 2, 1, 3], [0, 1, 2, 3]]
    assert logprobs.tolist() == [[0.0, 0.0, -1.0, -1.0], [-3.0] * 4]


def test_a_vocabulary_smaller_than_the_number_gives_all_of_it():
    values = torch.tensor([[-2.0, -torch.inf, -0.5]])
    token_ids, logprobs = torch_logprobs.top_tokens(values, 20)
    assert token_ids.tolist() == [[2, 0, 1]]
    assert logprobs.tolist() == [[-0.5, -2.0, -torch.inf]]
