"""Steps over latents: the interpreted TensorRT network gives the torch backend's tokens."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_trt.backends.tensorrt.canary import check_pages
from dflash_trt.backends.tensorrt.latent_ops import LatentOps
from dflash_trt.backends.tensorrt.support import unsupported_problems
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.batch import StepBatch, run_batch
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from tests.engines import Decoding, make_executor
from tests.executor.rank_engines import build, opened, write_calibration_prompts
from tests.traces import GREEDY, SAMPLED, Steps, integers, logprobs, trace
from tests.trt.networks import MAX_SEQ_LEN, InterpretedExecutor, define_engine, define_pair
from tests.trt.plugin_reference import PluginReference
from tests.trt.ranks import interpreted_ranks
from tests.trt.test_builder import build as build_with_rtx
from tests.trt.test_step_tokens import make_pair
from tests.trt.test_trt_executor import make_ours

SMALL = {"num_hidden_layers": 2}  # one with an MLP, one with experts in groups and a shared one
DRAFT = {"num_layers": 1, "target_layer_ids": (0, 1)}
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V3": ("deepseek_v3", {}),
    "Kimi-K2, one group of experts": ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
    "DeepSeek-V3.2": ("deepseek_v32", {}),
    "GLM-5": ("glm_moe_dsa", {}),
    "q without a latent, halves rotated": ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False}),
}
KS = (3, 0, 2)  # in turn
NUM_PAGES = 64
FP8_PAGES = QuantizationSpec(
    target_kv=(LayerKvScales(k=0.02, v=0.02), LayerKvScales(k=0.03, v=0.03)), draft_kv=(LayerKvScales(k=0.03, v=0.01),)
)


def latent_pair(root: Path, name: str = "DeepSeek-V3") -> tuple[Path, Path]:
    family, changes = TARGETS[name]
    return make_pair(root, family=family, target=SMALL | changes, **DRAFT)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return latent_pair(tmp_path_factory.mktemp("pair"))


def steps_of(executor: Any, samplings: Any = GREEDY, **options: Any) -> Steps:
    return trace(executor, samplings, **{"num_draft_tokens": KS, "chunk": 6} | options)[0]


@pytest.fixture(scope="module")
def expected(pair: tuple[Path, Path]) -> Steps:
    found = steps_of(make_executor(*pair, max_seq_len=MAX_SEQ_LEN))
    accepted = {row.num_accepted for step in found for row in step}
    assert len(accepted) > 1, "some drafts are accepted"
    return found


@pytest.mark.parametrize("name", TARGETS)
def test_every_step_of_a_mixed_trace_equals_torchs(trt: ModuleType, tmp_path: Path, name: str) -> None:
    """Whatever the pages held before."""
    paths = latent_pair(tmp_path, name)
    theirs = make_executor(*paths, max_seq_len=MAX_SEQ_LEN)
    ours = InterpretedExecutor(define_pair(trt, *paths), num_pages=NUM_PAGES)
    for pages in ours.state.values():
        pages.fill_(torch.nan)
    for samplings in (GREEDY, SAMPLED)[: 2 if name == "DeepSeek-V3" else 1]:
        found, wanted = (steps_of(executor, samplings) for executor in (ours, theirs))
        assert integers(found) == integers(wanted)
        torch.testing.assert_close(logprobs(found), logprobs(wanted), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "dtype", "pages"),
    [
        ("DeepSeek-V3", "bfloat16", "FP8"),
        pytest.param("Kimi-K2, one group of experts", "float32", None, marks=pytest.mark.slow),
    ],
)
def test_the_whole_step_compiles(trt: ModuleType, tmp_path: Path, name: str, dtype: str, pages: str | None) -> None:
    family, changes = TARGETS[name]
    options = {"family": family, "target": SMALL | changes, **DRAFT}
    built = build_with_rtx(tmp_path, options, dtype, pages=FP8_PAGES if pages else None)
    assert built.plan_bytes > 100_000
    assert built.layer_counts["PLUGIN_V3"] == 2 + 1 + 1 + 3  # latents, experts, the block, what samples


def test_each_layer_is_one_node_with_a_state_of_its_own(
    trt: ModuleType, pair: tuple[Path, Path], expected: Steps
) -> None:
    """Another index of its state is noticed."""
    defined = define_pair(trt, *pair)
    latents = [node for node in defined.nodes if node.name == "AttendLatents"]
    assert [node.fields["state"] for node in defined.nodes if node.name.startswith("Attend")] == [0, 1, 2]
    assert [(node.fields["latent_dim"], node.fields["page_type"]) for node in latents] == [(32, 0)] * 2
    assert [node.fields["max_verify_rows"] for node in latents] == [defined.spec.max_draft_len + 1] * 2
    latents[1].fields["state"] = 0  # pages of layer 0, which layer 1 then overwrites
    ours = InterpretedExecutor(defined, num_pages=NUM_PAGES)
    assert integers(steps_of(ours)) != integers(expected)


def test_fp8_pages_give_torchs_tokens(trt: ModuleType, pair: tuple[Path, Path]) -> None:
    """The negative control are pages with the scales of other layers."""
    wanted = steps_of(make_executor(*pair, max_seq_len=MAX_SEQ_LEN, quantization=FP8_PAGES))
    for scales in (FP8_PAGES.target_kv, (LayerKvScales(k=0.0001, v=1.0), LayerKvScales(k=0.0001, v=1.0))):
        pages = FP8_PAGES.model_copy(update={"target_kv": scales})
        ours = InterpretedExecutor(define_pair(trt, *pair, pages=pages), num_pages=NUM_PAGES)
        found = steps_of(ours)
        assert (integers(found) == integers(wanted)) is (scales is FP8_PAGES.target_kv)
    assert [state.dtype for state in ours.state.values()] == [torch.float8_e4m3fn] * 3
    sizes = {tuple(pages.shape[1:]) for name, pages in ours.state.items() if name.startswith("target")}
    assert sizes == {(4, 32 + 8)}  # a row of a token, whatever the heads are


def test_the_executor_gives_torchs_tokens_in_padded_steps_and_its_pages_pass_the_canary(
    trt: ModuleType, pair: tuple[Path, Path], expected: Steps
) -> None:
    ours, _ = make_ours(trt, pair)
    assert check_pages(ours) == "5 tokens in each of 3 pools, at 2 places"
    assert integers(steps_of(ours)) == integers(expected)


class DirectNodes(PluginReference):
    """Says in which steps the first layer's node had rows that are attended directly, or leaves their results out."""

    def __init__(self, *, leaves_out: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.leaves_out = leaves_out
        self.direct_rows: list[list[int]] = []

    def _attend_latents(self, x: dict[str, Tensor], settings: dict[str, float]) -> list[Tensor]:
        attended, direct = super()._attend_latents(x, settings)  # type: ignore[no-untyped-call]
        if settings["state"] == 0:
            self.direct_rows.append(direct.flatten(1).any(1).nonzero().flatten().tolist())
        return [attended, torch.zeros_like(direct) if self.leaves_out else direct]


def long_steps(executor: Any) -> tuple[list[Any], Tensor]:
    """Verify blocks beside a prompt that begins, then its later chunk: what each step decided, log probabilities."""
    short = Decoding(executor, [5, 9, 2, 3], tuple(range(8)))
    long = Decoding(executor, [index * index % 11 for index in range(73)], tuple(range(8, 32)))
    steps: Steps = []
    for short_rows, long_rows in ((4, 0), (0, 66), (0, 7), (0, 0), (0, 0)):
        parts = [(short, short.prefill_part(short_rows) if short_rows else short.verify_part(3))]
        if not short_rows:
            parts.append((long, long.prefill_part(long_rows) if long_rows else long.verify_part(3)))
        results = run_batch(executor, StepBatch(requests=tuple(part for _, part in parts), num_draft_tokens=3))
        steps.append(results)
        for (run, part), result in zip(parts, results, strict=True):
            run.take(part, result)
    return integers(steps), logprobs(steps)


def test_prompts_that_begin_are_attended_directly_by_nodes(trt: ModuleType, pair: tuple[Path, Path]) -> None:
    """On one rank and on two. The negative control leaves their results out."""
    expected, wanted = long_steps(make_executor(*pair, max_seq_len=MAX_SEQ_LEN))
    defined = define_pair(trt, *pair)
    for leaves_out in (False, True):
        reference = DirectNodes(leaves_out=leaves_out)
        ours = InterpretedExecutor(defined, num_pages=NUM_PAGES, run_node=reference)
        found, probabilities = long_steps(ours)
        assert reference.direct_rows == [[], list(range(4, 70)), [], [], []]
        assert (found == expected) is not leaves_out
        if not leaves_out:
            torch.testing.assert_close(probabilities, wanted, rtol=0, atol=1e-4)
    ranks = interpreted_ranks(trt, *pair, num_ranks=2, num_pages=NUM_PAGES, collectives="plugin")
    assert long_steps(ranks)[0] == expected


def test_two_ranks_divide_heads_and_hold_all_latents(trt: ModuleType, pair: tuple[Path, Path], expected: Steps) -> None:
    ours = interpreted_ranks(trt, *pair, num_ranks=2, num_pages=NUM_PAGES)
    assert integers(steps_of(ours)) == integers(expected)
    first, second = (rank.state for rank in ours.ranks)
    for name in ("target_kv.0", "target_kv.1"):
        assert first[name].shape[2] == 32 + 8 and first[name].count_nonzero() > 0
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=1e-5)


