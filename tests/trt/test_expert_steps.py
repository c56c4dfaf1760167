"""Steps of targets with experts: the TensorRT network of an engine, interpreted, gives the torch backend's tokens."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dflash_trt.backends.tensorrt.ops import TrtOps
from dflash_trt.engine_dir import EngineDir
from dflash_trt.kernels.programs import EXPERTS
from plugins.aot.experts_of_engine import experts_of
from plugins.aot.variant import KernelVariant
from tests.checkpoint.expert_files import to_mxfp4
from tests.executor.rank_engines import build, opened
from tests.factories import make_target, make_zlab_drafter
from tests.traces import GREEDY, SAMPLED, Steps, integers, logprobs, trace
from tests.trt.networks import InterpretedExecutor, define_engine
from tests.trt.ranks import interpreted_engine

K = 3
NUM_PAGES = 128
# Family, and fields of its config and of the build.
PAIRS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "gpt_oss in MXFP4": ("gpt_oss", {}, {}),
    "qwen3_moe": ("qwen3_moe", {}, {}),
    "glm4_moe, groups of experts": ("glm4_moe", {"n_group": 2, "topk_group": 1}, {}),
    "minimax_m2": ("minimax_m2", {}, {}),
    "qwen3_moe in NVFP4": ("qwen3_moe", {}, {"quantization": "nvfp4_w4a16"}),
    "qwen3_moe in INT8": ("qwen3_moe", {}, {"quantization": "int8"}),
}


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A root with target and drafter, and the fields of their build."""
    root = tmp_path_factory.mktemp("pair")
    family, config, fields = PAIRS[request.param]
    sizes = {"vocab_size": 12, "num_hidden_layers": 2}
    target = make_target(root / "target", family=family, tokenizer=False, **sizes, **config)
    if family == "gpt_oss":
        to_mxfp4(target)
    draft = {"num_layers": 1, "target_layer_ids": (0, 1), "intermediate_size": 96}
    make_zlab_drafter(root / "drafter", target_dir=target, attention_bias=True, **draft)
    return root, fields


@pytest.fixture(scope="module")
def engine(pair: tuple[Path, dict[str, Any]]) -> EngineDir:
    root, fields = pair
    return build(root, tp_size=1, **fields)


@pytest.fixture(scope="module")
def expected(engine: EngineDir) -> dict[str, Steps]:
    with opened(engine) as executor:
        return {
            "greedy": trace(executor, GREEDY, num_draft_tokens=(K,))[0],
            "sampled": trace(executor, SAMPLED, num_draft_tokens=(K,))[0],
        }


