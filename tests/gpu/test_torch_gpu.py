"""The torch backend on a GPU: its tokens are the CPU's in float32, its steps are graphs, and no step waits inside."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton

from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.backends.graphs import GraphCache, waits_raise
from dflash_trt.backends.padding import warm_shapes
from dflash_trt.backends.page_budget import plan_pages
from dflash_trt.backends.torch.loading import bind_tensors
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.batch import StepBatch, StepSampling, chained, plan_of, request_results, run_batch
from dflash_trt.core.logprobs import TopRows
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.draft import engine_states
from dflash_trt.core.step_plan import TokenMasks
from tests.factories import make_target, make_zlab_drafter
from tests.kernels import test_prefixes_on_kernels as prefixes
from tests.kernels import test_step_on_kernels as steps
from tests.kernels.test_step_on_delta_nets import make_pair
from tests.kernels.test_step_on_kernels import LOGPROB_TOLERANCE, PAGE_SIZE, assert_same, next_batch, prefill

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: graphs, streams and bfloat16"),
]

DEVICE = torch.device("cuda")
NUM_DRAFT_TOKENS = steps.NUM_DRAFT_TOKENS


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    target = make_target(root / "target")
    windows = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}
    return target, make_zlab_drafter(root / "drafter", target_dir=target, block_size=NUM_DRAFT_TOKENS + 1, **windows)


@pytest.fixture
def executors(pair):
    reference, executor = steps.make_executors(pair, DEVICE)
    executor.warm_up(warm_shapes(executor.limits, (NUM_DRAFT_TOKENS,)))
    return reference, executor


def two_prompts(sampling):
    return (
        prefill("a", 7, sampling, first_page=0, num_pages=16),
        prefill("b", 5, sampling, first_page=16, num_pages=16),
    )


def generate(executor, sampling, num_steps, *, num_draft_tokens=NUM_DRAFT_TOKENS, num_requests=2):
    """The results of a prefill and so many verify steps of two requests, or of the first."""
    requests = two_prompts(sampling)[:num_requests]
    batch = StepBatch(requests=requests, num_draft_tokens=num_draft_tokens)
    results = [run_batch(executor, batch)]
    for _ in range(num_steps):
        batch = next_batch(batch, results[-1], num_candidates=lambda r: num_draft_tokens)
        results.append(run_batch(executor, batch))
    return results


@pytest.mark.parametrize("sampling", [StepSampling(), steps.SAMPLED], ids=["greedy", "sampled"])
def test_tokens_are_those_of_the_cpu_in_float32(executors, sampling):
    reference, executor = executors
    for found, expected in zip(generate(executor, sampling, 6), generate(reference, sampling, 6), strict=True):
        assert_same(found, expected)


def test_no_kernel_is_compiled_and_no_graph_captured_after_the_warm_up(executors):
    _, executor = executors
    num_graphs, compiled = executor.graphs.num_graphs, []
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_post_compile_hook = lambda **given: compiled.append(given["repr"])
        for sampling in (StepSampling(), steps.SAMPLED):
            generate(executor, sampling, 6)
        generate(executor, steps.SAMPLED, 3, num_draft_tokens=0)
        long = prefill("long", 48, StepSampling(), first_page=0, num_pages=16)
        run_batch(executor, StepBatch(requests=(long,), num_draft_tokens=NUM_DRAFT_TOKENS))
    assert compiled == [] and executor.graphs.num_graphs == num_graphs > 0


def test_a_changed_weight_is_noticed(executors):
    """The negative control of the test above."""
    reference, executor = executors
    executor.network.target_weights.layers[1].mlp_norm.mul_(1.01)
    torch.cuda.synchronize()  # steps have a stream of their own
    found, expected = (generate(x, StepSampling(), 0)[0][0].logprobs for x in (executor, reference))
    assert found != pytest.approx(expected, abs=LOGPROB_TOLERANCE)


def test_a_replayed_step_is_the_step_itself(executors):
    _, executor = executors
    replayed = generate(executor, steps.SAMPLED, 6)
    executor.graphs = GraphCache(None)
    plain = generate(executor, steps.SAMPLED, 6)
    for found, expected in zip(replayed, plain, strict=True):
        assert_same(found, expected)


def test_logits_are_read_and_masked_between_replayed_graphs(executors):
    """In the memory where the first graph leaves them; the drafts of the last graph follow the tokens."""
    results, vocab_size = [], executors[1].network.target.vocab_size
    allowed = np.packbits(np.arange(-(-vocab_size // 32) * 32) % 3 == 0, bitorder="little").view(np.int32)
    masks = TokenMasks(rows=np.array([NUM_DRAFT_TOKENS + 1]), bits=allowed[None])  # of the second request
    for executor in executors:
        plan = plan_of(StepBatch(requests=two_prompts(StepSampling()), num_draft_tokens=NUM_DRAFT_TOKENS))
        free = executor.submit(plan).result()
        results.append(executor.submit(replace(plan, top_rows=TopRows.of(np.array([3, 3])), masks=masks)).result())
        assert free.emitted_tokens[0, 0] == results[-1].emitted_tokens[0, 0]
    expected, found = results
    assert expected.emitted_tokens[1, 0] % 3 == 0
    np.testing.assert_array_equal(found.emitted_tokens[:, 0], expected.emitted_tokens[:, 0])
    np.testing.assert_array_equal(found.draft_tokens, expected.draft_tokens)
    np.testing.assert_array_equal(found.top.token_ids[:, 0], expected.top.token_ids[:, 0])
    np.testing.assert_allclose(found.top.logprobs[:, 0], expected.top.logprobs[:, 0], atol=LOGPROB_TOLERANCE)


def test_enqueueing_a_step_never_waits_for_the_device(executors):
    """PyTorch raises on operations of its own that would wait; gpu_visit counts the waits of a whole step."""
    reference, executor = executors
    batch = StepBatch(requests=(prefill("a", 7, StepSampling(), first_page=0),), num_draft_tokens=NUM_DRAFT_TOKENS)
    result = run_batch(executor, batch)
    verify = next_batch(batch, result, num_candidates=lambda r: NUM_DRAFT_TOKENS)
    run_batch(executor, verify)
    executor.graphs = GraphCache(None)
    executor.wait()
    with waits_raise():
        executor.enqueue(batch)
        executor.enqueue(verify)
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device=DEVICE).item()  # the mode is on
    executor.wait()
    assert_same(run_batch(executor, batch), run_batch(reference, batch))


def test_chained_steps_are_submitted_before_results_are_read(executors):
    reference, executor = executors
    expected = generate(reference, StepSampling(), 4)
    batch = StepBatch(requests=two_prompts(StepSampling()), num_draft_tokens=NUM_DRAFT_TOKENS)
    prefilled = executor.submit(plan_of(batch))
    verify = plan_of(next_batch(batch, expected[0], num_candidates=lambda r: NUM_DRAFT_TOKENS))
    handles = [prefilled]
    for found in range(4):
        handles.append(executor.submit(chained(verify)))
        assert_same(request_results(handles[found].result()), expected[found])
    assert_same(request_results(handles[4].result()), expected[4])


def test_speculation_does_not_change_greedy_text(executors):
    _, executor = executors
    texts = []
    for num_draft_tokens, num_steps in ((0, 12), (NUM_DRAFT_TOKENS, 12)):
        results = generate(executor, StepSampling(), num_steps, num_draft_tokens=num_draft_tokens)
        texts.append([token for result in results for token in result[0].emitted_tokens][:12])
    assert texts[0] == texts[1]


def test_prefixes_of_a_hybrid_are_restored_between_graphs(tmp_path):
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    sizes = {"vocab_size": prefixes.VOCAB_SIZE, "tokenizer": False}
    hybrid = make_pair(tmp_path, family="qwen3_5_text", **layers, **sizes)
    reference, executor = steps.make_executors(hybrid, DEVICE, num_snapshots=2)
    expected = prefixes.tokens_of(prefixes.make_loop(reference, 0, reuses=False), prefixes.PROMPTS, together=False)
    executor.warm_up(warm_shapes(executor.limits, (NUM_DRAFT_TOKENS,)))
    loop = prefixes.make_loop(executor, NUM_DRAFT_TOKENS, overlaps=True)
    for together in (False, True):
        assert prefixes.tokens_of(loop, prefixes.PROMPTS, together=together) == expected
    assert executor.graphs.num_graphs > 0 and prefixes.num_hit_tokens(loop) > 0
    loop.close()


def bfloat16_executor(pair, *, is_deterministic=False):
    opened = open_pair(*pair)
    tensors = dict(opened.iter_weights(dtype=torch.bfloat16, mapping=Mapping()))
    plan = plan_pages(
        engine_states(opened.target, opened.draft, dtype="bfloat16"),
        page_size=PAGE_SIZE,
        max_batch_size=4,
        max_seq_len=64,
        budget_bytes=1 << 24,
    )
    return TorchGpuExecutor(
        bind_tensors(opened.target, opened.draft, {name: x.to(DEVICE) for name, x in tensors.items()}),
        page_plan=plan,
        max_batch_size=4,
        max_num_tokens=48,
        max_draft_len=NUM_DRAFT_TOKENS,
        device=DEVICE,
        is_deterministic=is_deterministic,
    )


def test_a_bfloat16_engine_steps_and_stays_finite(pair):
    executor = bfloat16_executor(pair)
    exact = steps.make_executors(pair, DEVICE)[0]
    found, expected = (generate(x, StepSampling(), 0)[0] for x in (executor, exact))
    for row, other in zip(found, expected, strict=True):
        # Log probabilities of the same or of a nearly as likely token; bfloat16 keeps 3 digits. An H200 keeps this.
        assert row.logprobs[0] == pytest.approx(other.logprobs[0], abs=0.2)
    assert all(
        logprob <= 0 for result in generate(executor, steps.SAMPLED, 6) for row in result for logprob in row.logprobs
    )


@pytest.mark.parametrize("sampling", [StepSampling(), steps.SAMPLED], ids=["greedy", "sampled"])
def test_deterministic_bits_depend_neither_on_drafts_nor_on_batch_mates(pair, sampling):
    """Verify blocks in graphs beside one another, against single tokens of a request alone."""
    executor = bfloat16_executor(pair, is_deterministic=True)
    executor.warm_up(warm_shapes(executor.limits, (NUM_DRAFT_TOKENS,)))
    beside = emitted(generate(executor, sampling, 12))
    alone = emitted(generate(executor, sampling, 12, num_draft_tokens=0, num_requests=1))
    assert beside[: len(alone)] == alone


def emitted(results):
    """Tokens and log probabilities of the first request."""
    pairs = (zip(rows[0].emitted_tokens, rows[0].logprobs, strict=True) for rows in results)
    return [pair for step in pairs for pair in step]
