import weakref

import psutil
import pytest
import torch

from dflash_trt.backends.step_inputs import step_inputs
from dflash_trt.backends.torch.loading import allocate_state, states_of
from dflash_trt.core.batch import ScheduledRequest, StepBatch, StepSampling, run_batch
from tests.engines import decode, make_executor
from tests.factories import make_target, make_zlab_drafter


def part(token_ids, context_len, num_candidates, page_ids=(3, 1)):
    return ScheduledRequest(
        request_id="request",
        token_ids=token_ids,
        context_len=context_len,
        num_candidates=num_candidates,
        page_ids=page_ids,
        sampling=StepSampling(temperature=0.5, seed=2**62),
    )


def test_inputs_pack_prompt_chunks_and_verify_blocks_as_the_step_contract_says():
    batch = StepBatch(requests=(part((7, 8, 9), 4, 0), part((5, 1, 2), 10, 2, (6,))), num_draft_tokens=3)
    inputs = step_inputs(batch)
    assert inputs.token_ids.tolist() == [7, 8, 9, 5, 1, 2]
    assert inputs.positions.tolist() == [4, 5, 6, 10, 11, 12]
    assert inputs.token_offsets.tolist() == [0, 3, 6]
    assert inputs.context_lens.tolist() == [4, 10]
    assert inputs.logit_rows.tolist() == [[2, 2, 2, 2], [3, 4, 5, 5]]
    assert inputs.page_table.tolist() == [[3, 1], [6, 0]]
    assert inputs.seed.tolist() == [2**62] * 2


@pytest.fixture
def pair(tmp_path):
    target = make_target(tmp_path / "target", vocab_size=12, tokenizer=False)
    return target, make_zlab_drafter(tmp_path / "drafter", target_dir=target, block_size=4)


def test_pages_may_lie_anywhere_and_others_are_not_touched(pair):
    executor = make_executor(*pair)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    expected = decode(executor, prompt, 20, num_draft_tokens=3)
    pools = [cache.tensor for cache in (*executor._state.target_kv, *executor._state.draft_kv)]
    for pool in pools:
        pool.fill_(123.0)
    scattered = (40, 3, 17, 8, 60, 21, 5, 33)
    assert decode(executor, prompt, 20, num_draft_tokens=3, pages=scattered).tokens == expected.tokens
    others = [page for page in range(executor.limits.num_pages) if page not in scattered]
    for pool in pools:
        assert bool((pool[others] == 123.0).all())


def test_bfloat16_decodes_with_drafts_as_without(pair):
    executor = make_executor(*pair, dtype=torch.bfloat16)
    runs = [decode(executor, [1, 2, 3, 4, 5], 16, num_draft_tokens=k) for k in (0, 3)]
    logprobs = [torch.tensor(run.logprobs[:8]) for run in runs]
    assert runs[0].tokens[:8] == runs[1].tokens[:8]
    torch.testing.assert_close(logprobs[0], logprobs[1], rtol=0, atol=0.1)  # measured 0.03


def test_a_batch_beyond_the_limits_is_a_bug_and_says_so(pair):
    executor = make_executor(*pair)
    with pytest.raises(AssertionError):
        run_batch(executor, StepBatch(requests=(part((1,) * 9, 0, 0),), num_draft_tokens=3))  # two pages hold 8 tokens


def test_pages_cost_memory_only_once_they_are_written(pair):
    process = psutil.Process()
    executor = make_executor(*pair)
    states = states_of(executor.network, None)
    num_pages = (1 << 28) // (states.bytes_per_token * executor.limits.page_size)  # 256 MiB
    before = process.memory_info().rss
    state = allocate_state(states, num_pages=num_pages, page_size=executor.limits.page_size)
    assert process.memory_info().rss - before < 1 << 25
    assert all(not bool(cache.tensor[:: num_pages // 8].any()) for cache in (*state.target_kv, *state.draft_kv))


def test_a_closed_executor_gives_its_pages_back_though_it_is_still_held(pair):
    executor = make_executor(*pair)
    decode(executor, [1, 2, 3], 4, num_draft_tokens=3)
    pages = weakref.ref(executor._state.target_kv[0].tensor)
    executor.close()
    assert pages() is None
