"""Gemma 4 in TensorRT: the network of an engine, interpreted, gives the torch backend's tokens."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from dflash_trt.cli.main import cli
from dflash_trt.engine_dir import EngineDir
from plugins.aot.engine_kernels import EngineKernels
from tests.executor.rank_engines import build, opened
from tests.factories import make_zlab_drafter
from tests.gemma_targets import EVERYTHING, make_gemma
from tests.traces import GREEDY, SAMPLED, Steps, integers, logprobs, trace
from tests.trt.networks import InterpretedExecutor, define_engine
from tests.trt.ranks import interpreted_engine

K, NUM_PAGES, KV_CACHE_BYTES = 3, 128, 1 << 24
TARGETS: dict[str, dict[str, Any]] = {
    "dense": {"family": "gemma4_unified_text", "global_head_dim": 512},
    "everything": {"family": "gemma4_text", **EVERYTHING},
}
EXPECTED_NODES = {"dense": (4, 0, 0), "everything": (4, 2, 4)}  # attention, of which sharing K/V, and experts


@pytest.fixture(scope="module", params=TARGETS)
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    target = make_gemma(root / "target", **TARGETS[request.param])
    sizes = {"num_layers": 1, "target_layer_ids": (0, 2), "head_dim": 16}
    make_zlab_drafter(root / "drafter", target_dir=target, final_logit_softcapping=2.0, **sizes)
    return root


@pytest.fixture(scope="module")
def engine(root: Path) -> EngineDir:
    return build(root, tp_size=1)


@pytest.fixture(scope="module")
def expected(engine: EngineDir) -> Steps:
    with opened(engine, kv_cache_bytes=KV_CACHE_BYTES) as executor:
        return trace(executor, GREEDY, num_draft_tokens=(K,))[0]


def assert_same(found: Steps, expected: Steps) -> None:
    assert integers(found) == integers(expected)
    torch.testing.assert_close(logprobs(found), logprobs(expected), rtol=0, atol=1e-4)


def test_every_step_of_a_trace_equals_torchs(trt: ModuleType, engine: EngineDir, expected: Steps) -> None:
    ours = InterpretedExecutor(define_engine(trt, engine), num_pages=NUM_PAGES)
    assert_same(trace(ours, GREEDY, num_draft_tokens=(K,))[0], expected)
    with opened(engine, kv_cache_bytes=KV_CACHE_BYTES) as executor:
        sampled = trace(executor, SAMPLED, num_draft_tokens=(K, 1), num_new=4)[0]
    assert_same(trace(ours, SAMPLED, num_draft_tokens=(K, 1), num_new=4)[0], sampled)


def test_nodes_with_other_fields_are_noticed(trt: ModuleType, engine: EngineDir, expected: Steps, root: Path) -> None:
    defined = define_engine(trt, engine)
    attention = [node for node in defined.nodes if node.name == "AttendPages"]
    sharing = [node for node in attention if node.fields["shares_kv"]]
    experts = [node for node in defined.nodes if node.name == "Experts"]
    counts = len(attention), len(sharing), len(experts)
    assert counts == next(counts for name, counts in EXPECTED_NODES.items() if root.name.startswith(name))
    assert [node.fields["state"] for node in attention] == ([0, 1, 2, 3] if not sharing else [0, 1, 0, 1])
    ours = InterpretedExecutor(defined, num_pages=NUM_PAGES)
    changes = [(attention, "score_scale", 0.5), (experts, "activation", 0), (sharing, "window", 1)]
    for changed, field, value in changes:
        before = [node.fields[field] for node in changed]
        for node in changed:
            node.fields[field] = value
        if changed:
            other, _ = trace(ours, GREEDY, num_draft_tokens=(K,), num_new=1)
            assert (logprobs(other[:1]) - logprobs(expected[:1])).abs().max() > 5e-4, field
        for node, old in zip(changed, before, strict=True):
            node.fields[field] = old


def test_two_ranks_give_the_tokens_of_one(trt: ModuleType, root: Path, expected: Steps) -> None:
    two = build(root, tp_size=2)
    assert_same(trace(interpreted_engine(trt, two, num_pages=NUM_PAGES), GREEDY, num_draft_tokens=(K,))[0], expected)


def test_the_library_of_an_engine_has_attention_for_both_geometries(engine: EngineDir) -> None:
    manifest = engine.manifest
    kernels = EngineKernels.of(manifest.pretrained_config, manifest.build_config)
    states = manifest.pretrained_config.states()
    wanted = {getattr(state, "source", state).head_dim for state in states.target}
    layers = [layer for layer in kernels.layers if not layer.is_drafter]
    assert {layer.head_dim for layer in layers} == wanted and len(wanted) == 2


@pytest.mark.parametrize("root", ["dense", pytest.param("everything", marks=pytest.mark.slow)], indirect=True)
def test_its_network_builds_through_tensorrt_rtx(trt: ModuleType, root: Path) -> None:
    words = ["--target", root / "target", "--drafter", root / "drafter", "--max-batch-size", 4, "--page-size", 4]
    words += ["--max-num-tokens", 64, "--max-seq-len", 64]
    result = CliRunner().invoke(cli, [str(word) for word in ("build", "--check", *words)])
    assert result.exit_code == 0, result.output
