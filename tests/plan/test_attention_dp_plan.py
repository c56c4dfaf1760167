"""Ranks with requests of their own in the plan: what each holds and computes, and what all of them give."""

from dataclasses import replace
from pathlib import Path

import pytest

from dflash_trt.bench.machine_probes import CPU_SIZES, probe_specs
from dflash_trt.checkpoint.pair import read_pair
from dflash_trt.checkpoint.specs import PairSpecs, with_draft_window
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.expert_exchange import exchange_costs, reached_fraction, sends_by_counts
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.model.mtp import MtpHead
from dflash_trt.engine_dir import PretrainedConfig
from dflash_trt.plan.gpus import gpu_of
from dflash_trt.plan.kernel_fits import FittedKernels
from dflash_trt.plan.planning import EnginePlan, plan_engine
from dflash_trt.plan.step_costs import StepClock, assumed_costs
from dflash_trt.plan.step_work import EngineWork
from dflash_trt.simulation.advice import Goal, Layout, layouts
from dflash_trt.simulation.load import Lengths, RequestLoad
from dflash_trt.simulation.sweep import SimulatedEngine, simulate
from scripts.published_shapes import write_shape
from tests.factories import make_target, make_zlab_drafter
from tests.plan.test_step_work import ATTENTION, MOE, H, V, rows, work

LENGTHS = Lengths(num_prompt_tokens=512, num_output_tokens=256)
SHARED = MOE.model_copy(update={"shared_size": 48})


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> PairSpecs:
    root = tmp_path_factory.mktemp("kimi")
    return read_pair(write_shape(root, "moonshotai/Kimi-K2.6"), write_shape(root, "z-lab/Kimi-K2.6-DFlash"))


def plan(
    pair: PairSpecs, gpu: str, *, attention_dp: bool, max_batch_size: int, draft_window: int | None = None
) -> EnginePlan:
    config = BuildConfig(
        target="t",
        drafter="d",
        draft_window=draft_window,
        tp_size=8,
        ep_size=8,
        attention_dp=attention_dp,
        max_batch_size=max_batch_size,
        max_num_tokens=1024 if attention_dp else 4096,
        max_seq_len=131072,
    )
    return plan_engine(config, with_draft_window(pair, draft_window), gpu_of(gpu))


@pytest.mark.parametrize(
    ("gpu", "draft_window", "max_batch_size", "least"),
    [
        ("h200", None, 16, 5.4),
        ("h200", 4096, 16, 6.8),
        ("h200", 4096, 8, 7),
        ("b300", None, 16, 5.9),
        ("b300", 4096, 32, 7.5),
    ],
)
def test_eight_ranks_hold_many_times_the_latents_of_tensor_parallelism(
    kimi: PairSpecs, gpu: str, draft_window: int | None, max_batch_size: int, least: float
) -> None:
    """Eight times less what each rank has of all: weights of attention, and the drafter's K/V."""
    divided, own = (
        plan(kimi, gpu, attention_dp=dp, draft_window=draft_window, max_batch_size=size)
        for dp, size in ((False, 64), (True, max_batch_size))
    )
    assert divided.fits and own.fits
    assert own.num_kv_tokens >= least * divided.num_kv_tokens
    assert own.pages is not None and own.num_kv_tokens == 8 * own.pages.num_tokens
    assert own.max_requests(8192) % 8 == 0
    assert own.memory.weights_bytes > divided.memory.weights_bytes


