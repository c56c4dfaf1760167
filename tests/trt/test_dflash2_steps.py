"""Steps with a DFlash2 drafter: the TensorRT network, interpreted, makes the drafts of the torch backend."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dflash_trt.backends.tensorrt import dflash2_ops
from dflash_trt.backends.tensorrt.builder import build_plan
from dflash_trt.backends.tensorrt.host_weights import host_rope_tables
from dflash_trt.backends.tensorrt.layers import Layers
from dflash_trt.backends.tensorrt.plan_stream import NoBytes
from dflash_trt.core.dtype import FloatDType
from dflash_trt.core.step_plan import StepExecutor
from tests.dflash2_files import make_dflash2_drafter
from tests.engines import make_executor
from tests.executor.rank_engines import build, opened
from tests.factories import make_target
from tests.traces import GREEDY, SAMPLED, Steps, integers, logprobs, trace
from tests.trt.networks import MAX_SEQ_LEN, InterpretedExecutor, define_pair, host_tensors, open_spec
from tests.trt.ranks import interpreted_engine
from tests.trt.test_builder import CHECK, LIMITS

K = 4
VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "three taps, causal, scaled and capped logits": {
        "kernel_size": 3,
        "is_causal": True,
        "keys": {"output_multiplier": 0.4, "final_logit_softcapping": 3.0},
    },
    "one tap, no window, all tokens": {"kernel_size": 1, "window": None, "top_k": 12, "group_size": 64},
}


def make_pair(root: Path, options: dict[str, Any], **target_fields: Any) -> tuple[Path, Path]:
    target = make_target(root / "target", vocab_size=12, tokenizer=False, **target_fields)
    return target, make_dflash2_drafter(root / "drafter", target_dir=target, block_size=K + 1, **options)


def steps_of(executor: StepExecutor, *, ks: tuple[int, ...] = (K,)) -> dict[str, Steps]:
    samplings = {"greedy": GREEDY, "sampled": SAMPLED}
    return {name: trace(executor, given, num_draft_tokens=ks)[0] for name, given in samplings.items()}


def assert_same(found: dict[str, Steps], expected: dict[str, Steps]) -> None:
    for name, steps in expected.items():
        assert integers(found[name]) == integers(steps)
        torch.testing.assert_close(logprobs(found[name]), logprobs(steps), rtol=0, atol=1e-4)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_step_of_a_trace_equals_torchs(trt: ModuleType, tmp_path: Path, options: dict[str, Any]) -> None:
    target, drafter = make_pair(tmp_path, options)
    defined = define_pair(trt, target, drafter)
    assert "DraftTokens" not in {node.name for node in defined.nodes}
    ours = InterpretedExecutor(defined)
    theirs = make_executor(target, drafter, max_seq_len=MAX_SEQ_LEN)
    ks = (K, 1, 0, 3)  # one network serves them all
    assert_same(steps_of(ours, ks=ks), steps_of(theirs, ks=ks))


def test_two_ranks_make_the_drafts_of_one(trt: ModuleType, tmp_path: Path) -> None:
    make_pair(tmp_path, {})
    one, two = (build(tmp_path, tp_size=tp_size) for tp_size in (1, 2))
    with opened(one) as executor:
        expected = steps_of(executor)
    assert_same(steps_of(interpreted_engine(trt, two, num_pages=128)), expected)


def _negate_the_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = dflash2_ops.block_conv

    def negated(layers: Layers, x: Any, filters: Any, base: Any, **sizes: Any) -> Any:
        return honest(layers, x, layers.unary("NEG", filters), base, **sizes)

    monkeypatch.setattr("dflash_trt.backends.tensorrt.drafter_ops.block_conv", negated)


def _take_the_first_slot_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dflash2_ops, "slot_index", lambda layers, slot, num_slots: layers.ints([0], (1,)))


def _draw_in_noise_of_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = dflash2_ops.noise_of_row_tokens

    def of_others(layers: Layers, seed: Any, position: Any, tokens: Any, stream: Any) -> Any:
        return honest(layers, seed, position, layers.binary("SUM", tokens, 1), stream)

    monkeypatch.setattr(dflash2_ops, "noise_of_row_tokens", of_others)


@pytest.mark.parametrize(
    ("perturb", "kind"),
    [
        (_negate_the_filters, "greedy"),
        (_take_the_first_slot_everywhere, "greedy"),
        (_draw_in_noise_of_other_tokens, "sampled"),
    ],
)
def test_a_perturbed_lowering_is_noticed(
    trt: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, perturb: Any, kind: str
) -> None:
    target, drafter = make_pair(tmp_path, {})
    expected = steps_of(make_executor(target, drafter, max_seq_len=MAX_SEQ_LEN))
    perturb(monkeypatch)
    found = steps_of(InterpretedExecutor(define_pair(trt, target, drafter)))
    assert integers(found[kind]) != integers(expected[kind])


@pytest.mark.slow
def test_the_step_compiles_with_both_profiles(trt: ModuleType, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, {"target_layer_ids": (0,)}, num_hidden_layers=1)
    spec, tensors = open_spec(*pair, dtype="bfloat16")
    limits = LIMITS.model_copy(update={"max_draft_len": K})
    rope_tables = host_rope_tables(spec, max_seq_len=MAX_SEQ_LEN)
    built = build_plan(spec, limits, host_tensors(tensors), rope_tables=rope_tables, options=CHECK, sink=NoBytes())
    assert built.plan_bytes > 100_000
    assert [profile.name for profile in built.profiles] == ["decode", "mixed"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_network_uses_only_what_tensorrt_has(trt: ModuleType, tmp_path: Path, dtype: FloatDType) -> None:
    target, drafter = make_pair(tmp_path, {"kernel_size": 4})
    assert define_pair(trt, target, drafter, dtype=dtype).nodes
