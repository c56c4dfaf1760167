from dataclasses import replace

import pytest

from dflash_trt.backends import page_budget
from dflash_trt.backends.page_budget import PagePlan, plan_engine_pages, plan_pages
from dflash_trt.backends.page_groups import PageNeeds, StepSizes
from dflash_trt.core.errors import CapacityError
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec, engine_states
from dflash_trt.core.model.gqa import AttentionMask
from dflash_trt.core.model.rope import RopeSpec
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from dflash_trt.core.runtime_config import KV_BUDGET, RuntimeConfig
from dflash_trt.core.state_spec import EngineStates, Recurrent
from dflash_trt.core.step_plan import ExecutorLimits, PageWindow, decode_pages
from dflash_trt.engine_dir.manifest import EngineManifest
from dflash_trt.scheduler.scheduler import Scheduler
from tests.executor.rank_engines import build, make_zlab_pair
from tests.specs import layered

DECODER = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope": RopeSpec(theta=1e6),
    "has_qk_norm": True,
    "max_position_embeddings": 40960,
}
QWEN3_8B = TargetSpec(
    **layered((AttentionMask(),) * 36, **DECODER), family="qwen3", vocab_size=151936, is_embedding_tied=False
)
QWEN3_8B_DFLASH = DraftSpec(
    **layered((AttentionMask(is_causal=False),) * 5, **DECODER),
    source_format="z-lab",
    target_layer_ids=(1, 9, 17, 25, 33),
    target_hidden_size=4096,
    target_vocab_size=151936,
    draft_block_size=16,
    mask_token_id=151669,
)


ONE_RANK = Mapping()


def plan(draft=QWEN3_8B_DFLASH, mapping=ONE_RANK, **changes):
    options = {"page_size": 32, "max_batch_size": 64, "max_seq_len": 4096, "budget_bytes": 40 << 30}
    states = engine_states(QWEN3_8B, draft, dtype="bfloat16").shard(mapping)
    return plan_pages(states, **options | changes)


def test_bytes_per_token_are_those_of_the_real_checkpoints():
    found = plan()
    assert found.target_bytes_per_token == 36 * 2 * 8 * 128 * 2 == 147_456
    assert found.draft_bytes_per_token == 5 * 2 * 8 * 128 * 2 == 20_480


def test_pages_stay_inside_the_budget_and_use_it_up():
    found = plan()
    page_bytes = 32 * found.bytes_per_token
    assert found.total_bytes <= 40 << 30 < found.total_bytes + page_bytes
    assert found.num_full_sequences == found.num_pages // 128


def test_no_more_pages_are_taken_than_the_largest_batch_can_use():
    assert plan(budget_bytes=1 << 50).num_pages == 64 * 128


def test_two_ranks_halve_the_bytes_of_a_token():
    halved = plan(mapping=Mapping(world_size=2, tp_size=2))
    assert halved.bytes_per_token * 2 == plan().bytes_per_token


def test_sixteen_ranks_hold_a_copy_of_one_of_eight_heads_each():
    found = plan(mapping=Mapping(world_size=16, tp_size=16))
    assert found.bytes_per_token * 8 == plan().bytes_per_token


def test_an_engine_without_a_drafter_spends_nothing_on_one():
    assert plan(draft=None).draft_bytes_per_token == 0


def test_a_budget_below_one_sequence_is_refused_with_the_bytes_it_needs():
    needed = 128 * 32 * plan().bytes_per_token
    assert plan(budget_bytes=needed).num_pages == 128
    with pytest.raises(CapacityError, match=f"{needed} bytes"):
        plan(budget_bytes=needed - 1)


RECURRENT = Recurrent(
    name="target_state.0",
    num_key_heads=2,
    num_value_heads=4,
    key_head_dim=8,
    value_head_dim=8,
    conv_size=4,
    num_records=4,
    dtype="float32",
)


def with_recurrent() -> EngineStates:
    return EngineStates(target=(*engine_states(QWEN3_8B, None, dtype="bfloat16").target, RECURRENT))