def test_every_step_of_a_trace_equals_torchs(trt: ModuleType, engine: EngineDir, expected: dict[str, Steps]) -> None:
    ours = InterpretedExecutor(define_engine(trt, engine), num_pages=NUM_PAGES)
    for name, samplings in (("greedy", GREEDY), ("sampled", SAMPLED)):
        found, _ = trace(ours, samplings, num_draft_tokens=(K,))
        assert integers(found) == integers(expected[name])
        torch.testing.assert_close(logprobs(found), logprobs(expected[name]), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("pair", "ep_size"),
    [
        ("gpt_oss in MXFP4", 1),
        ("gpt_oss in MXFP4", 2),
        ("qwen3_moe in NVFP4", 1),
        ("qwen3_moe in NVFP4", 2),
        ("glm4_moe, groups of experts", 2),
        ("minimax_m2", 2),  # whose norms are over the heads of both
    ],
    indirect=["pair"],
)
def test_two_ranks_that_divide_experts_give_the_tokens_of_one(
    trt: ModuleType, pair: tuple[Path, dict[str, Any]], expected: dict[str, Steps], ep_size: int
) -> None:
    root, fields = pair
    two = build(root, tp_size=2, ep_size=ep_size, overwrite=True, **fields)
    found, _ = trace(interpreted_engine(trt, two, num_pages=NUM_PAGES), GREEDY, num_draft_tokens=(K,))
    assert integers(found) == integers(expected["greedy"])
    torch.testing.assert_close(logprobs(found), logprobs(expected["greedy"]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("pair", ["qwen3_moe in INT8"], indirect=True)
@pytest.mark.parametrize("ep_size", [1, 2])
def test_two_ranks_in_int8_give_the_tokens_of_torchs_two(
    trt: ModuleType, pair: tuple[Path, dict[str, Any]], ep_size: int
) -> None:
    """One rank's may be others: ranks that divide the inputs of a layer scale their parts of a token."""
    root, fields = pair
    two = build(root, tp_size=2, ep_size=ep_size, overwrite=True, **fields)
    with opened(two) as executor:
        expected, _ = trace(executor, GREEDY, num_draft_tokens=(K,))
    found, _ = trace(interpreted_engine(trt, two, num_pages=NUM_PAGES), GREEDY, num_draft_tokens=(K,))
    assert integers(found) == integers(expected)
    torch.testing.assert_close(logprobs(found), logprobs(expected), rtol=0, atol=1e-4)


@pytest.mark.parametrize("pair", ["minimax_m2"], indirect=True)
def test_norms_that_each_rank_takes_alone_are_noticed(
    trt: ModuleType, pair: tuple[Path, dict[str, Any]], expected: dict[str, Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrtOps, "joint_rms_norm", TrtOps.rms_norm)
    two = build(pair[0], tp_size=2, overwrite=True, **pair[1])
    found, _ = trace(interpreted_engine(trt, two, num_pages=NUM_PAGES), GREEDY, num_draft_tokens=(K,), num_new=1)
    assert (logprobs(found[:1]) - logprobs(expected["greedy"][:1])).abs().max() > 1e-3


def test_nodes_that_route_otherwise_are_noticed(trt: ModuleType, engine: EngineDir, expected: dict[str, Steps]) -> None:
    defined = define_engine(trt, engine)
    experts = [node for node in defined.nodes if node.name == "Experts"]
    assert len(experts) == len(engine.manifest.target.moes)
    for node in experts:
        node.fields |= {"normalizes": 0, "routing": 0}
    other, _ = trace(InterpretedExecutor(defined, num_pages=NUM_PAGES), GREEDY, num_draft_tokens=(K,), num_new=1)
    assert (logprobs(other[:1]) - logprobs(expected["greedy"][:1])).abs().max() > 1e-3


@pytest.mark.parametrize("pair", ["gpt_oss in MXFP4", "qwen3_moe in NVFP4", "qwen3_moe in INT8"], indirect=True)
@pytest.mark.parametrize("ep_size", [1, 2])
def test_the_library_of_an_engine_has_the_kernels_of_its_nodes(
    trt: ModuleType, pair: tuple[Path, dict[str, Any]], ep_size: int
) -> None:
    """Those of every rank."""
    root, fields = pair
    two = build(root, tp_size=2, ep_size=ep_size, overwrite=True, **fields)
    wanted = {"gate_up_form": "FORM", "gate_up_has_row_scale": "HAS_ROW_SCALE", "gate_up_has_bias": "HAS_BIAS"}
    experts = experts_of(two.manifest.pretrained_config, max_rows=8)
    variants = [variant for kernels in experts for variant in kernels.variants("float32")]
    of_gate_up = [item for item in variants if item.name.startswith("expert_gate_up")]
    of_down = [item for item in variants if item.name.startswith("expert_down")]
    for rank in range(2):
        nodes = define_engine(trt, two, rank=rank).nodes
        node = next(node for node in nodes if node.name == "Experts")
        shapes = {name: tuple(tensor.shape) for name, tensor in zip(EXPERTS.input_names, node.given, strict=True)}
        ffn = shapes["gate_up_codes"][1] // 2
        sizes = {"IN": shapes["x"][1], "FFN": ffn, "num_chosen": node.fields["num_chosen"]}
        assert any(
            _has(item, sizes | {name: node.fields[field] for field, name in wanted.items()}) for item in of_gate_up
        )
        biased = {"FFN": ffn, "HAS_BIAS": node.fields["down_has_bias"], "FORM": node.fields["down_form"]}
        assert any(_has(item, biased) for item in of_down)
        assert not any(_has(item, {"FFN": ffn + 1}) for item in of_gate_up)


def _has(variant: KernelVariant, constants: dict[str, float]) -> bool:
    return constants.items() <= {name: int(value) for name, value in variant.constexprs.items()}.items()
