"""Memory that a plan counts for a step, against what the GPU's executor allocates and holds. No GPU is needed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.backends.cuda.step_launches import LogitUse
from dflash_trt.backends.padding import MAX_GRAPH_TOKENS, StepShape
from dflash_trt.bench.machine_probes import CPU_SIZES, ProbeSize, probe_specs
from dflash_trt.checkpoint.specs import read_specs
from dflash_trt.core.batch import StepBatch, plan_of
from dflash_trt.core.logit_rules import rules_bytes
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.dspark import DSparkHeads
from dflash_trt.core.model.feed_forward import Dense, Moe
from dflash_trt.core.model.mtp import MtpHead
from dflash_trt.engine_dir import EngineLimits, PretrainedConfig
from dflash_trt.kernels.attention_launch import INTERPRETER_MULTIPROCESSORS
from dflash_trt.plan import rank_memory
from dflash_trt.plan.rank_memory import RankMemory
from tests.factories import Family, make_target, make_zlab_drafter
from tests.kernels.test_step_on_kernels import make_executors

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")


class LiveMemory(TorchDispatchMode):
    """Bytes of the tensors that live at the same time, of those made inside: `peak_bytes` is their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[StorageWeakRef, int] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {StorageWeakRef(leaf.untyped_storage()) for leaf in _tensors(args, kwargs)}
        for tensor in _tensors(result):
            reference = StorageWeakRef(tensor.untyped_storage())
            if reference not in given:
                self._made[reference] = tensor.untyped_storage().nbytes()
        self._made = {reference: size for reference, size in self._made.items() if not reference.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(self._made.values()))
        return result


