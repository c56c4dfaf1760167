"""Steps with a DSpark drafter: the TensorRT network, interpreted, makes the drafts and confidences of torch."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dflash_trt.backends.tensorrt import drafter_ops
from dflash_trt.backends.tensorrt.builder import build_plan
from dflash_trt.backends.tensorrt.host_weights import host_rope_tables
from dflash_trt.backends.tensorrt.plan_stream import NoBytes
from dflash_trt.core.dtype import FloatDType
from tests.dspark_files import Listener, save_dspark_drafter
from tests.engines import make_executor
from tests.executor.rank_engines import build, opened, write_calibration_prompts
from tests.factories import make_target
from tests.traces import SAMPLED, trace
from tests.trt.networks import MAX_SEQ_LEN, InterpretedExecutor, define_engine, define_pair, host_tensors, open_spec
from tests.trt.ranks import interpreted_engine
from tests.trt.test_builder import CHECK, LIMITS
from tests.trt.test_dflash2_steps import K, assert_same, integers, steps_of

SOME = (0, 1, 2, 4, 5, 7, 8, 10, 11)
VARIANTS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated, reduced vocabulary": {"markov_head_type": "gated", "draft_tokens": SOME},
    "rnn, no confidence": {
        "markov_head_type": "rnn",
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    },
    "rnn, the anchor's slot makes no draft": {
        "markov_head_type": "rnn",
        "sample_from_anchor": False,
        "block_size": K + 1,
    },
}


def make_pair(root: Path, options: dict[str, Any], **target_fields: Any) -> tuple[Path, Path]:
    target = make_target(root / "target", vocab_size=12, tokenizer=False, **target_fields)
    return target, save_dspark_drafter(root / "drafter", target_dir=target, **{"block_size": K} | options)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_step_of_a_trace_equals_torchs(trt: ModuleType, tmp_path: Path, options: dict[str, Any]) -> None:
    target, drafter = make_pair(tmp_path, options)
    ours = InterpretedExecutor(define_pair(trt, target, drafter))
    theirs = make_executor(target, drafter, max_seq_len=MAX_SEQ_LEN)
    ks = (K, 1, 0, 3)  # one network serves them all
    assert_same(steps_of(ours, ks=ks), steps_of(theirs, ks=ks))


def test_confidences_are_those_of_torch(trt: ModuleType, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, {"markov_head_type": "gated"})
    ours = Listener(InterpretedExecutor(define_pair(trt, *pair)))
    theirs = Listener(make_executor(*pair, max_seq_len=MAX_SEQ_LEN))
    for executor in (ours, theirs):
        trace(executor, SAMPLED, num_draft_tokens=(K, 2, 0, 1))
    assert [x is None for x in theirs.confidences[:4]] == [False, False, True, False]
    for found, expected in zip(ours.confidences, theirs.confidences, strict=True):
        assert (found is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(expected), rtol=0, atol=1e-5)


def test_two_ranks_and_quantized_weights_make_the_drafts_of_the_cpu(trt: ModuleType, tmp_path: Path) -> None:
    make_pair(tmp_path, {"markov_head_type": "rnn"})
    write_calibration_prompts(tmp_path)
    formats = {"target": "none", "drafter": "fp8", "calibration": {"prompts": "prompts.jsonl"}}
    for options in ({"tp_size": 2}, {"tp_size": 1, "quantization": formats}):
        engine = build(tmp_path, **options)
        with opened(engine) as executor:
            expected = steps_of(executor)
        ours: Any = interpreted_engine(trt, engine, num_pages=128) if options["tp_size"] == 2 else None
        assert_same(steps_of(ours or InterpretedExecutor(define_engine(trt, engine))), expected)
    linears = engine.manifest.pretrained_config.quantization.linears
    assert {"draft.markov.bias", "draft.markov.cell"} <= linears.keys() and "draft.confidence" not in linears


def test_a_walk_over_the_first_slot_alone_is_noticed(
    trt: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = make_pair(tmp_path, {})
    expected = steps_of(make_executor(target, drafter, max_seq_len=MAX_SEQ_LEN))
    monkeypatch.setattr(drafter_ops, "slot_index", lambda layers, slot, num_slots: layers.ints([0], (1,)))
    found = steps_of(InterpretedExecutor(define_pair(trt, target, drafter)))
    assert integers(found["greedy"]) != integers(expected["greedy"])


@pytest.mark.slow
def test_the_step_compiles_with_both_profiles(trt: ModuleType, tmp_path: Path) -> None:
    options = {"markov_head_type": "rnn", "aux_hidden_state_layer_ids": (1,)}
    spec, tensors = open_spec(*make_pair(tmp_path, options, num_hidden_layers=1), dtype="bfloat16")
    limits = LIMITS.model_copy(update={"max_draft_len": K})
    rope_tables = host_rope_tables(spec, max_seq_len=MAX_SEQ_LEN)
    built = build_plan(spec, limits, host_tensors(tensors), rope_tables=rope_tables, options=CHECK, sink=NoBytes())
    assert built.plan_bytes > 100_000
    assert [profile.name for profile in built.profiles] == ["decode", "mixed"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_network_uses_only_what_tensorrt_has(trt: ModuleType, tmp_path: Path, dtype: FloatDType) -> None:
    target, drafter = make_pair(tmp_path, {"markov_head_type": "rnn", "sample_from_anchor": False, "block_size": K + 1})
    assert define_pair(trt, target, drafter, dtype=dtype).nodes
