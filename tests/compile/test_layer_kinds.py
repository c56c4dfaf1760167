"""One layer of each kind: which ones are kept, and what else of the pair moves with them."""

from pathlib import Path

import pytest

from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.compile.layer_kinds import (
    MAX_EMBEDDING_ROWS,
    layer_kinds,
    one_of_each_kind,
    with_few_embedding_rows,
    with_few_experts,
)
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from dflash_trt.engine_dir import PretrainedConfig, tensor_headers
from tests.factories import make_target, make_zlab_drafter
from tests.gemma_targets import PER_LAYER, make_gemma

LINEARS = ("qkv", "o", "gate_up", "down")


def config_of(root: Path, quantization: QuantizationSpec | None = None) -> PretrainedConfig:
    """Six target layers, of which the last two have a window, and a drafter of two layers with taps on 1, 3 and 4."""
    window = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 4}
    target = make_target(root / "target", num_hidden_layers=6, **window)
    drafter = make_zlab_drafter(root / "drafter", target_dir=target, target_layer_ids=(1, 3, 4))
    pair = open_pair(target, drafter)
    return PretrainedConfig(target=pair.target, draft=pair.draft, dtype="bfloat16", quantization=quantization)


def test_windows_and_formats_make_kinds(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert layer_kinds(config.target, {}) == (0, 0, 0, 0, 4, 4)
    assert layer_kinds(config.target, {"target.layers.2.o": "fp8", "draft.layers.0.o": "fp8"}) == (0, 0, 2, 0, 4, 4)
    assert config.draft is not None
    assert layer_kinds(config.draft, {"draft.layers.1.o": "fp8", "draft.kv": "fp8"}) == (0, 1)


def test_the_pair_of_one_layer_of_each_kind_has_their_widths_formats_and_scales(tmp_path: Path) -> None:
    formats = {f"target.layers.{i}.{name}": "fp8" for i in (2, 5) for name in LINEARS} | {"target.lm_head": "fp8"}
    scales = tuple(LayerKvScales(k=0.5 + i, v=1.0) for i in range(6))
    config = config_of(tmp_path, QuantizationSpec(linears=formats, target_kv=scales))
    found = one_of_each_kind(config)
    assert found.target.layers == tuple(config.target.layers[i] for i in (0, 2, 4, 5))
    assert found.draft is not None and found.draft.target_layer_ids == (0, 0, 2)
    assert found.quantization is not None
    kept = {f"target.layers.{i}.{name}": "fp8" for i in (1, 3) for name in LINEARS} | {"target.lm_head": "fp8"}
    assert found.quantization.linears == kept
    assert [scale.k for scale in found.quantization.target_kv or ()] == [0.5, 2.5, 4.5, 5.5]
    whole, cut = tensor_headers(config), tensor_headers(found)
    for name in ("draft.fc", "target.lm_head", "target.embedding"):
        assert cut[name] == whole[name]
    assert cut["target.layers.1.qkv"] == whole["target.layers.2.qkv"]


def test_a_layer_that_shares_k_and_v_has_those_of_the_first_layer_of_their_kind(tmp_path: Path) -> None:
    target = make_gemma(
        tmp_path / "target",
        family="gemma4_text",
        num_hidden_layers=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        **PER_LAYER | {"num_kv_shared_layers": 3},
    )
    config = PretrainedConfig(target=open_pair(target, None).target, dtype="bfloat16")
    sharing = [gqa.shares_kv_with for gqa in config.target.attentions]
    assert sharing == [None, None, None, 1, 1, 2]
    assert layer_kinds(config.target, {}) == (0, 0, 2, 3, 3, 5)
    assert [gqa.shares_kv_with for gqa in one_of_each_kind(config).target.attentions] == [None, None, 0, 1]


@pytest.mark.parametrize(("ep_size", "num_experts"), [(1, 8), (2, 16), (4, 32)])
def test_experts_of_each_rank_are_as_many_as_a_row_chooses_or_eight(
    tmp_path: Path, ep_size: int, num_experts: int
) -> None:
    target = make_target(tmp_path / "moe", family="gpt_oss", num_local_experts=32, num_experts_per_tok=4)
    mapping = Mapping(world_size=ep_size, tp_size=ep_size, ep_size=ep_size)
    config = PretrainedConfig(target=open_pair(target, None).target, dtype="bfloat16", mapping=mapping)
    found, whole = (tensor_headers(each) for each in (one_of_each_kind(config), config))
    experts = "target.layers.0.experts.gate_up"
    assert found[experts].shape == (num_experts // ep_size, *whole[experts].shape[1:])
    assert found["target.layers.0.router"].shape == (num_experts, whole["target.layers.0.router"].shape[1])


def test_few_experts_stay_as_they_are(tmp_path: Path) -> None:
    target = open_pair(make_target(tmp_path / "moe", family="qwen3_moe"), None).target
    assert [with_few_experts(layer, 1) for layer in target.layers] == list(target.layers)


@pytest.mark.parametrize("is_tied", [False, True])
def test_few_rows_stand_for_an_embedding_that_is_no_head(tmp_path: Path, is_tied: bool) -> None:
    """A tied one is multiplied by as a whole."""
    sizes = {"vocab_size": MAX_EMBEDDING_ROWS + 8, "tie_word_embeddings": is_tied}
    pair = open_pair(make_target(tmp_path / "target", **sizes), None)
    whole = tensor_headers(PretrainedConfig(target=pair.target, dtype="bfloat16"))
    cut = with_few_embedding_rows(whole, pair.target)
    changed = {name for name in whole if cut[name] != whole[name]}
    assert changed == (set() if is_tied else {"target.embedding"})
    assert is_tied or cut["target.embedding"].shape == (MAX_EMBEDDING_ROWS, pair.target.hidden_size)
