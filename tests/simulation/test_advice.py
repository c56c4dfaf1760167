"""Advice for a node: its arithmetic against the simulated load, and its choices against all there are."""

import pytest

from dflash_trt.checkpoint.pair import read_pair
from dflash_trt.checkpoint.specs import PairSpecs
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.request import Request
from dflash_trt.plan.gpus import gpu_of
from dflash_trt.plan.kernel_fits import FittedKernels
from dflash_trt.plan.step_costs import StepClock, assumed_costs
from dflash_trt.plan.step_work import EngineWork
from dflash_trt.servers.dynamo.settings import WorkerSettings
from dflash_trt.simulation.acceptance import AcceptanceByPosition
from dflash_trt.simulation.advice import Goal, Layout, choices, layouts, other_acceptance
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
    assert reasons[0].startswith("tp1ep1, as stored; ")