def test_snapshots_take_at_most_a_quarter_of_what_slots_and_a_sequence_leave():
    states, of_slot = with_recurrent(), RECURRENT.bytes_per_slot
    options = {"page_size": 32, "max_batch_size": 8, "max_seq_len": 64}
    needed = 2 * 32 * states.bytes_per_token + 9 * of_slot
    for spare, num_snapshots in ((0, 0), (4 * of_slot - 1, 0), (4 * of_slot, 1), (23 * of_slot, 5), (99 * of_slot, 8)):
        found = plan_pages(states, **options, budget_bytes=needed + spare, num_snapshots=None)
        assert (found.num_snapshots, found.snapshot_bytes) == (num_snapshots, num_snapshots * of_slot)
        assert found.total_bytes + found.slot_bytes + found.snapshot_bytes <= needed + spare
    given = plan_pages(states, **options, budget_bytes=needed + 2 * of_slot, num_snapshots=2)
    assert given.num_snapshots == 2
    with pytest.raises(CapacityError, match=f"in addition to {12 * of_slot} bytes of recurrent state"):
        plan_pages(states, **options, budget_bytes=needed + 2 * of_slot, num_snapshots=3)


# The pages of an engine


GIB = 1 << 30


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> EngineManifest:
    """float32, max_seq_len 64, and a max_batch_size so large that the budget decides."""
    root = tmp_path_factory.mktemp("pair")
    make_zlab_pair(root)
    found = build(root, tp_size=1).manifest
    limits = found.build_config.model_copy(update={"max_batch_size": 1 << 30})
    return found.model_copy(update={"build_config": limits})


