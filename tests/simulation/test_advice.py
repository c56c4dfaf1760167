"""Advice for a node: its arithmetic against the simulated load, and its choices against all there are."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trt.checkpoint.pair import read_pair
from dflash_trt.checkpoint.specs import PairSpecs
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.quantization import QuantizationConfig
from dflash_trt.core.request import Request
from dflash_trt.plan.gpus import gpu_of
from dflash_trt.plan.kernel_fits import FittedKernels
from dflash_trt.plan.step_costs import StepClock, assumed_costs
from dflash_trt.plan.step_work import EngineWork
from dflash_trt.servers.dynamo.settings import WorkerSettings
from dflash_trt.simulation.acceptance import AcceptanceByPosition
from dflash_trt.simulation.advice import Choice, Goal, Layout, Speed, choices, layouts, other_acceptance
from dflash_trt.simulation.load import Lengths, LoadResult, RequestLoad
from dflash_trt.simulation.sweep import SimulatedEngine, simulate
from scripts.published_shapes import write_shape

H200 = gpu_of("h200")
CLOCK = StepClock(H200, assumed_costs(H200), [FittedKernels(H200)])
ACCEPTANCE = AcceptanceByPosition(tuple(0.85**i for i in range(1, 16)))
LENGTHS = Lengths(num_prompt_tokens=512, num_output_tokens=256)
CONFIG = BuildConfig(target="t", max_batch_size=64, max_seq_len=2048, max_num_tokens=8192)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairSpecs:
    root = tmp_path_factory.mktemp("pair")
    return read_pair(write_shape(root, "Qwen/Qwen3-8B"), write_shape(root, "z-lab/Qwen3-8B-DFlash-b16"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> PairSpecs:
    return read_pair(write_shape(tmp_path_factory.mktemp("alone"), "Qwen/Qwen3-8B"), None)


@pytest.fixture(scope="module")
def found(pair: PairSpecs, alone: PairSpecs) -> list[Layout]:
    goal = Goal(num_gpus=4, lengths=LENGTHS)
    return layouts(CONFIG, [(pair, ACCEPTANCE), (alone, None)], CLOCK, goal)[0]


def of(
    found: list[Layout], name: str, *, num_prefill: int = 0, has_drafter: bool = True, format_name: str | None = None
) -> Layout:
    wanted = (name, num_prefill, has_drafter, format_name)
    return next(x for x in found if (x.name, x.num_prefill_workers, x.has_drafter, x.format) == wanted)


@pytest.mark.parametrize(("num_requests", "num_drafts"), [(1, 7), (8, 15), (32, 3), (32, 0)])
def test_a_steady_state_is_what_the_scheduler_makes_of_the_load(
    found: list[Layout], num_requests: int, num_drafts: int
) -> None:
    layout = of(found, "tp1x4")
    requests = [LENGTHS.request(index) for index in range(6 * num_requests)]
    result = _simulated(layout, requests, num_requests, num_drafts)
    speed = layout.speed(num_requests, num_drafts)
    assert speed.output_tok_per_s / 4 == pytest.approx(result.output_tok_per_s, rel=0.1), "of one of four replicas"
    assert speed.tok_per_s_per_user == pytest.approx(result.tok_per_s_per_user, rel=0.15)


def _simulated(layout: Layout, requests: list[Request], num_requests: int, num_drafts: int) -> LoadResult:
    """One replica of the layout."""
    config = layout.made.pretrained_config
    assert layout.made.pages is not None
    engine = SimulatedEngine(
        pretrained_config=config,
        limits=layout.made.build_config,
        num_pages=layout.made.pages.num_pages,
        clock=CLOCK,
        drafter="DFlash",
        num_draft_tokens=num_drafts,
        acceptance=ACCEPTANCE,
    )
    load = RequestLoad(requests=requests, concurrency=num_requests, reuses_prefixes=True)
    return simulate(engine, load, EngineWork(config, has_drafter=True))[0]


@pytest.mark.parametrize(("num_requests", "num_drafts", "limit"), [(8, 7, "answers"), (64, 3, "prompts")])
def test_prefill_workers_are_as_fast_as_the_scheduler_on_either_side(
    found: list[Layout], num_requests: int, num_drafts: int, limit: str
) -> None:
    """One replica computes prompts and gives a token each; three find every prompt in the cache."""
    layout = of(found, "tp1x4", num_prefill=1)
    prompt, output = LENGTHS.num_prompt_tokens, LENGTHS.num_output_tokens
    alone = Lengths(num_prompt_tokens=prompt, num_output_tokens=1)
    prompts = _simulated(layout, [alone.request(index) for index in range(64)], 16, num_drafts)
    known = [LENGTHS.request(index, num_shared_tokens=prompt - 1) for index in range(6 * num_requests)]
    answers = _simulated(layout, known, num_requests, num_drafts)
    by_limit = {"prompts": 0.9 * prompts.output_tok_per_s * output, "answers": 3 * answers.output_tok_per_s}
    assert min(by_limit, key=by_limit.__getitem__) == limit
    speed = layout.speed(num_requests, num_drafts)
    assert speed.output_tok_per_s == pytest.approx(by_limit[limit], rel=0.15)
    assert speed.tok_per_s_per_user == pytest.approx(answers.tok_per_s_per_user, rel=0.15)
    assert speed.time_to_first_token_s > of(found, "tp1x4").speed(num_requests, num_drafts).time_to_first_token_s


def test_prefill_workers_are_for_prompts_that_they_take(pair: PairSpecs) -> None:
    def numbers(num_prompt_tokens: int) -> set[tuple[str, int]]:
        goal = Goal(num_gpus=2, lengths=Lengths(num_prompt_tokens=num_prompt_tokens, num_output_tokens=8))
        return {(x.name, x.num_prefill_workers) for x in layouts(CONFIG, [(pair, None)], CLOCK, goal)[0]}

    default = WorkerSettings.model_fields["prefill_min_tokens"].default
    assert numbers(default - 1) == {("tp1x2", 0), ("tp2x1", 0)}
    assert numbers(default) == {("tp1x2", 0), ("tp1x2", 1), ("tp2x1", 0)}


def test_layouts_are_all_divisions_of_the_gpus_in_every_format(found: list[Layout]) -> None:
    names = {(layout.name, layout.format, layout.has_drafter, layout.num_prefill_workers) for layout in found}
    expected = {"tp1x4", "tp2x2", "tp4x1"}
    assert {name for name, *_ in names} >= expected
    assert {form for _, form, *_ in names} == {None, "fp8"}, "no operands of four bits on Hopper"
    assert len(names) == len(found)


def test_ranks_stay_within_a_node(pair: PairSpecs) -> None:
    found, reasons = layouts(CONFIG, [(pair, ACCEPTANCE)], CLOCK, Goal(num_gpus=16, lengths=LENGTHS))
    assert {layout.name for layout in found} == {"tp1x16", "tp2x8", "tp4x4", "tp8x2"}
    assert "more than 8 ranks: sums over nodes take their network, which is not planned" in reasons


@pytest.mark.parametrize("goal", [{}, {"per_user": 300.0}, {"time_to_first_token_s": 0.03}])
def test_choices_meet_the_goal_and_the_best_has_the_most_of_those_that_do(
    found: list[Layout], goal: dict[str, float]
) -> None:
    wanted = Goal(num_gpus=4, lengths=LENGTHS, **goal)
    best = choices(found, wanted)
    assert best and all(wanted.is_met(choice.speed) for choice in best)
    most = {
        is_apart: max(
            speed.output_tok_per_s
            for layout in found
            if (layout.num_prefill_workers > 0) == is_apart
            for speed in layout.by_batch_size.values()
            if wanted.is_met(speed)
        )
        for is_apart in (False, True)
    }
    first = best[0]
    assert first.speed.output_tok_per_s == most[first.layout.num_prefill_workers > 0]
    assert (first.layout.num_prefill_workers > 0) == (most[True] / 1.1 > most[False])
    assert choices(found, Goal(num_gpus=4, lengths=LENGTHS, per_user=1e6)) == []


def test_k_falls_as_the_batch_grows_and_each_is_within_two_percent_of_the_best(found: list[Layout]) -> None:
    layout = of(found, "tp1x4", format_name="fp8")
    lengths = layout.draft_lengths()
    assert min(lengths) == 1 and lengths[1] > next(reversed(lengths.values()))
    before = 0
    for size, speed in layout.by_batch_size.items():
        others = [layout.speed(size, k).output_tok_per_s for k in range(layout.max_draft_len + 1)]
        assert speed.output_tok_per_s * 1.021 >= max(others)
        assert speed.num_draft_tokens == before or others[before] * 1.02 < max(others), (
            "it changes where that is worth it"
        )
        before = speed.num_draft_tokens


def test_a_drafter_that_is_never_right_is_left_out(pair: PairSpecs, alone: PairSpecs) -> None:
    goal, never = Goal(num_gpus=1, lengths=LENGTHS), AcceptanceByPosition((0.0,) * 15)
    found, _ = layouts(CONFIG, [(pair, never), (alone, None)], CLOCK, goal)
    best = choices(found, goal)[0]
    assert not best.layout.has_drafter and best.speed.num_draft_tokens == 0
    drafted = next(layout for layout in found if layout.has_drafter)
    assert set(drafted.draft_lengths().values()) == {0}


def test_more_acceptance_gives_more_and_never_more_than_all_drafts(found: list[Layout]) -> None:
    choice = choices([of(found, "tp1x4")], Goal(num_gpus=4, lengths=LENGTHS))[0]
    speeds = [other_acceptance(choice, factor).speed for factor in (0.5, 1.0, 1.1, 9.0)]
    lengths = [speed.output_tok_per_s for speed in speeds]
    assert lengths == sorted(lengths) and lengths[0] < lengths[1] < lengths[2]
    assert speeds[-1].acceptance_length == speeds[-1].num_draft_tokens + 1


def test_what_does_not_fit_is_named_with_its_reason(pair: PairSpecs) -> None:
    small = gpu_of("h100")
    clock = StepClock(small, assumed_costs(small), [FittedKernels(small)])
    huge = CONFIG.model_copy(update={"max_seq_len": 40000, "max_batch_size": 1, "max_num_tokens": 20000})
    goal = Goal(num_gpus=2, lengths=Lengths(num_prompt_tokens=100_000, num_output_tokens=10))
    found, reasons = layouts(huge, [(pair, ACCEPTANCE)], clock, goal)
    assert found == [] and "no room for a request" in reasons[0]
    assert reasons[0].startswith("tp1, as stored; ")


@dataclass(frozen=True, kw_only=True)
class TimedLayout(Layout):
    """Steps take a time that is easy to write down."""

    def _step_s(self, num_requests: int, num_tokens: int, context: int, num_draft_tokens: int) -> float:
        return step_s(num_requests, num_tokens, context, num_draft_tokens)


def step_s(num_requests: int, num_tokens: int, context: int, num_draft_tokens: int) -> float:
    return 2e-3 + 1e-4 * num_requests + 3e-6 * num_requests * num_tokens + 7e-7 * context + 1e-5 * num_draft_tokens


def timed(prompt: int, output: int, mapping: Mapping | None = None, **fields: Any) -> TimedLayout:
    """Steps of up to 400 tokens, 1 MB of K/V for each token, and acceptance lengths of 1, 1.5, 1.75 and 2."""
    made: Any = SimpleNamespace(
        build_config=SimpleNamespace(max_num_tokens=400, max_draft_len=3),
        pretrained_config=SimpleNamespace(mapping=mapping or Mapping()),
        pages=SimpleNamespace(bytes_per_token=1_000_000),
    )
    lengths = Lengths(num_prompt_tokens=prompt, num_output_tokens=output)
    given = {"acceptance": AcceptanceByPosition((0.5, 0.25, 0.25)), "num_replicas": 5, "format": None} | fields
    return TimedLayout(made=made, clock=CLOCK, lengths=lengths, **given)


def test_answers_of_a_replica_wait_for_the_prompts_of_the_others_chunk_by_chunk() -> None:
    """Prompts of 1000 tokens take steps of 400, 400 and 200; an answer of 101 tokens takes 101 / 2 steps."""
    step = step_s(8, 4, 1000 + 50, 3)
    prompt = step_s(1, 400, 0, 3) + step_s(1, 400, 400, 3) + step_s(1, 200, 800, 3)
    found = timed(1000, 101).speed(8, 3)
    assert found == Speed(
        num_requests=8,
        num_draft_tokens=3,
        acceptance_length=2.0,
        output_tok_per_s=pytest.approx(5 * 8 * 101 / (8 * prompt + 101 / 2 * step)),
        tok_per_s_per_user=pytest.approx(101 / (7 * prompt + 101 / 2 * step)),
        time_to_first_token_s=pytest.approx(prompt + step),
    )
    plain = timed(1000, 101, acceptance=None).speed(8, 0)
    without = step_s(1, 400, 0, 0) + step_s(1, 400, 400, 0) + step_s(1, 200, 800, 0)
    assert plain.acceptance_length == 1.0
    assert plain.tok_per_s_per_user == pytest.approx(101 / (7 * without + 101 * step_s(8, 1, 1050, 0)))


@pytest.mark.parametrize(("num_requests", "together"), [(8, 4), (2, 2)])
def test_ranks_with_requests_of_their_own_wait_for_prompts_of_all_but_those_in_one_step(
    num_requests: int, together: int
) -> None:
    """Four prompts of 100 tokens fit a step. A rank's step has a prompt as often as requests end."""
    layout = timed(100, 101, Mapping(world_size=2, dp_size=2))
    step, often = step_s(num_requests, 4, 150, 3), num_requests * 2 / 101
    prompt = step_s(together, 100, 0, 3) / together * (1 - (1 - often) ** 2) / often
    found = layout.speed(num_requests, 3)
    assert found.output_tok_per_s == pytest.approx(
        2 * 5 * num_requests * 101 / (num_requests * prompt + 101 / 2 * step)
    )
    assert found.tok_per_s_per_user == pytest.approx(101 / ((num_requests - 1) * prompt + 101 / 2 * step))
    assert found.time_to_first_token_s == pytest.approx(step_s(1, 100, 0, 3) + step)
    single = timed(100, 1).speed(8, 3)  # an answer has no more tokens than it has, whatever is accepted
    assert single.tok_per_s_per_user == pytest.approx(1 / (7 * step_s(4, 100, 0, 3) / 4 + step_s(8, 4, 100, 3)))