def test_the_steps_of_a_quantized_engine_equal_torchs(trt: ModuleType, tmp_path: Path) -> None:
    """With FP8 pages whose scales are calibrated; the factors of latents are never packed."""
    make_pair(tmp_path, family="deepseek_v3", target=SMALL | {"q_lora_rank": 32}, **DRAFT)
    write_calibration_prompts(tmp_path)
    quantization = {"target": "nvfp4_w4a16", "kv_cache": "fp8", "calibration": {"prompts": "prompts.jsonl"}}
    engine = build(tmp_path, tp_size=1, quantization=quantization)
    ours = InterpretedExecutor(define_engine(trt, engine), num_pages=NUM_PAGES)
    options: dict[str, Any] = {"num_draft_tokens": (3,), "num_new": 6}
    with opened(engine) as executor:
        wanted = steps_of(executor, GREEDY[:2], **options)
    found = steps_of(ours, GREEDY[:2], **options)
    assert integers(found) == integers(wanted)
    torch.testing.assert_close(logprobs(found), logprobs(wanted), rtol=0, atol=1e-3)


def _forget_the_rotated_key(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = LatentOps.attend_latent

    def forgetful(self: Any, q_nope: Any, q_rope: Any, latents: Any, k_rope: Any, *others: Any) -> Any:
        return honest(self, q_nope, q_rope, latents, self._layers.binary("PROD", k_rope, 0.0), *others)

    monkeypatch.setattr(LatentOps, "attend_latent", forgetful)


def _leave_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LatentOps, "pairs_to_halves", lambda self, x: x)