@pytest.fixture
def host_bytes(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(page_budget, "available_memory_bytes", lambda: GIB)
    return GIB


def _with_pages(manifest: EngineManifest, **kv: tuple[LayerKvScales, ...]) -> EngineManifest:
    config = manifest.pretrained_config.model_copy(update={"quantization": QuantizationSpec(**kv)})
    return manifest.model_copy(update={"pretrained_config": config})


def test_fp8_pages_are_planned_as_bytes_the_targets_and_the_drafters_alone(manifest: EngineManifest) -> None:
    def planned(**kv: tuple[LayerKvScales, ...]) -> tuple[int, int, int]:
        found = plan_engine_pages(_with_pages(manifest, **kv), RuntimeConfig(kv_cache_bytes=GIB))
        return found.target_bytes_per_token, found.draft_bytes_per_token, found.num_pages

    target, draft = (2 * spec.num_layers * spec.layers[0].mixer.kv_size for spec in (manifest.target, manifest.draft))
    target_kv = (LayerKvScales(),) * manifest.target.num_layers
    draft_kv = (LayerKvScales(),) * manifest.draft.num_layers
    page_size = manifest.build_config.page_size
    for kv, sizes in (
        ({}, (4, 4)),
        ({"target_kv": target_kv}, (1, 4)),
        ({"draft_kv": draft_kv}, (4, 1)),
        ({"target_kv": target_kv, "draft_kv": draft_kv}, (1, 1)),
    ):
        per_token = (target * sizes[0], draft * sizes[1])
        assert planned(**kv) == (*per_token, GIB // (page_size * sum(per_token)))


def test_a_plan_takes_half_of_the_free_memory_unless_another_fraction_is_given(
    manifest: EngineManifest, host_bytes: int
) -> None:
    bytes_per_token = plan_engine_pages(manifest, RuntimeConfig(kv_cache_bytes=GIB)).bytes_per_token
    page_bytes = bytes_per_token * manifest.build_config.page_size
    for options, budget in (
        ({}, host_bytes / 2),
        ({"kv_cache_free_memory_fraction": 0.25}, host_bytes / 4),
        ({"default_fraction": 0.75}, host_bytes * 0.75),
        ({"default_fraction": 0.75, "kv_cache_free_memory_fraction": 0.25}, host_bytes / 4),
        ({"kv_cache_bytes": 1 << 25}, 1 << 25),
        ({"free_bytes": lambda: 1 << 26}, 1 << 25),
    ):
        config = RuntimeConfig(**{name: options.pop(name) for name in [*options] if name in KV_BUDGET})
        assert plan_engine_pages(manifest, config, **options).num_pages == int(budget) // page_bytes


def test_prefixes_that_leave_have_places_in_host_memory_beside_the_pages(
    manifest: EngineManifest, host_bytes: int
) -> None:
    kv = {"kv_cache_bytes": 1 << 25}
    without = plan_engine_pages(manifest, RuntimeConfig(**kv))
    page_bytes = without.page_size * without.bytes_per_token
    found = plan_engine_pages(manifest, RuntimeConfig(**kv, host_cache_bytes=5 * page_bytes + 1))
    assert (found.num_host_pages, found.num_host_snapshots, found.host_bytes) == (5, 0, 5 * page_bytes)
    assert found.num_pages == without.num_pages and without.num_host_pages == 0
    assert f"; 5 pages of prefixes in {5 * page_bytes / 2**20:.1f} MiB of host memory" in str(found)
    assert "host memory" not in str(without)
    with pytest.raises(CapacityError, match=f"at least {page_bytes}, for a page, found {page_bytes - 1}"):
        plan_engine_pages(manifest, RuntimeConfig(**kv, host_cache_bytes=page_bytes - 1))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_host_s_tier_fits_beside_the_pages_of_a_cpu_and_alone_beside_a_gpu(
    manifest: EngineManifest, host_bytes: int, num_ranks: int
) -> None:
    mapping = Mapping(world_size=num_ranks, tp_size=num_ranks)
    model = manifest.pretrained_config.model_copy(update={"mapping": mapping})
    engine = manifest.model_copy(update={"pretrained_config": model})
    share = host_bytes // num_ranks
    for options, kv_bytes, most in (
        ({"kv_cache_bytes": 1 << 25}, 1 << 25, share - (1 << 25)),
        ({}, share // 2, share // 2),  # half of what is free
        ({"free_bytes": lambda: 1 << 26}, 0, share),
    ):
        device = {name: options.pop(name) for name in [*options] if name == "free_bytes"}
        assert plan_engine_pages(engine, RuntimeConfig(**options, host_cache_bytes=most), **device).num_host_pages
        beside = f" beside {kv_bytes} of K/V pages" if kv_bytes else ""
        with pytest.raises(CapacityError, match=f"at most {most} bytes, which are free{beside}.*, found {most + 1}"):
            plan_engine_pages(engine, RuntimeConfig(**options, host_cache_bytes=most + 1), **device)


def test_snapshots_take_at_most_a_quarter_of_the_host_s_part() -> None:
    states, of_slot = with_recurrent(), RECURRENT.bytes_per_slot
    sizes = {"page_size": 1, "max_batch_size": 4, "max_seq_len": 64, "budget_bytes": GIB}
    host_bytes = 4 * (20 * states.bytes_per_token + 2 * of_slot)
    found = plan_pages(states, **sizes, num_snapshots=None, host_bytes=host_bytes)
    num_snapshots = host_bytes // 4 // of_slot
    assert found.num_host_snapshots == num_snapshots > 2
    assert found.num_host_pages == (host_bytes - num_snapshots * of_slot) // states.bytes_per_token
    assert found.host_bytes == num_snapshots * of_slot + found.num_host_pages * states.bytes_per_token
    assert f"and {num_snapshots} snapshots of prefixes" in str(found)
    for num_snapshots, given, words in (
        (0, host_bytes, "K/V memory with room for snapshots"),
        (1, states.bytes_per_token - 1, f"at least {states.bytes_per_token}, for a page"),
    ):
        with pytest.raises(CapacityError, match=words):
            plan_pages(states, **sizes, num_snapshots=num_snapshots, host_bytes=given)
    small = EngineStates(target=(RECURRENT, replace(states.target[0], num_kv_heads=1, head_dim=1)))
    with pytest.raises(CapacityError, match=f"at least {4 * of_slot}, for a snapshot in a quarter of it"):
        plan_pages(small, **sizes, num_snapshots=1, host_bytes=4 * of_slot - 1)


def test_ranks_share_the_memory_of_the_host(manifest: EngineManifest, host_bytes: int) -> None:
    config = manifest.pretrained_config.model_copy(update={"mapping": Mapping(world_size=2, tp_size=2)})
    halved = plan_engine_pages(manifest.model_copy(update={"pretrained_config": config}), RuntimeConfig())
    assert halved.num_pages == plan_engine_pages(manifest, RuntimeConfig()).num_pages  # half the memory, half the heads
    assert halved.num_ranks == 2
    two = manifest.model_copy(update={"pretrained_config": config})
    over_nodes = plan_engine_pages(two, RuntimeConfig(nnodes=2, master_addr="x"))
    assert over_nodes.num_pages == 2 * halved.num_pages  # a node's memory is for its own rank
    with pytest.raises(CapacityError, match=f"at most {host_bytes // 2} bytes, which are free beside"):
        plan_engine_pages(two, RuntimeConfig(nnodes=2, master_addr="x", host_cache_bytes=host_bytes // 2 + 1))


def test_all_that_ranks_have_a_number_of_is_as_many_as_the_fewest_have() -> None:
    counts = {"num_pages": 9, "num_snapshots": 8, "num_windows": 7, "num_host_pages": 6, "num_host_snapshots": 5}
    windows = (PageWindow(16, 4), PageWindow(32, 3))
    sizes = {"page_size": 16, "target_bytes_per_token": 64, "draft_bytes_per_token": 8, "max_seq_len": 64}
    own = PagePlan(**sizes, **counts, page_windows=windows, window_bytes_per_token=(8, 8))
    fewest = {name: count - 1 for name, count in counts.items()}
    expected = replace(own, **fewest, page_windows=(PageWindow(16, 3), PageWindow(32, 2)))
    assert own.agreed(lambda count: count - 1) == expected


def test_an_engine_run_without_its_drafter_has_no_draft_pages(manifest: EngineManifest) -> None:
    assert plan_engine_pages(manifest, RuntimeConfig(use_drafter=False, kv_cache_bytes=GIB)).draft_bytes_per_token == 0


def alternating(window: int, *, every: int, num_layers: int) -> TargetSpec:
    """Layers with a window, but for each last one of `every`."""
    masks = [AttentionMask(window=None if i % every == every - 1 else window) for i in range(num_layers)]
    return TargetSpec(**layered(masks, **DECODER), family="qwen3", vocab_size=1000, is_embedding_tied=False)


@pytest.mark.parametrize(
    ("target", "max_seq_len", "one_group", "groups"),
    [
        (alternating(1024, every=6, num_layers=62), 32768, 10, 32),  # as Gemma 3 27B alternates
        (alternating(128, every=2, num_layers=36), 32768, 17, 32),  # as gpt-oss-120b alternates
        (alternating(4096, every=1000, num_layers=32), 32768, 20, 155),  # as Mistral 7B v0.1
        (alternating(4096, every=2, num_layers=32), 2048, 320, 320),  # nobody outgrows the window
    ],
)
def test_more_sequences_fit_where_layers_keep_a_window(
    target: TargetSpec, max_seq_len: int, one_group: int, groups: int
) -> None:
    states = engine_states(target, None, dtype="bfloat16")
    sizes = {"page_size": 32, "max_batch_size": 512, "max_seq_len": max_seq_len, "budget_bytes": 80 << 30}
    alone = plan_pages(states, **sizes)
    grouped = plan_pages(states, **sizes, steps=StepSizes(max_num_tokens=8192, max_draft_len=7))
    assert (alone.num_full_sequences, grouped.num_full_sequences) == (one_group, groups)
    assert grouped.num_pages >= alone.num_pages, "layers without a window never have less"
    assert grouped.total_bytes <= 80 << 30


@pytest.mark.parametrize("max_draft_len", [0, 1, 3, 9])
@pytest.mark.parametrize("page_size", [1, 4, 7])
def test_windows_have_the_pages_that_the_scheduler_s_limits_ask_for_and_never_more(
    page_size: int, max_draft_len: int
) -> None:
    max_seq_len, max_batch_size = 20, 3
    sizes = {"page_size": page_size, "max_batch_size": max_batch_size, "max_seq_len": max_seq_len}
    for window in range(1, max_seq_len + max_draft_len + 2):
        states = engine_states(alternating(window, every=2, num_layers=2), None, dtype="bfloat16")
        needs = PageNeeds(states=states, **sizes, steps=StepSizes(max_num_tokens=64, max_draft_len=max_draft_len))
        limits = ExecutorLimits(**sizes, max_num_tokens=64, max_draft_len=max_draft_len, num_pages=60)
        assert needs.windows == states.windows(limits.max_positions)
        claim = min(decode_pages(window, page_size, max_draft_len), limits.max_pages)
        for num_requests in (1, 2, max_batch_size, max_batch_size + 1, 100):
            num_running = min(num_requests, max_batch_size)
            for group in needs.page_windows(num_requests):
                assert num_running * claim <= group.num_pages <= num_running * limits.max_pages
                Scheduler(replace(limits, page_windows=(group,)))  # refuses less than one request needs


def test_a_budget_of_one_sequence_has_windows_for_it() -> None:
    states = engine_states(alternating(1024, every=6, num_layers=12), None, dtype="bfloat16")
    sizes = {"page_size": 32, "max_batch_size": 8, "max_seq_len": 32768}
    steps = StepSizes(max_num_tokens=2048, max_draft_len=7)
    needed = PageNeeds(states=states, **sizes, steps=steps).bytes_of(1)
    found = plan_pages(states, **sizes, steps=steps, budget_bytes=needed)
    assert (found.num_full_sequences, found.total_bytes) == (1, needed)
    assert found.page_windows[0].num_pages == decode_pages(1024, 32, 7) + 2048 // 32
    with pytest.raises(CapacityError, match=f"{needed} bytes"):
        plan_pages(states, **sizes, steps=steps, budget_bytes=needed - 1)