@pytest.mark.parametrize(
    ("prompt", "num_requests", "together"), [(500, 1, 1), (500, 64, 1), (100, 1, 1), (100, 2, 3), (100, 64, 4)]
)
def test_prefill_workers_write_blocks_that_the_others_read(prompt: int, num_requests: int, together: int) -> None:
    """Two of five replicas of four ranks: 64 GB/s to and from the host, 12.8 GB/s into files, 16.8 GB/s out of them."""
    layout = timed(prompt, 101, Mapping(world_size=4, tp_size=4), num_prefill_workers=2)
    copy, write, read = prompt * 1e6 / 64e9, 4 * prompt * 1e6 / 12.8e9, 4 * prompt * 1e6 / 16.8e9
    chunks = [(400, 0), (100, 400)] if prompt == 500 else [(100, 0)]
    alone, shared = (sum(step_s(count, *chunk, 3) for chunk in chunks) / count for count in (1, together))
    step = step_s(num_requests, 4, prompt + 50, 3)
    answers = 3 * num_requests / (num_requests * copy + 101 / 2 * step)
    prompts = 0.9 * 2 / max(shared + copy, write)
    found = layout.speed(num_requests, 3)
    assert found.output_tok_per_s == pytest.approx(101 * min(answers, prompts))
    assert found.tok_per_s_per_user == pytest.approx(101 / ((num_requests - 1) * copy + 101 / 2 * step))
    last = write * (0.8 if prompt == 500 else 1.0)  # of the blocks, those that no step hides
    assert found.time_to_first_token_s == pytest.approx(alone + last + read + 2 * copy + step)
    assert layout.is_untried and not replace(layout, num_prefill_workers=0).is_untried


