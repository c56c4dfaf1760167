"""Law 4 through scheduler and loops over the real network: a prefix hit, preemption and the overlapped loop change
nothing about a request, its drafts included.
"""

import pytest

from dflash_trt.core.request import Request, SamplingParams
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import BatchSizeDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from tests.engines import make_executor
from tests.factories import make_target, make_zlab_drafter

SHARED = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
PROMPTS = [SHARED + tail for tail in ([8, 4], [6, 2, 6], [4], [3, 3, 8, 3, 2, 7, 9])]
NUM_NEW = 20


@pytest.fixture(scope="module", params=[("qwen3", 0), ("gpt_oss", 1)], ids=["dense", "experts, sinks and windows"])
def pair(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    family, seed = request.param
    target = make_target(root / "target", family=family, seed=seed, vocab_size=12, tokenizer=False)
    return target, make_zlab_drafter(root / "drafter", target_dir=target, block_size=6)


def request(name, prompt, temperature):
    sampling = SamplingParams(max_new_tokens=NUM_NEW, temperature=temperature, top_k=8)
    return Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling, seed=len(prompt))


def steps_of(loop, requests):
    """Run these together; per request its tokens and, verify step by verify step, what was accepted."""
    streams = [loop.submit(each) for each in requests]
    while loop.step():
        loop.check_integrity()
    outputs = [stream.result(timeout_s=1) for stream in streams]
    return [
        (
            output.token_ids,
            [
                (event.context_len, event.num_candidates, event.num_accepted)
                for event in output.steps
                if event.num_candidates
            ],
        )
        for output in outputs
    ]


def make_loop(executor, *, overlaps=False, policy=None, **config):
    return EngineLoop(executor, Scheduler(executor.limits, SchedulerConfig(**config), policy), overlaps=overlaps)


@pytest.fixture(scope="module", params=[0.0, 0.9], ids=["greedy", "sampled"])
def temperature(request):
    return request.param


@pytest.fixture(scope="module")
def alone(pair, temperature):
    """Each request by itself, on an engine that reuses nothing."""
    loop = make_loop(make_executor(*pair), enable_prefix_caching=False)
    found = [steps_of(loop, [request(str(i), prompt, temperature)])[0] for i, prompt in enumerate(PROMPTS)]
    assert sum(accepted for _, steps in found for _, _, accepted in steps) > 0
    return found


def test_a_prefix_hit_changes_neither_tokens_nor_acceptance(pair, temperature, alone):
    loop = make_loop(make_executor(*pair))
    for i, prompt in enumerate(PROMPTS):
        assert steps_of(loop, [request(str(i), prompt, temperature)])[0] == alone[i]
    statistics = loop.statistics().scheduler
    assert statistics.num_prefix_hit_tokens >= 3 * (len(SHARED) // 4) * 4  # pages of four tokens


def test_a_hit_whose_draft_context_was_lost_is_noticed(pair, temperature, alone):
    executor = make_executor(*pair)
    loop = make_loop(executor)
    steps_of(loop, [request("first", PROMPTS[0], temperature)])
    for cache in executor._state.draft_kv:
        cache.tensor.normal_()
    again = [steps_of(loop, [request(str(i), prompt, temperature)])[0] for i, prompt in enumerate(PROMPTS)]
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in alone]  # the text stays the target's
    assert again != alone  # but not the acceptance


@pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "overlapped"])
def test_requests_together_give_what_each_gives_alone(pair, temperature, alone, overlaps):
    loop = make_loop(make_executor(*pair), overlaps=overlaps)
    together = steps_of(loop, [request(str(i), prompt, temperature) for i, prompt in enumerate(PROMPTS)])
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
    loop.close()


def test_too_few_pages_preempt_and_change_no_token(pair, temperature, alone):
    executor = make_executor(*pair, max_seq_len=60, max_batch_size=1)  # 15 pages for all
    executor.limits = type(executor.limits)(
        **{name: getattr(executor.limits, name) for name in executor.limits.__dataclass_fields__}
        | {"max_batch_size": 4}
    )
    loop = make_loop(executor, enable_prefix_caching=False)
    together = steps_of(loop, [request(str(i), prompt, temperature) for i, prompt in enumerate(PROMPTS)])
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
    assert loop.statistics().scheduler.num_preemptions > 0


def test_a_draft_length_that_changes_with_the_batch_changes_no_token(pair, temperature, alone):
    loop = make_loop(make_executor(*pair), policy=BatchSizeDraftLength({1: 5, 2: 0, 3: 2}))
    together = steps_of(loop, [request(str(i), prompt, temperature) for i, prompt in enumerate(PROMPTS)])
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