@pytest.mark.parametrize("perturb", [_forget_the_rotated_key, _leave_pairs])
def test_a_perturbed_lowering_is_noticed(
    trt: ModuleType,
    pair: tuple[Path, Path],
    expected: Steps,
    monkeypatch: pytest.MonkeyPatch,
    perturb: Callable[[pytest.MonkeyPatch], None],
) -> None:
    perturb(monkeypatch)
    ours = InterpretedExecutor(define_pair(trt, *pair), num_pages=NUM_PAGES)
    for pages in ours.state.values():
        pages.fill_(0.5)
    found, honest = (logprobs(steps) for steps in (steps_of(ours, num_new=3), expected))
    size = min(len(found), len(honest))
    assert (found[:size] - honest[:size]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"kv_lora_rank": 520}, "latent_dim of latent attention: expected at most 512 in a TensorRT engine, found 520"),
    ],
)
def test_latents_are_refused_for_nothing_but_their_sizes(
    tmp_path: Path, changes: dict[str, int], problem: str | None
) -> None:
    target, _ = make_pair(tmp_path, family="deepseek_v3", target=SMALL | changes, has_drafter=False)
    problems = unsupported_problems(open_pair(target, None).target, None, None)
    assert len(problems) == (problem is not None)
    assert problem is None or problems[0].startswith(problem)
