"""Steps over the GPU kernels with rejection sampling, against the step over plain PyTorch."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_trt.backends.graphs import GraphCache
from dflash_trt.backends.padding import decode_shapes
from dflash_trt.core.batch import RequestResult, StepBatch, StepSampling, chained, plan_of, request_results, run_batch
from dflash_trt.core.request import Request, SamplingParams
from dflash_trt.core.step_plan import TokenMasks
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from tests.factories import make_target, make_zlab_drafter
from tests.kernels.test_step_on_dflash2 import assert_rejection_sampling_is_the_same
from tests.kernels.test_step_on_kernels import (
    NUM_DRAFT_TOKENS,
    Executor,
    assert_same,
    make_executors,
    next_batch,
    prefill,
)

WIDTH = NUM_DRAFT_TOKENS + 1
VOCAB_SIZE = 48  # of which a draft has 32 candidates: some are accepted, at a temperature that makes all models alike
DRAWN = StepSampling(temperature=4.0, seed=2**33 + 5, draft_stream=1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root, heads = tmp_path_factory.mktemp("pair"), {"num_attention_heads": 2, "num_key_value_heads": 1}
    target = make_target(root / "target", vocab_size=VOCAB_SIZE, tokenizer=False, num_hidden_layers=2, **heads)
    options = {"block_size": WIDTH, "num_layers": 1, "target_layer_ids": (0,)}
    return target, make_zlab_drafter(root / "drafter", target_dir=target, **options, **heads)


def test_a_graph_of_the_kernels_draws_and_tests_drafts_as_plain_pytorch(
    pair: tuple[Path, Path], device: torch.device
) -> None:
    reference, executor = make_executors(pair, device)
    if device.type == "cpu":
        executor.graphs = GraphCache(lambda enqueue: enqueue)
    [shape] = [s for s in decode_shapes(executor.limits, num_draft_tokens=NUM_DRAFT_TOKENS) if s.num_requests == 4]
    executor.warm_up([shape])
    assert_rejection_sampling_is_the_same(reference, executor, num_steps=4)
    assert executor.graphs.num_graphs == 1


def drafted(executor: Executor) -> tuple[StepBatch, tuple[RequestResult, ...]]:
    """Two requests that verify the drafts of their prompts' step next."""
    prompts = [prefill(str(i), 3 + i, replace(DRAWN, seed=DRAWN.seed + i), first_page=10 * i) for i in range(2)]
    requests = tuple(replace(x, token_ids=tuple(token % VOCAB_SIZE for token in x.token_ids)) for x in prompts)
    batch = StepBatch(requests=requests, num_draft_tokens=NUM_DRAFT_TOKENS)
    result = run_batch(executor, batch)
    return next_batch(batch, result, num_candidates=lambda r: NUM_DRAFT_TOKENS), result


def verified(executor: Executor, batch: StepBatch, masks: TokenMasks | None = None) -> tuple[RequestResult, ...]:
    plan = replace(chained(plan_of(batch)), masks=masks)
    return request_results(executor.submit(plan).result())


def test_masked_rows_test_drafts_as_plain_pytorch(pair: tuple[Path, Path], device: torch.device) -> None:
    reference, executor = make_executors(pair, device)
    batch, result = drafted(reference)
    drafts = [row.draft_tokens[0] for row in result]
    allowed = np.zeros((2 * WIDTH, -(-VOCAB_SIZE // 32) * 32), np.uint8)
    allowed[:, 5:VOCAB_SIZE:2] = 1
    allowed[0, drafts[0]], allowed[WIDTH, drafts[1]] = 0, 1
    packed = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    masks = TokenMasks(rows=np.arange(2 * WIDTH), bits=packed)
    expected = verified(reference, batch, masks)
    assert_same(drafted(executor)[1], result)
    assert_same(verified(executor, batch, masks), expected)
    assert expected[0].num_accepted == 0, "the mask forbids the draft"
    assert all(allowed[r * WIDTH, row.emitted_tokens[0]] for r, row in enumerate(expected))


def test_tokens_depend_on_what_the_slots_keep(pair: tuple[Path, Path], device: torch.device) -> None:
    """The negative controls: without probabilities, or with other candidates, tokens are others."""
    _, executor = make_executors(pair, device)
    batch, _ = drafted(executor)
    tokens = [row.emitted_tokens for row in verified(executor, batch)]
    slots = executor._staging.slots
    assert len(tokens[0]) == 1, "the first draft is rejected"
    for name, value in (
        ("draft_topk_probs", 0.0),
        ("draft_topk_ids", tokens[0][0]),
    ):  # which the residual has no room for then
        other, _ = drafted(executor)
        assert other == batch
        getattr(slots, name).fill_(value)
        assert [row.emitted_tokens for row in verified(executor, batch)] != tokens, name


def texts(executor: Executor) -> list[tuple[int, ...]]:
    """One request with logit rules and one without, neither with a seed of its user's."""
    loop, streams = EngineLoop(executor, Scheduler(executor.limits)), []
    for i, rules in enumerate(({"repetition_penalty": 3.0, "logit_bias": {30: 9.0}}, {})):
        sampling = SamplingParams(max_new_tokens=5, temperature=DRAWN.temperature, **rules)
        request = Request(
            request_id=str(i),
            prompt_token_ids=(5, 6, 5 + i),
            sampling=sampling,
            seed=7 + i,
            is_reproducible=False,
            stop_token_ids=frozenset(),
        )
        streams.append(loop.submit(request))
    while loop.step():
        pass
    return [stream.result(timeout_s=1).token_ids for stream in streams]


def test_requests_with_rules_test_drafts_as_plain_pytorch(pair: tuple[Path, Path], device: torch.device) -> None:
    reference, executor = make_executors(pair, device)
    expected = texts(reference)
    assert texts(executor) == expected
    assert executor._staging.slots.draft_topk_probs.any()


@pytest.mark.parametrize("num_draft_tokens", [0, 1])
def test_a_step_may_test_fewer_drafts_than_were_drawn(
    pair: tuple[Path, Path], device: torch.device, num_draft_tokens: int
) -> None:
    reference, executor = make_executors(pair, device)
    batch, result = drafted(reference)
    assert_same(drafted(executor)[1], result)
    drawn = StepBatch(requests=batch.requests, num_draft_tokens=num_draft_tokens)
    batch = next_batch(drawn, result, num_candidates=lambda r: num_draft_tokens)
    assert_same(verified(executor, batch), verified(reference, batch))
