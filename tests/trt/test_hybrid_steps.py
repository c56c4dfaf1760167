"""Steps of Qwen's hybrids: the interpreted TensorRT network gives the torch backend's tokens, whatever is rejected."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dflash_trt.backends.tensorrt import executor as trt_executor
from dflash_trt.backends.tensorrt.buffers import EngineState
from dflash_trt.backends.tensorrt.canary import check_pages
from dflash_trt.backends.tensorrt.exchange_check import _written
from dflash_trt.backends.tensorrt.support import network_spec, unsupported_problems
from dflash_trt.backends.torch.native.library import NoKernels
from dflash_trt.backends.torch.process_group import ONE_RANK
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.batch import StepSampling
from dflash_trt.core.errors import CapacityError
from dflash_trt.core.request import GenerationOutput, Request, SamplingParams
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.core.step_plan import StepHandle, StepPlan
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import FixedDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from tests.engines import make_executor
from tests.executor.rank_engines import build, opened, write_calibration_prompts
from tests.traces import GREEDY, PROMPTS, SAMPLED, Steps, integers, logprobs, trace
from tests.trt.networks import MAX_SEQ_LEN, InterpretedExecutor, define_engine, define_pair
from tests.trt.ranks import interpreted_ranks
from tests.trt.test_step_tokens import make_pair
from tests.trt.test_trt_executor import make_ours

SMALL = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
DRAFT = {"num_layers": 1, "target_layer_ids": (0, 1)}
FAMILIES = {
    "qwen3_5_text": {"linear_num_value_heads": 4, "linear_conv_kernel_dim": 3},
    "qwen3_next": {"linear_num_value_heads": 2},
    "qwen3_5_moe_text": {"linear_conv_kernel_dim": 2},
}
PAIRS = [pytest.param(name, marks=[pytest.mark.slow] * name.endswith("moe_text")) for name in FAMILIES]
KS = (3, 0, 2)  # in turn; 0 and blocks that are shorter than the records
NUM_PAGES = 64


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root: Path = tmp_path_factory.mktemp("pair")
    return make_pair(root, family=request.param, target=SMALL | FAMILIES[request.param], **DRAFT)


@dataclass(frozen=True)
class Expected:
    """Steps of the torch backend, and the drafts that they had in the place of the drafter's."""

    greedy: Steps
    sampled: Steps
    proposals: list[list[int]]

    def steps_of(self, executor: Any, samplings: Sequence[StepSampling] = GREEDY, *, num_new: int = 12) -> Steps:
        proposals = self.proposals if samplings is GREEDY else None
        options: dict[str, Any] = {"num_draft_tokens": KS, "chunk": 6, "num_new": num_new, "proposals": proposals}
        return trace(executor, samplings, **options)[0]


@pytest.fixture(scope="module")
def expected(pair: tuple[Path, Path]) -> Expected:
    """Every third draft is wrong, so that blocks are cut at each of their tokens."""
    executor = make_executor(*pair, max_seq_len=MAX_SEQ_LEN)
    _, texts = trace(executor, GREEDY, num_draft_tokens=(0,), num_new=16)
    proposals = [[(token + (i % 3 == 2)) % 12 for i, token in enumerate(text.tokens)] for text in texts]
    empty = Expected([], [], proposals)
    found = Expected(empty.steps_of(executor), empty.steps_of(executor, SAMPLED), proposals)
    assert {row.num_accepted for step in found.greedy for row in step} == {0, 1, 2}
    return found


def test_every_step_of_a_mixed_trace_equals_torchs(
    trt: ModuleType, pair: tuple[Path, Path], expected: Expected
) -> None:
    """Chunks of 6 tokens are more than the 4 records of a slot; the slots serve one trace after the other."""
    ours = InterpretedExecutor(define_pair(trt, *pair), num_pages=NUM_PAGES)
    for tensor in ours._state.contents.values():
        tensor.fill_(3 if tensor.dtype == torch.int32 else torch.nan)
    for samplings, steps in ((GREEDY, expected.greedy), (SAMPLED, expected.sampled)):
        found = expected.steps_of(ours, samplings)
        assert integers(found) == integers(steps)
        torch.testing.assert_close(logprobs(found), logprobs(steps), rtol=0, atol=1e-4)