def _tensors(*values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def test_tensors_that_end_are_not_counted() -> None:
    with LiveMemory() as live:
        for _ in range(3):
            torch.ones(256) + 1.0
    assert live.peak_bytes == 2 * 256 * 4


def make_pair(root: Path, family: Family, **sizes: Any) -> tuple[Path, Path]:
    target = make_target(root / "target", family=family, num_hidden_layers=4, tokenizer=False, **sizes)
    options: dict[str, Any] = {"target_layer_ids": (0, 2), "block_size": 3, "num_layers": 2}
    return target, make_zlab_drafter(root / "drafter", target_dir=target, attention_bias=family == "gpt_oss", **options)


def described(executor: TorchGpuExecutor) -> tuple[PretrainedConfig, EngineLimits]:
    network, limits = executor.network, executor.limits
    config = PretrainedConfig(target=network.target, draft=network.draft, dtype="float32", mapping=Mapping())
    names = EngineLimits.model_fields
    return config, EngineLimits(**{name: getattr(limits, name) for name in names})


def peak_of_a_step(executor: TorchGpuExecutor, num_tokens: int, *, has_rules: bool = False) -> int:
    """Without running our kernels, which allocate nothing."""
    limits = executor.limits
    shape = StepShape(
        num_requests=limits.max_batch_size,
        num_tokens=num_tokens,
        num_draft_tokens=limits.max_draft_len,
        is_decode=False,
        has_graph=False,
    )
    executor._staging.stage(plan_of(StepBatch(requests=(), num_draft_tokens=limits.max_draft_len)), shape)

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if kernel.fn.__name__ == "draft_block_kernel":  # its tokens are looked up
            args[kernel.arg_names.index("token_ids")].zero_()

    executor._rules.tensors  # noqa: B018  (made at first use, and counted with the buffers)
    use = LogitUse(make_rules=executor._rules_of(shape, None) if has_rules else None)
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch, LiveMemory() as live:
        patch.setattr(InterpretedFunction, "run", run)
        executor._run(shape, use)
    return live.peak_bytes


TWO_RANKS = Mapping(world_size=2, tp_size=2)
ONE_GROUP = {"n_group": 1, "topk_group": 1}
CASES: dict[str, tuple[Family, dict[str, Any], str | None]] = {
    "feed-forward": ("qwen3", {"intermediate_size": 1024}, None),
    "attention": ("qwen3", {"intermediate_size": 32, "num_attention_heads": 16, "num_key_value_heads": 8}, None),
    "logits": ("qwen3", {"vocab_size": 40000}, None),
    "fp8": ("qwen3", {"intermediate_size": 256}, "fp8"),
    "experts": ("qwen3_moe", {}, None),
    "experts with biases": ("gpt_oss", {}, None),
    "latents": ("deepseek_v3", {**ONE_GROUP, "num_attention_heads": 16, "num_key_value_heads": 16}, None),
    "gated delta nets": ("qwen3_5_text", {"linear_num_value_heads": 32, "intermediate_size": 32}, None),
    "shared experts": ("qwen3_5_moe_text", {"shared_expert_intermediate_size": 512}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_activations_bound_what_a_step_holds(tmp_path: Path, case: str) -> None:
    family, sizes, weight_format = CASES[case]
    _, executor = make_executors(
        make_pair(tmp_path, family, **sizes), torch.device("cpu"), weight_format=weight_format, max_num_tokens=512
    )
    config, limits = described(executor)
    for num_tokens in (12, 512 if weight_format is None else 32):  # PyTorch emulates FP8 on a CPU, slowly
        steps = rank_memory.executor_limits(config, limits)
        planned = rank_memory.activations_bytes(config, steps, num_tokens=num_tokens)
        held = peak_of_a_step(executor, num_tokens)
        assert held <= planned <= (1.1 if weight_format is None else 1.4) * held  # measured: 1.00 to 1.09, and 1.35


def test_scores_under_rules_are_counted(tmp_path: Path) -> None:
    """Float32 of every row of logits, beside a step of bfloat16 as of float32."""
    _, executor = make_executors(make_pair(tmp_path, "qwen3", vocab_size=40000), torch.device("cpu"))
    config, limits = described(executor)
    steps = rank_memory.executor_limits(config, limits)
    without, planned = (
        rank_memory.activations_bytes(config, steps, num_tokens=12, has_rules=has_rules) for has_rules in (False, True)
    )
    held = peak_of_a_step(executor, 12, has_rules=True)
    assert without < held <= planned
    sizes = {"num_tokens": 12, "has_rules": True}
    of_engine = rank_memory.activations_bytes(config, steps, has_nodes=True, **sizes)
    assert of_engine == planned + 12 * 40000 * 4  # rows of prompts that are scored, besides the scores


def test_a_tensorrt_engine_has_the_results_of_prompts_attended_directly_besides(tmp_path: Path) -> None:
    """The second output of a node, in steps that may have such a prompt."""
    family, sizes, _ = CASES["latents"]
    _, executor = make_executors(make_pair(tmp_path, family, **sizes), torch.device("cpu"), max_num_tokens=64)
    config, limits = described(executor)
    layer, mixer = config.target.layers[0], config.target.latents[0]
    for num_tokens, extra in ((63, 0), (64, mixer.attended_size)):
        counts = [
            rank_memory.layer_features(layer, config.target.hidden_size, config, num_tokens, has_nodes=has_nodes)
            for has_nodes in (False, True)
        ]
        assert counts[1] - counts[0] == extra
    planned = [
        rank_memory.rank_memory(config, limits, weights_bytes=0, multiprocessors=1, has_pages_last=is_last)
        for is_last in (False, True)
    ]
    assert planned[1].graph_pool_bytes > planned[0].graph_pool_bytes


@pytest.mark.parametrize(("family", "sizes"), [("qwen3", {}), ("deepseek_v3", ONE_GROUP)])
def test_buffers_and_workspaces_are_those_of_the_executor(
    tmp_path: Path, family: Family, sizes: dict[str, int]
) -> None:
    _, executor = make_executors(make_pair(tmp_path, family, **sizes), torch.device("cpu"))
    config, limits = described(executor)
    resources, staging = executor._resources, executor._staging
    steps = rank_memory.executor_limits(config, limits)
    sampling = sum(tensor.nbytes for tensor in resources.sampling_workspace.values())
    workspaces = resources.attention_workspace.nbytes + resources.attended.nbytes + sampling
    if resources.latents is not None:
        workspaces += resources.latents.queries.nbytes + resources.latents.attended.nbytes
    assert rank_memory.workspace_bytes(config, steps, multiprocessors=INTERPRETER_MULTIPROCESSORS) == workspaces
    own = {id(x.untyped_storage()): x for x in vars(staging).values() if isinstance(x, torch.Tensor)}
    held = sum(tensor.nbytes for tensor in own.values()) + sum(tensor.nbytes for tensor in staging.slots.tensors)
    held += staging._plan.memory.nbytes + staging._assembled.memory.nbytes + executor._results._device.memory.nbytes
    assert rank_memory.buffers_bytes(steps) == held


def test_confidences_of_drafts_have_memory_in_the_results() -> None:
    target, draft = probe_specs(CPU_SIZES[0])
    limits = EngineLimits(max_batch_size=64, max_seq_len=64, max_num_tokens=512, max_draft_len=7, page_size=16)
    sizes = []
    for has_confidence in (False, True):
        heads = DSparkHeads(rank=8, markov_type="vanilla", has_confidence=has_confidence)
        spec = draft.model_copy(update={"algorithm": "dspark", "heads": heads})
        steps = rank_memory.executor_limits(PretrainedConfig(target=target, draft=spec, dtype="float32"), limits)
        sizes.append(rank_memory.buffers_bytes(steps))
    assert 64 * 7 * 4 <= sizes[1] - sizes[0] < 64 * 7 * 4 + 512  # sections begin at multiples of 256 bytes


def test_a_tensorrt_engine_has_memory_for_what_drafts_are_drawn_from(tmp_path: Path) -> None:
    """Two outputs of 4 bytes an element, which the slots take."""
    _, executor = make_executors(make_pair(tmp_path, "qwen3"), torch.device("cpu"))
    config, limits = described(executor)
    steps = rank_memory.executor_limits(config, limits)
    elements = steps.max_batch_size * steps.max_draft_len * steps.draft_topk
    extra = rank_memory.buffers_bytes(steps, has_nodes=True) - rank_memory.buffers_bytes(steps)
    assert 0 < 8 * elements <= extra < 8 * elements + 512  # sections begin at multiples of 256 bytes


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_a_rank_of_two_has_the_workspaces_of_half_of_the_heads(tmp_path: Path, family: Family) -> None:
    sizes = ONE_GROUP if family == "deepseek_v3" else {}
    specs, mapping = read_specs(make_target(tmp_path, family=family, tokenizer=False, **sizes), None), TWO_RANKS
    layers = [layer.model_copy(update={"mixer": layer.mixer.shard(mapping)}) for layer in specs.target.layers]
    half = specs.target.model_copy(update={"layers": tuple(layers)})
    limits = EngineLimits(max_batch_size=4, max_seq_len=64, max_num_tokens=32, max_draft_len=3, page_size=16)
    workspaces = []
    for config in (
        PretrainedConfig(target=specs.target, dtype="float32", mapping=mapping),
        PretrainedConfig(target=half, dtype="float32"),
    ):
        steps = rank_memory.executor_limits(config, limits)
        assert steps.max_draft_len == 0, "an engine without a drafter makes no drafts"
        workspaces.append(rank_memory.workspace_bytes(config, steps, multiprocessors=8))
    assert workspaces[0] == workspaces[1]


def test_every_part_is_counted_once_before_or_after_the_pages() -> None:
    parts = dict(zip(RankMemory.__dataclass_fields__, (False, 1, 20, 300, 4000, 50_000, 600_000), strict=True))
    for is_last, before, after in ((False, 21, 654_300), (True, 654_321, 0)):
        found = RankMemory(**parts | {"has_pages_last": is_last})
        assert (found.before_pages_bytes, found.after_pages_bytes) == (before, after)


def test_logit_rules_of_every_slot_and_of_padding_are_counted(tmp_path: Path) -> None:
    config = PretrainedConfig(target=read_specs(make_target(tmp_path, tokenizer=False), None).target, dtype="float32")
    limits = EngineLimits(max_batch_size=4, max_seq_len=64, max_num_tokens=32, max_draft_len=0, page_size=16)
    steps = rank_memory.executor_limits(config, limits)
    for is_last in (False, True):
        found = rank_memory.rank_memory(config, limits, weights_bytes=7, multiprocessors=8, has_pages_last=is_last)
        of_steps = rank_memory.buffers_bytes(steps, has_nodes=is_last)
        assert found.buffers_bytes == rules_bytes(5, steps.max_positions) + of_steps
        assert (found.weights_bytes, found.context_bytes) == (7, 1 << 30)


def test_graphs_keep_the_activations_of_all_slots_at_least(tmp_path: Path) -> None:
    """Up to MAX_GRAPH_TOKENS of a step's tokens, and its verify blocks if they are more."""
    config = PretrainedConfig(target=read_specs(make_target(tmp_path, tokenizer=False), None).target, dtype="float32")
    for max_batch_size, max_num_tokens, graph_tokens in ((4, 8192, MAX_GRAPH_TOKENS), (4, 64, 64), (4096, 8192, 4096)):
        limits = EngineLimits(
            max_batch_size=max_batch_size, max_seq_len=64, max_num_tokens=max_num_tokens, max_draft_len=0, page_size=16
        )
        found = rank_memory.rank_memory(config, limits, weights_bytes=0, multiprocessors=8)
        steps = rank_memory.executor_limits(config, limits)
        expected = rank_memory.activations_bytes(config, steps, num_tokens=graph_tokens)
        assert found.graph_pool_bytes == expected


WIDE = ProbeSize(
    hidden_size=64,
    intermediate_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_layers=4,
    num_draft_layers=2,
    vocab_size=64,
)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(
    "part", ["target's MLP", "target's logits", "taps", "projection", "drafter's MLP", "drafter's logits"]
)
def test_whatever_is_largest_grows_with_its_own_sizes(part: str, tp_size: int) -> None:
    """Elements of a step with 32 rows of logits and 64 tokens, where one of its parts is far larger than the others."""
    big = 1 << 16
    counts = []
    for more in (0, 64):
        size = big + more
        target, draft = probe_specs(WIDE._replace(vocab_size=size if part == "target's logits" else 64))
        wide = {"feed_forward": Dense(intermediate_size=size)}
        if part == "target's MLP":
            target = target.model_copy(update={"layers": (target.layers[0].model_copy(update=wide),) * 4})
        if part == "drafter's MLP":
            draft = draft.model_copy(update={"layers": (draft.layers[0].model_copy(update=wide),) * 2})
        if part == "drafter's logits":
            draft = draft.model_copy(update={"draft_vocab_size": size})
        if part == "taps":
            draft = draft.model_copy(update={"target_hidden_size": size})
        if part == "projection":
            draft = draft.model_copy(update={"hidden_size": size, "mtp": MtpHead()})
        config = PretrainedConfig.model_construct(
            target=target, draft=draft, dtype="float32", mapping=Mapping(world_size=tp_size, tp_size=tp_size)
        )
        limits = EngineLimits(max_batch_size=4, max_seq_len=64, max_num_tokens=64, max_draft_len=7, page_size=16)
        steps = rank_memory.executor_limits(config, limits)
        counts.append(rank_memory.activations_bytes(config, steps, num_tokens=64) // 4)
    gathered = 1 if tp_size == 1 else 2  # with two ranks those of all, and twice a half
    assert (
        counts[1] - counts[0]
        == {
            "target's MLP": 64 * 3 * 64 // tp_size,
            "target's logits": 32 * 64 * gathered,
            "taps": 64 * len(draft.target_layer_ids) * 64,
            # Features of two positions, embeddings and features normed, both joined, and the result.
            "projection": 64 * 6 * 64,
            "drafter's MLP": 32 * 3 * 64 // tp_size,
            "drafter's logits": 32 * 64 * gathered,
        }[part]
    )


def test_an_mlp_beside_the_experts_gives_a_result_of_its_own() -> None:
    target, _ = probe_specs(WIDE)
    config = PretrainedConfig(target=target, dtype="float32")
    experts = Moe(num_experts=4, num_experts_per_token=2, intermediate_size=512, routing="softmax_top_k")
    changes: tuple[dict[str, Any], ...] = ({}, {"shared_size": 8}, {"shared_size": 8, "has_own_norms": True})
    held = [
        rank_memory.layer_features(
            target.layers[0].model_copy(update={"feed_forward": experts.model_copy(update=change)}), 64, config
        )
        for change in changes
    ]
    assert [each - held[0] for each in held] == [0, 64, 3 * 64]
