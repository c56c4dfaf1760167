"""Ranks with requests of their own on the GPU's ops, under Triton's interpreter and over gloo."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.core.request import Request, SamplingParams
from dflash_trt.core.step_plan import StepPlan
from dflash_trt.scheduler.data_parallel import DataParallelScheduler
from dflash_trt.scheduler.draft_length import FixedDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from tests.executor.rank_engines import build, opened
from tests.factories import make_target, make_zlab_drafter
from tests.kernels.rank_of_pipe import TwoRanks

# On one rank a prompt of several steps, on the other blocks that end early; then one rank has nothing to do.
PROMPTS = ([5, 9, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11] * 2, [7, 3])
LENGTHS = (3, 1, 6)


def run(loop: EngineLoop) -> list[tuple[Any, ...]]:
    requests = [
        Request(request_id=str(i), prompt_token_ids=tuple(prompt), sampling=SamplingParams(max_new_tokens=length))
        for i, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
    ]
    streams = [loop.submit(request) for request in requests]
    while loop.step():
        loop.check_integrity()
    outputs = [stream.result(timeout_s=1) for stream in streams]
    return [
        (output.token_ids, [(step.num_candidates, step.num_accepted) for step in output.steps]) for output in outputs
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, and gloo's tensors do not")
@pytest.mark.parametrize(
    ("family", "fields"),
    [("deepseek_v3", {"n_group": 1, "topk_group": 1}), pytest.param("gpt_oss", {}, marks=pytest.mark.slow)],
)
def test_every_request_has_the_tokens_of_one_rank(tmp_path: Path, family: Any, fields: dict[str, Any]) -> None:
    options = {"num_hidden_layers": 2, "vocab_size": 12, "tokenizer": False} | fields
    target = make_target(tmp_path / "target", family=family, **options)
    make_zlab_drafter(tmp_path / "drafter", target_dir=target, num_layers=1, target_layer_ids=(0,))
    sizes = {"max_batch_size": 2, "max_num_tokens": 16}
    with opened(build(tmp_path, tp_size=1, **sizes)) as one:
        expected = run(EngineLoop(one, Scheduler(one.limits, policy=FixedDraftLength(2))))
    engine = build(tmp_path, tp_size=2, ep_size=2, attention_dp=True, **sizes)
    two = TwoRanks(engine.path, tmp_path / "store")
    try:
        scheduler = DataParallelScheduler(two.limits, policy=FixedDraftLength(2), num_ranks=2)
        plans = list[StepPlan]()
        submit = two.submit
        two.submit = lambda plan: plans.append(plan) or submit(plan)  # type: ignore[method-assign, func-returns-value]
        found = run(EngineLoop(two, scheduler))
    finally:
        two.close()
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    kinds = {(plan.joint.is_decode, 0 in plan.joint.num_tokens) for plan in plans if plan.joint is not None}
    assert kinds >= {(False, False), (True, True)}, "prompts beside blocks, and a rank without rows"
