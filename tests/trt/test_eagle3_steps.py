"""Steps with an EAGLE-3 head: the TensorRT network, interpreted, makes the chains of the torch backend."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import dflash_trt
from dflash_trt.backends.tensorrt import drafter_ops
from dflash_trt.backends.tensorrt.builder import build_plan
from dflash_trt.backends.tensorrt.canary import check_pages
from dflash_trt.backends.tensorrt.context import StepContexts
from dflash_trt.backends.tensorrt.drafter_ops import DrafterOps
from dflash_trt.backends.tensorrt.executor import TensorRTExecutor
from dflash_trt.backends.tensorrt.host_weights import host_rope_tables
from dflash_trt.backends.tensorrt.layers import Layers
from dflash_trt.backends.tensorrt.network import CONTEXT_WRITTEN
from dflash_trt.backends.tensorrt.plan_stream import NoBytes
from dflash_trt.core.step_plan import ExecutorLimits
from tests.eagle3_files import save_eagle3_head
from tests.engines import make_executor
from tests.executor.rank_engines import build, opened, write_calibration_prompts
from tests.factories import make_target
from tests.traces import GREEDY, SAMPLED, Steps, integers, logprobs, trace
from tests.trt.fake_engine import USER_MANAGED, FakeEngine
from tests.trt.networks import MAX_SEQ_LEN, InterpretedExecutor, define_engine, define_pair, host_tensors, open_spec
from tests.trt.ranks import interpreted_engine
from tests.trt.test_builder import CHECK, LIMITS
from tests.trt.test_trt_executor import CPU, HOST_STREAM
from tests.trt.test_trt_executor import LIMITS as EXECUTOR_LIMITS

SOME = (0, 1, 2, 4, 5, 7, 8, 10, 11)  # of twelve tokens
K = 3
KS = (K, 1, 0, 2)  # in turn: one network serves them all
FULL = 7  # as many as a head drafts by default
HEADS: dict[str, dict[str, Any]] = {
    "a draft vocabulary, a window": {"draft_tokens": SOME, "sliding_window": 5, "norm_before_residual": True},
    "norm of each tap, normed features": {"fc_norm": True, "norm_output": True},
    "norm of all taps, Qwen3's layer": {"architecture": "qwen3", "norm_before_fc": True, "draft_tokens": SOME},
}
NUM_PAGES = 64


def make_pair(root: Path, *, num_layers: int = 2, **options: Any) -> tuple[Path, Path]:
    target = make_target(root / "target", num_hidden_layers=num_layers, vocab_size=12, tokenizer=False)
    given = {"aux_hidden_state_layer_ids": (2, 1)} | options
    return target, save_eagle3_head(root / "drafter", target_dir=target, **given)


@dataclass(frozen=True)
class Expected:
    """Steps of the torch backend: greedy ones over given texts, whose blocks are cut everywhere, and sampled ones."""

    greedy: Steps
    sampled: Steps
    proposals: list[list[int]]

    def steps_of(self, executor: Any, samplings: Any = GREEDY, *, ks: tuple[int, ...] = KS) -> Steps:
        proposals = self.proposals if samplings is GREEDY else None
        options: dict[str, Any] = {"num_draft_tokens": ks, "num_new": 8, "chunk": 6, "proposals": proposals}
        return trace(executor, samplings, **options)[0]


def expected_of(executor: Any) -> Expected:
    _, texts = trace(executor, GREEDY, num_draft_tokens=(0,), num_new=12)
    proposals = [[(token + (i % 3 == 2)) % 12 for i, token in enumerate(text.tokens)] for text in texts]
    empty = Expected([], [], proposals)
    return Expected(empty.steps_of(executor), empty.steps_of(executor, SAMPLED), proposals)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), **HEADS["a draft vocabulary, a window"])


@pytest.fixture(scope="module")
def expected(pair: tuple[Path, Path]) -> Expected:
    found = expected_of(make_executor(*pair, max_seq_len=MAX_SEQ_LEN))
    assert {row.num_accepted for step in found.greedy for row in step} == {0, 1, 2}
    return found


def assert_same(found: Steps, expected: Steps) -> None:
    assert integers(found) == integers(expected)
    torch.testing.assert_close(logprobs(found), logprobs(expected), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", HEADS)
def test_every_step_of_a_mixed_trace_equals_torchs(trt: ModuleType, tmp_path: Path, name: str) -> None:
    """Whatever others left in the pages, even if it is not finite."""
    pair = make_pair(tmp_path, **HEADS[name])
    ours = InterpretedExecutor(define_pair(trt, *pair, max_draft_len=K), num_pages=NUM_PAGES)
    for pages in ours.state.values():
        pages.fill_(torch.nan)
    expected = expected_of(make_executor(*pair, max_seq_len=MAX_SEQ_LEN))
    assert_same(expected.steps_of(ours), expected.greedy)
    assert_same(expected.steps_of(ours, SAMPLED), expected.sampled)


def test_one_network_serves_every_k_of_a_whole_chain(trt: ModuleType, pair: tuple[Path, Path]) -> None:
    ours = InterpretedExecutor(define_pair(trt, *pair), num_pages=NUM_PAGES)
    theirs = make_executor(*pair, max_seq_len=MAX_SEQ_LEN)
    assert ours.limits.max_draft_len == theirs.limits.max_draft_len == FULL
    options: dict[str, Any] = {"num_draft_tokens": (FULL, 1, 5), "num_new": 6}
    expected, found = (trace(executor, SAMPLED[:2], **options)[0] for executor in (theirs, ours))
    assert_same(found, expected)


def test_a_pass_is_one_node_over_the_pages_and_the_first_alone_writes(
    trt: ModuleType, pair: tuple[Path, Path], expected: Expected
) -> None:
    """That it does not is noticed."""
    defined = define_pair(trt, *pair, max_draft_len=K)
    nodes = [node for node in defined.nodes if node.name != "ScoreRows"]
    assert [node.name for node in nodes] == [
        *["AttendPages"] * 2,
        "SampleAndAccept",
        "PreviousRows",
        *["AttendDraft", "DraftTokens"] * K,
    ]
    passes = [node.fields for node in nodes if node.name == "AttendDraft"]
    assert [fields["shares_kv"] for fields in passes] == [0, 1, 1]
    assert {fields["first_key"] for fields in passes} == {1} and {fields["state"] for fields in passes} == {2}
    [rows] = [node for node in nodes if node.name == "PreviousRows"]
    assert rows.fields["state"] == 3
    passes[0]["shares_kv"] = 1
    ours = InterpretedExecutor(defined, num_pages=NUM_PAGES)
    assert integers(expected.steps_of(ours)) != integers(expected.greedy)


def test_an_engine_that_never_drafts_writes_features_and_context(trt: ModuleType, pair: tuple[Path, Path]) -> None:
    defined = define_pair(trt, *pair, max_draft_len=0)
    names = [node.name for node in defined.nodes if node.name != "ScoreRows"]
    assert names[-2:] == ["PreviousRows", "WriteDraftContext"]
    outputs = [defined.network.get_output(i) for i in range(defined.network.num_outputs)]
    assert (outputs[-1].name, tuple(outputs[-1].shape)) == (CONTEXT_WRITTEN, (1,))


def make_ours(trt: ModuleType, pair: tuple[Path, Path]) -> TensorRTExecutor:
    defined = define_pair(trt, *pair, max_draft_len=K)
    engine = FakeEngine(defined, EXECUTOR_LIMITS)
    sizes = EXECUTOR_LIMITS.model_dump(
        include={"max_batch_size", "max_seq_len", "max_num_tokens", "max_draft_len", "page_size"}
    )
    contexts = StepContexts(engine, USER_MANAGED, HOST_STREAM, captured=(), device=CPU)
    limits = ExecutorLimits(**sizes, num_pages=NUM_PAGES)
    return TensorRTExecutor(contexts, defined.spec, limits, stream=HOST_STREAM, capture=None, device=CPU)


def test_the_executor_gives_torchs_tokens_in_padded_steps_and_its_pages_pass_the_canary(
    trt: ModuleType, pair: tuple[Path, Path], expected: Expected
) -> None:
    """Steps of 3 requests are padded to 4."""
    ours = make_ours(trt, pair)
    assert check_pages(ours) == "5 tokens in each of 4 pools, at 2 places"
    assert_same(expected.steps_of(ours), expected.greedy)


def test_two_ranks_and_quantized_weights_make_the_drafts_of_the_cpu(trt: ModuleType, tmp_path: Path) -> None:
    """Features are whole on both ranks."""
    make_pair(tmp_path, draft_tokens=SOME[1:])  # an even number
    write_calibration_prompts(tmp_path)
    formats = {"target": "fp8", "drafter": "fp8", "calibration": {"prompts": "prompts.jsonl"}}
    for options in ({"tp_size": 2}, {"tp_size": 1, "quantization": formats}):
        engine = build(tmp_path, **options)
        with opened(engine) as executor:
            expected = expected_of(executor)
        ours: Any = interpreted_engine(trt, engine, num_pages=NUM_PAGES) if options["tp_size"] == 2 else None
        ours = ours or InterpretedExecutor(define_engine(trt, engine), num_pages=NUM_PAGES)
        assert_same(expected.steps_of(ours), expected.greedy)


def _begin_behind_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = drafter_ops.accepted_rows

    def of_all(layers: Layers, x: Any, acceptance: Any, inputs: Any) -> Any:
        ends = layers.drop_ends(inputs.token_offsets, 0, first=1, last=0)
        starts = layers.drop_ends(inputs.token_offsets, 0, first=0, last=1)
        everything = layers.binary("SUM", inputs.context_lens, layers.binary("SUB", ends, starts))
        return honest(layers, x, replace(acceptance, next_context_lens=everything), inputs)

    monkeypatch.setattr(drafter_ops, "accepted_rows", of_all)


def _draw_every_slot_in_the_noise_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = DrafterOps.draft_tokens

    def first(*given: Any, first_slot: int, **options: Any) -> Any:
        return honest(*given, **options)

    monkeypatch.setattr(DrafterOps, "draft_tokens", first)


@pytest.mark.parametrize(
    ("perturb", "kind"),
    [(_begin_behind_the_last_row, "greedy"), (_draw_every_slot_in_the_noise_of_the_first, "sampled")],
)
def test_a_perturbed_lowering_drafts_something_else_and_changes_no_token(
    trt: ModuleType,
    pair: tuple[Path, Path],
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
    perturb: Callable[[pytest.MonkeyPatch], None],
    kind: str,
) -> None:
    perturb(monkeypatch)
    ours = InterpretedExecutor(define_pair(trt, *pair, max_draft_len=K), num_pages=NUM_PAGES)
    found = expected.steps_of(ours, GREEDY if kind == "greedy" else SAMPLED)
    honest = getattr(expected, kind)
    assert integers(found) != integers(honest)
    if kind == "greedy":  # the blocks are given
        assert [[row.emitted_tokens for row in step] for step in found] == [
            [row.emitted_tokens for row in step] for step in honest
        ]


def compiled(pair: tuple[Path, Path], dtype: Any, *, num_drafts: int) -> Any:
    spec, tensors = open_spec(*pair, dtype=dtype)
    spec = replace(spec, max_draft_len=num_drafts)
    limits = LIMITS.model_copy(update={"max_draft_len": num_drafts})
    rope_tables = host_rope_tables(spec, max_seq_len=MAX_SEQ_LEN)
    return build_plan(spec, limits, host_tensors(tensors), rope_tables=rope_tables, options=CHECK, sink=NoBytes())


@pytest.mark.parametrize(("dtype", "num_drafts"), [("bfloat16", 2), pytest.param("float16", 1, marks=pytest.mark.slow)])
def test_the_step_compiles_with_both_profiles(trt: ModuleType, tmp_path: Path, dtype: str, num_drafts: int) -> None:
    pair = make_pair(tmp_path, num_layers=1, aux_hidden_state_layer_ids=(1,), draft_tokens=SOME)
    built = compiled(pair, dtype, num_drafts=num_drafts)
    assert built.plan_bytes > 100_000
    assert [profile.name for profile in built.profiles] == ["decode", "mixed"]


DEMO = Path(dflash_trt.__file__).parent / "demo"


@pytest.mark.slow
def test_the_demo_target_and_its_head_compile(trt: ModuleType) -> None:
    built = compiled((DEMO / "target", DEMO / "eagle3"), "bfloat16", num_drafts=K)
    assert built.plan_bytes > 1_000_000