@pytest.mark.parametrize(("num_requests", "together"), [(1, 1), (2, 3), (64, 4)])
def test_prefill_workers_compute_prompts_of_the_others_requests_together(num_requests: int, together: int) -> None:
    """Two compute for three replicas; with few bytes and short answers they are what limits all."""
    layout = timed(100, 1, num_prefill_workers=2)
    layout.made.pages.bytes_per_token = 1000  # type: ignore[misc,union-attr]
    prompt_s = step_s(together, 100, 0, 3) / together + 100_000 / 64e9
    assert layout.speed(num_requests, 3).output_tok_per_s == pytest.approx(0.9 * 2 / prompt_s)


@pytest.mark.parametrize(("num_requests", "most"), [(50, 3), (100, 3), (101, 2), (200, 1), (201, 0), (400, 0)])
def test_k_leaves_every_request_its_tokens_in_a_step(num_requests: int, most: int) -> None:
    layout = timed(10, 1000, acceptance=AcceptanceByPosition((1.0,) * 9))
    assert layout.max_draft_len == 3
    assert layout.best_k(num_requests).num_draft_tokens == most
    assert replace(layout, acceptance=AcceptanceByPosition((1.0,) * 2)).max_draft_len == 2


def test_a_goal_is_met_at_its_bounds_and_names_what_the_best_has_most_of() -> None:
    speed = timed(1000, 101).speed(8, 3)
    bounds = {
        "per_user": speed.tok_per_s_per_user,
        "time_to_first_token_s": speed.time_to_first_token_s,
        "throughput": speed.output_tok_per_s,
    }
    assert Goal(num_gpus=4, lengths=LENGTHS, **bounds).is_met(speed)
    for name, bound in bounds.items():
        beyond = bound * (0.99 if name == "time_to_first_token_s" else 1.01)
        assert not Goal(num_gpus=4, lengths=LENGTHS, **bounds | {name: beyond}).is_met(speed)
    assert Goal(num_gpus=4, lengths=LENGTHS).value(speed) == speed.output_tok_per_s
    assert Goal(num_gpus=4, lengths=LENGTHS, throughput=1.0).value(speed) == speed.tok_per_s_per_user