def test_a_net_is_one_node_with_a_state_of_its_own(
    trt: ModuleType, pair: tuple[Path, Path], expected: Expected
) -> None:
    """Another field is noticed."""
    defined = define_pair(trt, *pair)
    [node] = [node for node in defined.nodes if node.name == "GatedDelta"]
    assert [other.fields["state"] for other in defined.nodes if other.name.startswith("Attend")] == [6, 7]
    assert node.fields["state"] == 0 and tuple(defined.network.get_input(0).shape) == (-1,)
    node.fields["num_key_heads"] = 1
    other = expected.steps_of(InterpretedExecutor(defined, num_pages=NUM_PAGES), num_new=1)
    assert (logprobs(other[:1]) - logprobs(expected.greedy[:1])).abs().max() > 1e-3


@pytest.mark.parametrize("pair", ["qwen3_5_text"], indirect=True)
def test_the_executor_gives_torchs_tokens_in_padded_steps_and_its_slots_pass_the_canary(
    trt: ModuleType, pair: tuple[Path, Path], expected: Expected
) -> None:
    """Steps of 3 requests are padded to 4."""
    ours, engine = make_ours(trt, pair)
    assert check_pages(ours) == "5 tokens in each of 8 pools, at 2 places"
    compared = [name for name in _written(ours, (1, 2, 1)) if name.startswith("target")]
    assert compared == ["target_state.0.window", "target_kv.1"]
    assert integers(expected.steps_of(ours)) == integers(expected.greedy)
    runs = [dict(shapes)["slot_ids"] for context in engine.contexts for shapes in context.ran]
    assert (4,) in runs


@pytest.mark.parametrize("pair", ["qwen3_5_text"], indirect=True)
def test_two_ranks_that_divide_key_heads_give_the_tokens_of_one(
    trt: ModuleType, pair: tuple[Path, Path], expected: Expected
) -> None:
    ours = interpreted_ranks(trt, *pair, num_ranks=2, num_pages=NUM_PAGES)
    assert integers(expected.steps_of(ours)) == integers(expected.greedy)
    shapes = [tuple(rank._state.slots["target_state.0.state"].shape[1:]) for rank in ours.ranks]
    assert shapes == [(2, 8, 12)] * 2  # of 4 value heads


@pytest.mark.parametrize(("weights", "family"), [("fp8", "qwen3_5_text"), ("nvfp4_w4a16", "qwen3_next")])
def test_the_steps_of_a_quantized_engine_equal_torchs(
    trt: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str, family: str
) -> None:
    """Drafts, too: the CPU kernels, which round what the drafter reads where that is fast, may give others."""
    monkeypatch.setattr("dflash_trt.backends.torch.executor.cpu_kernels", lambda: NoKernels("not wanted"))
    blocks = {"shared_expert_intermediate_size": 48} if family == "qwen3_next" else {}
    make_pair(tmp_path, family=family, target=SMALL | blocks, **DRAFT, intermediate_size=96)
    write_calibration_prompts(tmp_path)
    quantization = {"target": weights, "calibration": {"prompts": "prompts.jsonl"}}
    engine = build(tmp_path, tp_size=1, quantization=quantization)
    ours = InterpretedExecutor(define_engine(trt, engine), num_pages=NUM_PAGES)
    options: dict[str, Any] = {"num_draft_tokens": (3,), "chunk": 6, "num_new": 6}
    with opened(engine) as executor:
        expected, _ = trace(executor, GREEDY[:2], **options)
    found, _ = trace(ours, GREEDY[:2], **options)
    assert integers(found) == integers(expected)
    torch.testing.assert_close(logprobs(found), logprobs(expected), rtol=0, atol=1e-3)


