"""Llama 4 in TensorRT: the network of an engine, interpreted, gives the torch backend's tokens."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner

from dflash_trt.backends.tensorrt.ops import TrtOps
from dflash_trt.cli.main import cli
from dflash_trt.engine_dir import EngineDir
from tests.executor.rank_engines import build, opened
from tests.factories import make_target, make_zlab_drafter
from tests.traces import GREEDY, SAMPLED, Steps, integers, logprobs, trace
from tests.trt.networks import InterpretedExecutor, define_engine
from tests.trt.ranks import interpreted_engine

K, NUM_PAGES = 3, 128


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chunks in one layer, a temperature in the other, experts in both; borders among the first tokens."""
    root = tmp_path_factory.mktemp("pair")
    fields = {"no_rope_layers": [1, 0], "attention_chunk_size": 3, "floor_scale": 2, "num_experts_per_tok": 2}
    sizes = {"vocab_size": 12, "num_hidden_layers": 2, "interleave_moe_layer_step": 1}
    target = make_target(root / "target", family="llama4_text", tokenizer=False, **sizes, **fields)
    make_zlab_drafter(root / "drafter", target_dir=target, num_layers=1, target_layer_ids=(0, 1), intermediate_size=96)
    return root


@pytest.fixture(scope="module")
def engine(root: Path) -> EngineDir:
    return build(root, tp_size=1)


@pytest.fixture(scope="module")
def expected(engine: EngineDir) -> dict[str, Steps]:
    with opened(engine, kv_cache_bytes=1 << 24) as executor:
        return {
            "greedy": trace(executor, GREEDY, num_draft_tokens=(K,))[0],
            "sampled": trace(executor, SAMPLED, num_draft_tokens=(K, 1), num_new=4)[0],
        }


def assert_same(found: Steps, expected: Steps) -> None:
    assert integers(found) == integers(expected)
    torch.testing.assert_close(logprobs(found), logprobs(expected), rtol=0, atol=1e-4)


def test_every_step_of_a_trace_equals_torchs(trt: ModuleType, engine: EngineDir, expected: dict[str, Steps]) -> None:
    ours = InterpretedExecutor(define_engine(trt, engine), num_pages=NUM_PAGES)
    assert_same(trace(ours, GREEDY, num_draft_tokens=(K,))[0], expected["greedy"])
    assert_same(trace(ours, SAMPLED, num_draft_tokens=(K, 1), num_new=4)[0], expected["sampled"])


def test_queries_without_a_temperature_are_noticed(
    trt: ModuleType, engine: EngineDir, expected: dict[str, Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrtOps, "tempered", lambda self, q, rows, temperature: q)
    ours = InterpretedExecutor(define_engine(trt, engine), num_pages=NUM_PAGES)
    found, _ = trace(ours, GREEDY, num_draft_tokens=(K,), num_new=1)
    assert (logprobs(found[:1]) - logprobs(expected["greedy"][:1])).abs().max() > 1e-3


def test_nodes_with_other_fields_are_noticed(trt: ModuleType, engine: EngineDir, expected: dict[str, Steps]) -> None:
    defined = define_engine(trt, engine)
    attention, experts = ([node for node in defined.nodes if node.name == name] for name in ("AttendPages", "Experts"))
    assert [node.fields["chunk"] for node in attention] == [3, 0]
    assert [node.fields["scales_inputs"] for node in experts] == [1, 1]
    ours = InterpretedExecutor(defined, num_pages=NUM_PAGES)
    for node, field in ((attention[0], "chunk"), (experts[1], "scales_inputs")):
        before, node.fields[field] = node.fields[field], 0
        other, _ = trace(ours, GREEDY, num_draft_tokens=(K,), num_new=1)
        assert (logprobs(other[:1]) - logprobs(expected["greedy"][:1])).abs().max() > 1e-3, field
        node.fields[field] = before


def test_two_ranks_give_the_tokens_of_one(trt: ModuleType, root: Path, expected: dict[str, Steps]) -> None:
    two = build(root, tp_size=2, ep_size=2, overwrite=True)
    found = trace(interpreted_engine(trt, two, num_pages=NUM_PAGES), GREEDY, num_draft_tokens=(K,))[0]
    assert_same(found, expected["greedy"])


def test_its_network_builds_through_tensorrt_rtx(trt: ModuleType, root: Path) -> None:
    words = ["--target", root / "target", "--drafter", root / "drafter", "--max-batch-size", 4, "--page-size", 4]
    words += ["--max-num-tokens", 64, "--max-seq-len", 64]
    result = CliRunner().invoke(cli, [str(word) for word in ("build", "--check", *words)])
    assert result.exit_code == 0, result.output