def test_sizes_of_batches_go_up_to_the_largest_that_has_room(found: list[Layout]) -> None:
    layout = of(found, "tp1x4")
    assert layout.max_requests == layout.made.max_requests(512 + 256)
    assert layout.batch_sizes() == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert list(layout.by_batch_size) == layout.batch_sizes()
    assert layout.draft_lengths() == {
        size: speed.num_draft_tokens
        for (size, speed), before in zip(
            layout.by_batch_size.items(), [None, *layout.by_batch_size.values()], strict=False
        )
        if before is None or speed.num_draft_tokens != before.num_draft_tokens
    }


def test_a_factor_scales_each_draft_after_those_that_were_accepted() -> None:
    """0.5, then half of those, then all of these: 1.5 times as often is 0.75, 0.75 and 1."""
    choice = Choice(layout=timed(100, 101), speed=timed(100, 101).speed(8, 3))
    for factor, expected in ((1.0, (0.5, 0.25, 0.25)), (1.5, (0.75, 0.5625, 0.5625)), (0.5, (0.25, 0.0625, 0.03125))):
        changed = other_acceptance(choice, factor)
        assert changed.layout.acceptance == AcceptanceByPosition(expected)
        assert changed.speed == changed.layout.best_k(8, 3)
    none = replace(choice, layout=timed(100, 101, acceptance=AcceptanceByPosition((0.0, 0.0))))
    assert other_acceptance(none, 2.0).layout.acceptance == AcceptanceByPosition((0.0, 0.0))