def test_slots_and_snapshots_are_in_the_memory_of_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_pair(tmp_path, family="qwen3_5_text", target=SMALL, **DRAFT)
    engine = build(tmp_path, tp_size=1)
    spec = network_spec(engine.manifest.pretrained_config, engine.manifest.build_config)
    limits = trt_executor._limits_without_pages(engine, spec, RuntimeConfig())
    slot_bytes = spec.states.bytes_per_slot
    state = EngineState(spec, num_pages=1, num_slots=limits.max_batch_size + 1, device=torch.device("cpu"))
    assert sum(tensor.nbytes for tensor in state.slots.values()) == 9 * slot_bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 * slot_bytes, 0))
    pages = trt_executor._page_plan(engine, spec, RuntimeConfig(num_state_snapshots=2), ONE_RANK)
    assert (pages.slot_bytes, pages.num_snapshots) == (9 * slot_bytes, 2)
    page_bytes = 4 * pages.bytes_per_token
    assert pages.total_bytes == 7 * slot_bytes // page_bytes * page_bytes  # what both leave of 0.9 * 20
    assert trt_executor.limits_with_pages(limits, pages, is_recurrent=True).num_snapshots == 2
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (9 * slot_bytes, 0))
    with pytest.raises(CapacityError, match=f"in addition to {9 * slot_bytes} bytes of recurrent state"):
        trt_executor._page_plan(engine, spec, RuntimeConfig(), ONE_RANK)


class SpoiledSlot:
    """An executor whose slot 1 gets a state that is not finite before some step of its request; None: it does not."""

    has_queue, can_retry = False, False

    def __init__(self, executor: InterpretedExecutor, value: float | None) -> None:
        self.executor, self.limits, self.value, self.num_steps = executor, executor.limits, value, 0

    def submit(self, plan: StepPlan) -> StepHandle:
        self.num_steps += 1
        if self.num_steps == 4 and self.value is not None:
            assert set(plan.rows.slot_ids.tolist()) > {1}, "it has mates"
            self.executor._state.slots["target_state.0.state"][1] = self.value
        return self.executor.submit(plan)


def outputs_of(executor: SpoiledSlot) -> list[GenerationOutput]:
    """Of seven prompts on three slots, one chunk of a prompt in a step beside verify blocks."""
    scheduler = Scheduler(executor.limits, SchedulerConfig(enable_prefix_caching=False), FixedDraftLength(3))
    loop = EngineLoop(executor, scheduler)
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=True)
    streams = [
        loop.submit(Request(request_id=str(i), prompt_token_ids=tuple(prompt), sampling=sampling))
        for i, prompt in enumerate([*PROMPTS, *PROMPTS[:3]])
    ]
    while loop.step():
        loop.check_integrity()
    return [stream.result(timeout_s=1) for stream in streams]


@pytest.mark.parametrize("pair", ["qwen3_5_text"], indirect=True)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_state_that_is_not_finite_reaches_no_other_request(
    trt: ModuleType, pair: tuple[Path, Path], value: float
) -> None:
    """Neither beside it, over one triangle of rows, nor behind it in its slot."""
    ours = InterpretedExecutor(define_pair(trt, *pair), num_pages=NUM_PAGES, max_batch_size=3)
    clean, found = (outputs_of(SpoiledSlot(ours, given)) for given in (None, value))
    assert [output.finish_reason for output in found] == ["length", "error", *["length"] * 5]
    for output, healthy in zip(found[:1] + found[2:], clean[:1] + clean[2:], strict=True):
        assert output.token_ids == healthy.token_ids
        torch.testing.assert_close(torch.tensor(output.logprobs), torch.tensor(healthy.logprobs), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"linear_key_head_dim": 256}, "head_dim of gated delta nets: expected at most 128 in a TensorRT engine"),
    ],
)
def test_hybrids_are_refused_for_nothing_but_their_sizes(
    tmp_path: Path, changes: dict[str, int], problem: str | None
) -> None:
    target, _ = make_pair(tmp_path, family="qwen3_5_text", target=SMALL | changes, has_drafter=False)
    problems = unsupported_problems(open_pair(target, None).target, None, None)
    assert len(problems) == (problem is not None)
    assert problem is None or problems[0].startswith(problem)
