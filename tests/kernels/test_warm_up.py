"""After the warm-up no kernel is compiled and no graph is captured, whatever requests come.

Launches are recorded and not run; tokens come from the fake executor, so that loads of a GPU's size are quick.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.backends import padding
from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.backends.graphs import Enqueue, GraphCache
from dflash_trt.backends.padding import step_shape, warm_shapes
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.core.step_plan import FinishedStep, StepPlan
from dflash_trt.engine_dir import EngineDir
from dflash_trt.scheduler.draft_length import BatchSizeDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from tests.dflash2_files import make_dflash2_drafter
from tests.engine_dir.building import build
from tests.factories import Family, make_target, make_zlab_drafter
from tests.fake_executor import FakeExecutor, right_with_probability
from tests.kernels.specializations import recorded_specializations
from tests.scheduler.driver import Driver, make_request

NUM_PARTS = 3  # of a step, each a graph
LIMITS = {"max_seq_len": 512, "max_num_tokens": 900, "page_size": 32}
POLICY = BatchSizeDraftLength({1: 7, 5: 5, 20: 3})
STAND_INS = dict.fromkeys(  # tokens are looked up
    ("draft_block_kernel", "combine_argmax_kernel"), lambda arguments: arguments["token_ids"].zero_()
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")


class GraphRecorder:
    """A Capture whose graphs stand for what they were captured from."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()

    def capture(self, enqueue: Enqueue) -> Enqueue:
        enqueue()
        self.events["capture"] += 1

        def replay() -> None:
            self.events["replay"] += 1
            enqueue()

        return replay


class LaunchingExecutor(FakeExecutor):
    """The tokens of the fake executor, and the launches of the real one."""

    def __init__(self, executor: TorchGpuExecutor) -> None:
        super().__init__(executor.limits, vocab_size=250, draft_rule=right_with_probability(0.7))
        self._executor = executor
        self.num_by_kind: Counter[str] = Counter()

    def submit(self, plan: StepPlan) -> FinishedStep:
        shape = step_shape(plan, self._executor.limits)
        self.num_by_kind["decode" if shape.is_decode else "mixed" if shape.has_graph else "long"] += 1
        self._executor.submit(plan)
        self._executor._staging.slots.token_ids.zero_()  # what kernels that did not run left there
        return super().submit(plan)


