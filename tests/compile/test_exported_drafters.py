"""Drafters that TensorRT-LLM would load without parts of them: every field is exported, or refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.backends.tensorrt_llm.constraints import EXPORTED, EXPORTED_OF_EAGLE3, drafter_problems
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import BuildError
from dflash_trt.core.frozen import Frozen
from dflash_trt.core.model.decoder import LayerSpec
from dflash_trt.core.model.dflash2 import BlockConv, CandidateSelector
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.model.dspark import DSparkHeads
from dflash_trt.core.model.eagle3 import EagleChain
from dflash_trt.core.model.feed_forward import Dense
from dflash_trt.core.model.gqa import AttentionMask, Gqa, QueryTemperature
from dflash_trt.core.model.mtp import MtpHead
from tests.dflash2_files import make_dflash2_drafter
from tests.factories import make_eagle3_head, make_target, make_zlab_drafter


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("checkpoints") / "target", dtype=torch.bfloat16)


def test_a_dflash2_drafter_is_refused_with_the_parts_that_would_be_ignored(target: Path, tmp_path: Path) -> None:
    drafter = make_dflash2_drafter(tmp_path / "drafter", target_dir=target, dtype=torch.bfloat16, window=None)
    config = BuildConfig(target=str(target), drafter=str(drafter), backend="tensorrt_llm", max_seq_len=128)
    with pytest.raises(BuildError) as raised:
        build_engine(
            config,
            tmp_path / "engine",
            base_dir=tmp_path,
            overwrite=False,
            command=("build",),
            progress=lambda report: None,
        )
    for field in ("algorithm: expected dflash", "conv: expected None", "selector: expected None"):
        assert f"drafter {field}, for TensorRT-LLM would ignore it" in str(raised.value)
    assert not (tmp_path / "engine").exists()


# A value of each field that TensorRT-LLM would ignore. A new field of a drafter belongs here, or to `EXPORTED` with
# what carries it to TensorRT-LLM.
REFUSED_FIELDS: dict[type[Frozen], dict[str, Any]] = {
    DraftSpec: {
        "algorithm": "dflash2",
        "conv": BlockConv(kernel_size=2, group_size=8),
        "selector": CandidateSelector(rank=4, top_k=4),
        "heads": DSparkHeads(rank=4),
        "chain": EagleChain(),
        "mtp": MtpHead(),
    },
    LayerSpec: {"has_post_norms": True, "has_output_scale": True, "per_layer_size": 8},
    Gqa: {
        "rotary_dim": 4,
        "scale": 0.5,
        "softcap": 30.0,
        "temperature": QueryTemperature(scale=0.1, interval=8),
        "has_joint_qk_norm": True,
        "has_sinks": True,
        "has_output_gate": True,
        "has_v_norm": True,
        "has_v_proj": False,
        "shares_kv_with": 0,
    },
    AttentionMask: {"chunk": 8, "first_key": 1},
    Dense: {"activation": "gelu_tanh", "has_bias": True},
}


def test_every_field_of_a_drafter_is_exported_or_refused_by_name(target: Path, tmp_path: Path) -> None:
    draft = open_pair(target, make_zlab_drafter(tmp_path, target_dir=target, dtype=torch.bfloat16)).draft
    assert draft is not None
    assert list(drafter_problems(draft)) == []
    assert set(EXPORTED) == set(REFUSED_FIELDS)
    for kind, refused in REFUSED_FIELDS.items():
        assert set(refused) | EXPORTED[kind] == set(kind.model_fields) and not set(refused) & EXPORTED[kind]
        for name, value in refused.items():
            problems = list(drafter_problems(changed(draft, kind, {name: value})))
            assert any(f" {name}: expected" in line and "would ignore it" in line for line in problems), (
                name,
                problems,
            )
    odd = changed(draft, LayerSpec, {"feed_forward": BlockConv(kernel_size=2, group_size=8)})
    assert "drafter layer 1 feed_forward: expected one of AttentionMask, Dense" in "".join(drafter_problems(odd))


# The same of an EAGLE-3 head.
REFUSED_OF_EAGLE3: dict[type[Frozen], dict[str, Any]] = {
    DraftSpec: {
        "mask_token_id": 5,
        "input_embedding_scale": 2.0,
        "conv": BlockConv(kernel_size=2, group_size=8),
        "selector": CandidateSelector(rank=4, top_k=4),
        "heads": DSparkHeads(rank=4),
        "mtp": MtpHead(),
    },
    LayerSpec: REFUSED_FIELDS[LayerSpec],
    Gqa: REFUSED_FIELDS[Gqa] | {"has_qk_norm": True},
    AttentionMask: {"chunk": 8, "window": 8, "is_causal": False, "is_window_anchored": True},
    EagleChain: {"has_normed_residual": True},
    Dense: REFUSED_FIELDS[Dense],
}


@pytest.fixture
def head(target: Path, tmp_path: Path) -> DraftSpec:
    draft = open_pair(target, make_eagle3_head(tmp_path / "head", target_dir=target)).draft
    assert draft is not None
    return draft


def test_every_field_of_an_eagle3_head_is_exported_or_refused_by_name(head: DraftSpec) -> None:
    assert list(drafter_problems(head)) == []
    assert set(EXPORTED_OF_EAGLE3) == set(REFUSED_OF_EAGLE3)
    for kind, refused in REFUSED_OF_EAGLE3.items():
        exported = EXPORTED_OF_EAGLE3[kind]
        assert set(refused) | exported == set(kind.model_fields) and not set(refused) & exported
        for name, value in refused.items():
            problems = list(drafter_problems(changed(head, kind, {name: value})))
            assert any(f" {name}: expected" in line and "would ignore it" in line for line in problems), (
                name,
                problems,
            )


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"target_layer_ids": (1,)}, "drafter target_layer_ids: expected several layers"),
        ({"target_layer_ids": (1, 1, 2)}, "drafter target_layer_ids: expected layers that are named once"),
        ({"target_hidden_size": 32, "target_layer_ids": (0, 1)}, "drafter target_layer_ids: expected several layers"),
        (
            {"target_hidden_size": 32},
            "drafter embedding: expected its own, of hidden_size 64, found the target's, of 32",
        ),
        ({"source_format": "z-lab"}, "drafter format: expected SafeAILab's or Speculators', found z-lab"),
    ],
)
def test_an_eagle3_head_that_tensorrt_llm_would_read_otherwise_is_refused(
    head: DraftSpec, update: dict[str, Any], message: str
) -> None:
    found = list(drafter_problems(head.model_copy(update=update)))
    assert any(line.startswith(message) for line in found), found


def changed(spec: Any, kind: type[Frozen], update: dict[str, Any]) -> Any:
    """`spec` with other fields, unchecked, in the last of its parts of this kind."""
    if isinstance(spec, kind):
        return spec.model_copy(update=update)
    if kind is EagleChain:
        return spec.model_copy(update={"chain": spec.chain.model_copy(update=update)})
    parts = {DraftSpec: "layers", LayerSpec: "feed_forward" if kind is Dense else "mixer", Gqa: "mask"}
    name = parts[type(spec)]
    part = getattr(spec, name)
    inner = (*part[:-1], changed(part[-1], kind, update)) if name == "layers" else changed(part, kind, update)
    return spec.model_copy(update={name: inner})