def test_a_rank_computes_its_rows_and_its_experts_for_the_rows_of_all() -> None:
    own = work(ATTENTION, feed_forward=SHARED, mapping=Mapping(world_size=4, dp_size=4, ep_size=4)).of(rows((3, 9)))
    alone = work(ATTENTION, feed_forward=SHARED).of(rows((3, 9)))
    all_rows = work(ATTENTION, feed_forward=SHARED, mapping=Mapping(world_size=4, tp_size=4, ep_size=4)).of(
        rows(*[(3, 9)] * 4)
    )
    experts, of_all = ([item for item in made.products if item.experts is not None] for made in (own, all_rows))
    assert experts == of_all and experts[0].experts is not None and experts[0].experts.num_tokens == 12
    assert (own.kv_bytes, own.mixing_flops, own.num_logits) == (alone.kv_bytes, alone.mixing_flops, alone.num_logits)
    found = {(item.shape, item.rows): item.elements for item in own.products}
    qkv = ATTENTION.q_size + 2 * ATTENTION.kv_size
    assert found[(qkv, H), 3] == qkv * H
    assert found[(2 * 48 // 4, H), 12] == 2 * 48 // 4 * H, "the MLP beside the experts: its part, for all rows"
    assert found[(V // 4, H), 4] == V // 4 * H, "the head: its part, for the rows of all"


@pytest.mark.parametrize("feed_forward", [MOE, None], ids=["experts", "MLPs"])
def test_ranks_exchange_the_rows_of_embedding_feed_forwards_and_head(feed_forward: Moe | None) -> None:
    mapping = Mapping(world_size=4, dp_size=4, ep_size=2)
    found = work(ATTENTION, ATTENTION, feed_forward=feed_forward, mapping=mapping).of(rows((3, 9), (2, 5)))
    size = 4 * 3 / 4  # float32, of three of four ranks
    assert [(item.kind, item.count, item.rows, item.features, item.num_bytes) for item in found.exchanges] == [
        ("all_gather", 1, 20, 1, 20 * size),  # token ids
        ("reduce_scatter", 1, 20, H, 20 * H * size),
        ("all_gather", 2, 20, H, 2 * 20 * H * size),
        ("reduce_scatter", 2, 20, H, 2 * 20 * H * size),
        ("all_gather", 1, 8, H, 8 * H * size),
        ("all_to_all", 1, 2, V, 2 * V * size),
    ]
    assert found.num_ranks == 4


def test_rows_of_prompts_go_to_experts_as_the_rule_says() -> None:
    """The rule is the engine's own function. Verify blocks run in a graph, whose exchanges have one size."""
    costs, mapping = exchange_costs((9, 0)), Mapping(world_size=8, dp_size=8, ep_size=8)
    moe = Moe(num_experts=128, num_experts_per_token=4, intermediate_size=32, routing="top_k_softmax")
    config = work(ATTENTION, feed_forward=moe, mapping=mapping)._config
    engine = EngineWork(config, has_drafter=False, exchange_costs=costs)
    chosen = {}
    for count in (1, 64, 1 << 17):
        found = {(item.kind, item.rows, item.features) for item in engine.of(rows((count, 0))).exchanges}
        chosen[count] = ("all_to_all", round(reached_fraction(moe, 8) * 8 * count), H) in found
        assert (("all_gather", 8 * count, H) in found) == (not chosen[count]) or count == 1, "the head gathers 8 rows"
        sizes = {"hidden_size": H, "itemsize": 4, "ep_size": 8}
        assert chosen[count] == (count > 1 and sends_by_counts(moe, costs, num_rows=[count] * 8, **sizes))
    assert chosen == {1: False, 64: False, 1 << 17: True}
    steps = (rows(*[(first, 0), (second, 0)] * 50_000, drafts=1) for first, second in ((2, 2), (3, 1)))
    blocks, with_prompts = (engine.of(step) for step in steps)  # of as many tokens
    kinds = [{item.kind for item in step.exchanges if item.features == H} for step in (blocks, with_prompts)]
    assert kinds == [{"all_gather", "reduce_scatter"}, {"all_gather", "reduce_scatter", "all_to_all"}]
    (told,) = (item for item in with_prompts.exchanges if item.features == 8)
    assert told.num_bytes == told.count * 7 * 8, "a count of 64 bits from each of the other ranks"
    uneven = {(item.kind, item.rows) for item in engine.of(rows((64, 0)), shared_tokens=64).exchanges}
    assert {("all_gather", 8 * 64), ("all_reduce", 64)} <= uneven, "padded to the fullest, and summed over all"


def test_every_pass_of_a_drafter_exchanges_its_rows(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", family="qwen3_moe", tokenizer=False)
    drafter = make_zlab_drafter(tmp_path / "drafter", target_dir=target, num_layers=2)
    config = BuildConfig(target="t", drafter="d", tp_size=2, ep_size=2, attention_dp=True, max_seq_len=256)
    made = plan_engine(config, read_pair(target, drafter), gpu_of("h200")).pretrained_config
    step = rows((3, 9), (2, 5), drafts=3)
    both = [EngineWork(made, has_drafter=has_drafter).of(step).exchanges for has_drafter in (False, True)]
    slots, drafts, hidden = 2 * 2 * 4, 2 * 3, made.target.hidden_size
    assert [(item.kind, item.count, item.rows, item.features) for item in both[1][len(both[0]) :]] == [
        ("all_gather", 1, slots, 1),
        ("reduce_scatter", 1, slots, hidden),
        ("all_gather", 2, slots, hidden),
        ("reduce_scatter", 2, slots, hidden),
        ("all_gather", 1, 2 * drafts, hidden),
        ("all_to_all", 1, drafts, made.target.vocab_size),
    ]


def test_a_chain_embeds_its_slots_so_far_and_feeds_the_last_forward() -> None:
    """On average 2 of the 4 slots of each request."""
    target, draft = probe_specs(CPU_SIZES[0])
    head = {"algorithm": "mtp", "mtp": MtpHead(), "mask_token_id": None, "layers": draft.layers[:1]}
    head["target_layer_ids"] = (target.num_layers - 1,)
    config = PretrainedConfig(
        target=target,
        draft=draft.model_copy(update=head),
        dtype="float32",
        mapping=Mapping(world_size=2, dp_size=2, ep_size=2),
    )
    step = rows((4, 9), (4, 5), drafts=3)
    alone, both = (EngineWork(config, has_drafter=has_drafter).of(step).exchanges for has_drafter in (False, True))
    assert [(item.kind, item.count, item.rows, item.features) for item in both[len(alone) :]] == [
        ("all_gather", 3, 2 * 4, 1),
        ("reduce_scatter", 3, 2 * 4, target.hidden_size),
        ("all_gather", 3, 2 * 2, target.hidden_size),
        ("reduce_scatter", 3, 2 * 2, target.hidden_size),
        ("all_gather", 3, 2 * 2, target.hidden_size),
        ("all_to_all", 3, 2, target.vocab_size),
    ]
    assert (alone[0].count, both[0].count) == (1, 2), "a chain embeds the tokens of the step, too"


def advice(root: Path, target: str) -> list[Layout]:
    h200 = gpu_of("h200")
    clock = StepClock(h200, assumed_costs(h200), [FittedKernels(h200)])
    config = BuildConfig(target="t", max_batch_size=16, max_seq_len=2048, max_num_tokens=2048)
    pair = read_pair(write_shape(root, target), None)
    goal = Goal(num_gpus=4, lengths=LENGTHS)
    return [layout for layout in layouts(config, [(pair, None)], clock, goal)[0] if not layout.num_prefill_workers]


def test_advice_compares_them_where_there_are_experts(tmp_path: Path) -> None:
    found = {layout.name: layout for layout in advice(tmp_path, "openai/gpt-oss-120b")}
    assert {"dp2ep2x2", "dp4ep4x1", "tp4ep4x1"} <= found.keys()
    own, replicas = found["dp4ep4x1"], found["tp1x4"]
    assert own.num_replicas == 1 and own.max_requests == 16
    speeds = [layout.speed(8, 0).output_tok_per_s for layout in (own, replicas)]
    assert 1 < speeds[0] / speeds[1] < 2, "four groups of requests each, of which one reads a quarter of the experts"
    assert not any(name.startswith("dp") for name in {layout.name for layout in advice(tmp_path, "Qwen/Qwen3-8B")})


def layout_of_four(root: Path) -> tuple[Layout, SimulatedEngine]:
    [layout] = [
        layout for layout in advice(root, "openai/gpt-oss-120b") if layout.name == "dp4ep4x1" and layout.format is None
    ]
    return layout, SimulatedEngine(
        pretrained_config=layout.made.pretrained_config,
        limits=layout.made.build_config,
        num_pages=layout.made.pages.num_pages if layout.made.pages else 0,
        clock=layout.clock,
        drafter="AR",
        num_draft_tokens=0,
        acceptance=None,
    )


@pytest.mark.parametrize("num_requests", [4, 16])
def test_a_steady_state_is_what_the_schedulers_make_of_the_load(tmp_path: Path, num_requests: int) -> None:
    """Prompts of one rank make all ranks wait."""
    layout, engine = layout_of_four(tmp_path)
    requests = [LENGTHS.request(index) for index in range(24 * num_requests)]
    load = RequestLoad(requests=requests, concurrency=4 * num_requests)
    result, _ = simulate(engine, load, EngineWork(engine.pretrained_config, has_drafter=False))
    speed = layout.speed(num_requests, 0)
    assert speed.output_tok_per_s == pytest.approx(result.output_tok_per_s, rel=0.15)
    assert speed.tok_per_s_per_user == pytest.approx(result.tok_per_s_per_user, rel=0.2)


def test_prompts_of_one_rank_cost_a_tensorrt_engine_the_padding_of_the_others(tmp_path: Path) -> None:
    """Answers end at different times, so that few prompts begin together."""
    _, engine = layout_of_four(tmp_path)
    requests = [replace(LENGTHS, num_output_tokens=64 + 16 * index).request(index) for index in range(16)]
    load, work = RequestLoad(requests=requests, concurrency=8), EngineWork(engine.pretrained_config, has_drafter=False)
    took = [simulate(replace(engine, pads_ranks=pads), load, work)[0].duration_s for pads in (False, True)]
    assert 1.01 < took[1] / took[0] < 2