def make_engine(root: Path, *, family: Family = "qwen3", max_batch_size: int, **overrides: Any) -> EngineDir:
    """Each query head has its own K/V head, so that the chunk's tile depends on its length most."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    target = make_target(root / "target", family=family, **{"num_hidden_layers": 1} | heads | overrides)
    drafter = make_zlab_drafter(
        root / "drafter",
        target_dir=target,
        target_layer_ids=(0,),
        block_size=8,
        layer_types=("full_attention",) * 2,
        **heads,
    )
    return build(
        root, root / "engine", target=str(target), drafter=str(drafter), max_batch_size=max_batch_size, **LIMITS
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    return make_engine(tmp_path_factory.mktemp("dense"), max_batch_size=72)


@pytest.fixture(scope="module")
def engine_of_experts(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    """Steps of 257 to 512 tokens have a tile of experts that no verify block and neither end of the lengths has."""
    experts = {"num_experts": 32, "num_experts_per_tok": 2}
    return make_engine(tmp_path_factory.mktemp("experts"), family="qwen3_moe", max_batch_size=24, **experts)


@pytest.fixture(scope="module")
def engine_of_delta_nets(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    return make_engine(tmp_path_factory.mktemp("delta_nets"), family="qwen3_5_text", max_batch_size=24, **layers)


@pytest.fixture(scope="module")
def engine_of_dflash2(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    root = tmp_path_factory.mktemp("dflash2")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    target = make_target(root / "target", num_hidden_layers=1, **heads)
    drafter = make_dflash2_drafter(
        root / "drafter", target_dir=target, target_layer_ids=(0,), block_size=8, window=80, **heads
    )
    return build(root, root / "engine", target=str(target), drafter=str(drafter), max_batch_size=24, **LIMITS)


@pytest.fixture(scope="module")
def engine_of_chains(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    from tests.eagle3_files import save_eagle3_head  # skips without `speculators`

    root = tmp_path_factory.mktemp("chains")
    target = make_target(root / "target", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    head = save_eagle3_head(root / "head", target_dir=target, aux_hidden_state_layer_ids=(1,), draft_tokens=range(200))
    return build(root, root / "engine", target=str(target), drafter=str(head), max_batch_size=24, **LIMITS)


@pytest.fixture(scope="module")
def engine_of_latents(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    sizes = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    return make_engine(tmp_path_factory.mktemp("latents"), family="deepseek_v3", max_batch_size=24, **sizes)


ENGINES = [
    "engine",
    "engine_of_delta_nets",
    "engine_of_experts",
    "engine_of_dflash2",
    "engine_of_chains",
    "engine_of_latents",
]


@pytest.fixture(params=[*ENGINES, "engine_of_experts, deterministic"])
def executor(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[TorchGpuExecutor, GraphRecorder]]:
    """Of the steps with a prefill chunk some have graphs and some have none."""
    name, *words = request.param.split(", ")
    engine: EngineDir = request.getfixturevalue(name)
    monkeypatch.setattr(padding, "MAX_GRAPHS", 64)
    config = RuntimeConfig(kv_cache_bytes=1 << 24, deterministic=bool(words))
    opened = TorchGpuExecutor.open(engine, config, device=torch.device("cpu"))
    recorder = GraphRecorder()
    opened.graphs = GraphCache(recorder.capture)
    yield opened, recorder
    opened.close()


def serve(executor: LaunchingExecutor, *, num_steps: int) -> None:
    """Requests of all lengths come, many at the start and then a few at once; some are cancelled."""
    rng = random.Random(5)
    driver = Driver(Scheduler(executor.limits, policy=POLICY), executor)
    num_requests = 0
    for step in range(num_steps):
        for _ in range(80 if step == 0 else rng.choice((0, 0, 0, 1, 2, 6))):
            prompt = rng.choices(range(1, 250), k=rng.choice((1, 3, 9, 20, 90, 480) if step else (3, 20)))
            driver.add(make_request(f"r{num_requests}", prompt, max_new_tokens=rng.choice((1, 2, 9, 20))))
            num_requests += 1
        if num_requests and rng.random() < 0.1:
            driver.cancel(f"r{rng.randrange(num_requests)}")
        if driver.scheduler.has_work:
            driver.step()


def test_no_kernel_is_compiled_and_no_graph_captured_while_requests_run(executor) -> None:
    gpu, graphs = executor
    with recorded_specializations(STAND_INS) as compiled:
        gpu.warm_up(warm_shapes(gpu.limits, POLICY.lengths, tile_edges=gpu.tile_edges))
        num_compiled, num_captured = len(compiled), graphs.events["capture"]
        assert num_captured == NUM_PARTS * gpu.graphs.num_graphs == NUM_PARTS * 64
        graphs.events["replay"] = 0
        serving = LaunchingExecutor(gpu)
        serve(serving, num_steps=80)
    assert (len(compiled), graphs.events["capture"]) == (num_compiled, num_captured)
    assert min(serving.num_by_kind[kind] for kind in ("decode", "mixed", "long")) > 3, "all kinds of steps ran"
    assert {batch.num_draft_tokens for batch in serving.batches} == {0, *POLICY.lengths}
    num_replayed = graphs.events["replay"] // NUM_PARTS
    assert serving.num_by_kind["decode"] < num_replayed < len(serving.batches), "mixed steps run both ways"


@pytest.mark.parametrize("executor", ["engine"], indirect=True)
@pytest.mark.parametrize(
    ("draft_lens", "with_all_kernels"),
    [pytest.param((7,), True, id="other draft lengths"), pytest.param(POLICY.lengths, False, id="graphs alone")],
)
def test_an_incomplete_warm_up_is_noticed(executor, draft_lens: Sequence[int], with_all_kernels: bool) -> None:
    gpu, _ = executor
    with recorded_specializations(STAND_INS) as compiled:
        shapes = warm_shapes(gpu.limits, draft_lens, tile_edges=gpu.tile_edges)
        gpu.warm_up(shape for shape in shapes if shape.has_graph or with_all_kernels)
        num_compiled = len(compiled)
        serve(LaunchingExecutor(gpu), num_steps=30)
    assert len(compiled) > num_compiled


@pytest.mark.parametrize("executor", ["engine_of_experts"], indirect=True)
def test_a_warm_up_without_the_tiles_of_experts_is_noticed(executor) -> None:
    gpu, _ = executor
    assert gpu.tile_edges == [256, 512]
    with recorded_specializations(STAND_INS) as compiled:
        gpu.warm_up(warm_shapes(gpu.limits, POLICY.lengths))
        warm = set(compiled)
        serve(LaunchingExecutor(gpu), num_steps=80)
    names = {name for name, *_ in compiled - warm}
    assert names == {"routing_kernel", "expert_gate_up_kernel", "expert_down_kernel"}
