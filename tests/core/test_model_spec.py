"""No spec can be made that would compute something without a word, whoever makes it."""

from typing import Any

import pytest
from pydantic import ValidationError

from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec, check_pair
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.model.gqa import AttentionMask
from dflash_trt.core.model.rope import RopeSpec
from tests.specs import layered

DECODER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope": {"theta": 1e4},
    "masks": ({}, {}),
    "has_qk_norm": True,
    "max_position_embeddings": 512,
}
TARGET = DECODER | {"family": "qwen3", "vocab_size": 272, "is_embedding_tied": False}
DRAFT = DECODER | {
    "source_format": "z-lab",
    "target_layer_ids": (0, 1),
    "target_hidden_size": 64,
    "target_vocab_size": 272,
    "draft_block_size": 4,
    "mask_token_id": 1,
}
MOE = {"num_experts": 8, "num_experts_per_token": 2, "intermediate_size": 32, "routing": "softmax_top_k"}
YARN = {"theta": 1e4, "scaling": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -2, 2**31])
def test_a_size_is_a_positive_int32(name: str, value: int) -> None:
    _assert_refused(TargetSpec, TARGET | {name: value}, name)


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"rms_norm_eps": value}, "rms_norm_eps") for value in (0.0, -1e-6, 1e-13, 1e30, NAN, INFINITY, -INFINITY)]
    + [({"rope": {"theta": value}}, "rope.theta") for value in (0.0, 1.0, -1e4, 1e16, NAN, INFINITY)]
    + [
        ({"rope": YARN | {name: value}}, f"rope.{name}")
        for name in ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
        for value in (0.0, -1.0, 1e7, NAN)
    ]
    + [
        ({"rope": YARN | {"original_max_position_embeddings": None}}, "rope"),
        ({"rope": YARN | {"beta_slow": 32.5}}, "rope"),
        ({"rope": {"theta": 1e4, "scaling": "llama3", "original_max_position_embeddings": 8}}, "rope"),
        ({"masks": ()}, "layers"),
        ({"masks": ({},) * 1001}, "layers"),
        ({"masks": ({"window": -1}, {})}, "mask.window"),
        ({"masks": ({}, {"window": 0})}, "mask.window"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"eos_token_ids": (5, 272)}, "eos_token_ids"),
        ({"eos_token_ids": (-1,)}, "eos_token_ids.0"),
        ({"bos_token_id": 272}, "bos_token_id"),
        ({"moe": MOE | {"num_experts_per_token": 9}}, "moe.num_experts_per_token"),
        ({"moe": MOE | {"activation": "clamped_swiglu"}}, "moe"),
        ({"moe": MOE | {"activation": "clamped_swiglu", "limit": -7.0, "alpha": 1.7}}, "moe.limit"),
    ],
)
def test_a_target_that_cannot_be_is_refused(changes: dict[str, Any], field: str) -> None:
    _assert_refused(TargetSpec, TARGET | changes, field)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"draft_block_size": 1}, "draft_block_size"),
        ({"draft_block_size": 2**31 - 1}, "draft_block_size"),
        ({"mask_token_id": 272}, "mask_token_id"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"target_layer_ids": ()}, "target_layer_ids"),
        ({"target_layer_ids": (0, -1)}, "target_layer_ids.1"),
        ({"draft_vocab_size": 273}, "draft_vocab_size"),
        ({"input_embedding_scale": NAN}, "input_embedding_scale"),
    ],
)
def test_a_drafter_that_cannot_be_is_refused(changes: dict[str, Any], field: str) -> None:
    _assert_refused(DraftSpec, DRAFT | changes, field)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_layer_ids": (0, 2)}, "target_layer_ids below the target's 2 layers"),
        ({"target_hidden_size": 32}, "target_hidden_size as the target has it, 64"),
        ({"target_vocab_size": 300}, "target_vocab_size as the target has it, 272"),
        ({"hidden_size": 32}, "hidden_size .* as the target has it, 64"),
    ],
)
def test_a_pair_that_cannot_run_together_is_refused(changes: dict[str, Any], said: str) -> None:
    check_pair(_built(TargetSpec, TARGET), _built(DraftSpec, DRAFT))
    with pytest.raises(ValueError, match=said):
        check_pair(_built(TargetSpec, TARGET), _built(DraftSpec, DRAFT | changes))


@pytest.mark.parametrize(
    "fields", [{"world_size": 10**9, "tp_size": 10**9}, {"world_size": 0, "tp_size": 0}, {"rank": 1}, {"rank": -1}]
)
def test_a_mapping_that_cannot_be_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        Mapping(**fields)


def test_what_models_have_is_accepted() -> None:
    _built(TargetSpec, TARGET | {"moe": MOE, "eos_token_ids": (271, 0), "bos_token_id": 0})
    _built(DraftSpec, DRAFT | {"draft_vocab_size": 272, "mask_token_id": 271})
    RopeSpec(**YARN | {"attention_factor": 1.3, "theta": 4.56e10})
    AttentionMask(window=1)
    Moe(**MOE | {"activation": "clamped_swiglu", "limit": 7.0, "alpha": 1.702})


def _built(kind: Any, fields: dict[str, Any]) -> Any:
    return kind(**layered(**fields, moe_layer_ids=range(2) if "moe" in fields else ()))


def _assert_refused(kind: type[TargetSpec | DraftSpec], fields: dict[str, Any], field: str) -> None:
    """What is wrong with every layer is said of every one."""
    with pytest.raises(ValidationError) as caught:
        _built(kind, fields)
    names = [[str(part) for part in error["loc"]] for error in caught.value.errors()]
    found = {".".join(parts[3:] if parts[0] == "layers" and len(parts) > 1 else parts) for parts in names}
    found = {name.removeprefix("gqa").removeprefix(".") for name in found}
    assert found == {"dense.intermediate_size" if field == "intermediate_size" else field}