def test_a_format_that_is_asked_for_is_the_only_one(pair: PairSpecs) -> None:
    goal = Goal(num_gpus=2, lengths=LENGTHS)
    for quantization, formats in (
        (None, {None, "fp8"}),
        (QuantizationConfig(kv_cache="fp8"), {None, "fp8"}),
        (QuantizationConfig(target="fp8", kv_cache="fp8"), {"fp8"}),
    ):
        config = CONFIG.model_copy(update={"quantization": quantization, "max_batch_size": 48})
        found, _ = layouts(config, [(pair, ACCEPTANCE)], CLOCK, goal)
        assert {layout.format for layout in found} == formats
        for layout in found:
            made = layout.made
            assert made.build_config.max_batch_size == 32, "the largest power of two"
            dtypes = {layer.owner.dtype for layer in made.pretrained_config.states().target}
            assert dtypes == {"bfloat16" if quantization is None else "float8_e4m3fn"}
            assert layout.num_replicas * made.pretrained_config.mapping.world_size == 2


@pytest.mark.parametrize(("gain", "is_first"), [(1.09, False), (1.11, True)])
def test_what_no_gpu_has_run_must_gain_a_tenth(gain: float, is_first: bool) -> None:
    plain, apart = timed(100, 101), timed(100, 101, num_prefill_workers=2)
    speed = plain.speed(8, 3)
    for layout, factor in ((plain, 1.0), (apart, gain)):
        layout.__dict__["by_batch_size"] = {8: replace(speed, output_tok_per_s=factor * speed.output_tok_per_s)}
    assert (choices([plain, apart], Goal(num_gpus=5, lengths=LENGTHS))[0].layout is apart) == is_first
