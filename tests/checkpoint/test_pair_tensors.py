"""Tensors that do not fit their config are named, with what was expected and what was found."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dflash_trt.checkpoint import weights
from dflash_trt.checkpoint.names import embedding_name, head_name
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.errors import CheckpointError
from dflash_trt.core.mapping import Mapping
from tests.checkpoint.refusals import Copy, edit_tensors, pair_refusal, weights_of
from tests.factories import Tensors, edit_json, make_target

# Tensors that do not fit


@pytest.mark.parametrize("name", ["model.layers.2.self_attn.q_norm.weight", "lm_head.weight", "model.norm.weight"])
def test_a_missing_target_tensor_is_named(copy_of: Copy, name: str) -> None:
    target = copy_of("qwen3")
    edit_tensors(target, lambda tensors: tensors.pop(name))
    assert f"target tensors: expected every tensor of its config.json, found 1 missing: '{name}'" in pair_refusal(
        target, None
    )


@pytest.mark.parametrize(
    "name",
    [
        "embed_tokens.weight",
        "lm_head.weight",
        "d2t",
        "t2d",
        "layers.2.mlp.up_proj.weight",
        "layers.0.self_attn.q_proj.bias",
        "layers.0.self_attn.sinks",
        "layers.0.attention_conv.base_kernel",
    ],
)
def test_an_unexpected_draft_tensor_is_named(checkpoints: Path, copy_of: Copy, name: str) -> None:
    drafter = copy_of("zlab")
    edit_tensors(drafter, lambda tensors: tensors.update({name: torch.zeros(2)}))
    assert f"found 1 unexpected: '{name}'" in pair_refusal(checkpoints / "qwen3", drafter)


def test_tensors_that_carry_nothing_are_ignored(copy_of: Copy) -> None:
    target, drafter = copy_of("qwen3"), copy_of("speculators")
    edit_tensors(
        target, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    )
    extra = ("rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")
    edit_tensors(drafter, lambda tensors: tensors.update({name: torch.ones(8) for name in extra}))
    weights_of(open_pair(target, drafter))


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.", "lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
    ],
)
def test_names_of_a_language_model_are_those_of_its_wrapper(prefix: str, head: str) -> None:
    stored = (f"{prefix}layers.0.input_layernorm.weight", "vision_tower.norm.weight")
    assert (head_name(stored), embedding_name(stored)) == (head, f"{prefix}embed_tokens.weight")


def test_layers_behind_the_last_one_are_left_out_where_they_draft(tmp_path: Path) -> None:
    for family, is_left_out in (("deepseek_v3", True), ("qwen3", False)):
        target = make_target(tmp_path / family, family=family, tokenizer=False, num_hidden_layers=2)  # type: ignore[arg-type]
        for layer, is_whole in ((2, is_left_out), (11, is_left_out), (1, False)):
            name = f"model.layers.{layer}.eh_proj.weight"
            edit_tensors(target, lambda tensors, name=name: tensors.update({name: torch.zeros(2)}))
            if is_whole:
                open_pair(target, None)
            else:
                assert f"unexpected: '{name}'" in pair_refusal(target, None)
            edit_tensors(target, lambda tensors, name=name: tensors.pop(name))


def test_a_mis_shaped_tensor_is_named_with_both_shapes(checkpoints: Path, copy_of: Copy) -> None:
    drafter = copy_of("zlab")
    edit_tensors(drafter, lambda tensors: tensors.update({"fc.weight": torch.zeros(64, 192)}))
    message = pair_refusal(checkpoints / "qwen3", drafter)
    assert "drafter tensor 'fc.weight': expected shape [64, 128], found [64, 192]" in message


def test_a_wrong_head_dim_shows_as_a_shape(copy_of: Copy) -> None:
    target = copy_of("qwen3")
    edit_json(target / "config.json", head_dim=32)
    assert "q_norm.weight': expected shape [32], found [16]" in pair_refusal(target, None)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float64])
def test_a_weight_that_is_not_a_plain_float_is_refused(copy_of: Copy, dtype: torch.dtype) -> None:
    target = copy_of("qwen3")
    name = "model.layers.1.mlp.down_proj.weight"
    edit_tensors(target, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    assert f"target tensor '{name}': expected dtype F32 or BF16 or F16, found" in pair_refusal(target, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    pair = open_pair(make_target(tmp_path / "t", dtype=dtype), None)
    reference = load_file(tmp_path / "t" / "model.safetensors")["model.norm.weight"]
    assert torch.equal(weights_of(pair)["target.norm"], reference.float())


@pytest.mark.parametrize("bytes_at_once", [2**26, 4])
def test_a_value_that_is_not_finite_is_refused_while_reading(
    copy_of: Copy, monkeypatch: pytest.MonkeyPatch, bytes_at_once: int
) -> None:
    monkeypatch.setattr(weights, "_BYTES_AT_ONCE", bytes_at_once)
    target = copy_of("qwen3")
    edit_tensors(target, lambda tensors: tensors["model.norm.weight"][3:4].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=r"tensor 'target.norm': expected finite values .*NaN"):
        weights_of(open_pair(target, None))


def test_a_value_too_large_for_the_dtype_is_refused_while_reading(copy_of: Copy) -> None:
    target = copy_of("qwen3")
    edit_tensors(target, lambda tensors: tensors["model.norm.weight"][3:4].fill_(1e6))
    weights_of(open_pair(target, None), torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"tensor 'target.norm': expected finite values in torch.float16"):
        weights_of(open_pair(target, None), torch.float16)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next", "llama4_text"])
def test_weights_are_the_same_however_few_bytes_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Any
) -> None:
    """A file is opened again after so many bytes, and not before."""
    pair = open_pair(make_target(tmp_path, family=family, tokenizer=False), None)
    mappings = [Mapping(), *(Mapping(world_size=2, tp_size=2, rank=rank) for rank in range(2))]
    expected = [dict(pair.iter_weights(dtype=torch.float32, mapping=mapping)) for mapping in mappings]
    opened: list[Path] = []

    def counted(path: Path, **options: Any) -> Any:
        opened.append(path)
        return safe_open(path, **options)

    monkeypatch.setattr(weights, "_BYTES_AT_ONCE", 1000)
    monkeypatch.setattr(weights, "_MAX_MAPPED_BYTES", 5000)
    monkeypatch.setattr(weights, "safe_open", counted)
    for mapping, whole in zip(mappings, expected, strict=True):
        opened.clear()
        found = dict(pair.iter_weights(dtype=torch.float32, mapping=mapping))
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
        if mapping.world_size == 1:
            num_bytes = (tmp_path / "model.safetensors").stat().st_size
            assert 1 < len(opened) <= num_bytes // 5000 + 1


# The reduced vocabulary


@pytest.mark.parametrize("name", ["d2t", "lm_head.weight"])
def test_a_reduced_vocabulary_needs_its_head_and_its_map(checkpoints: Path, copy_of: Copy, name: str) -> None:
    drafter = copy_of("speculators")
    edit_tensors(drafter, lambda tensors: tensors.pop(name))
    assert f"found 1 missing: '{name}'" in pair_refusal(checkpoints / "qwen3", drafter)


def test_a_draft_vocab_size_that_contradicts_the_head_is_refused(checkpoints: Path, copy_of: Copy) -> None:
    drafter = copy_of("speculators")
    edit_json(drafter / "config.json", draft_vocab_size=60)
    message = pair_refusal(checkpoints / "qwen3", drafter)
    assert "tensor 'lm_head.weight': expected shape [60, 64], found [64, 64]" in message
    assert "tensor 'd2t': expected shape [60], found [64]" in message


def test_a_map_with_floating_point_values_is_refused(checkpoints: Path, copy_of: Copy) -> None:
    drafter = copy_of("speculators")
    edit_tensors(drafter, lambda tensors: tensors.update({"d2t": tensors["d2t"].float()}))
    assert "tensor 'd2t': expected dtype I64 or I32, found F32" in pair_refusal(checkpoints / "qwen3", drafter)


def test_a_map_of_absolute_ids_instead_of_offsets_is_refused(checkpoints: Path, copy_of: Copy) -> None:
    drafter = copy_of("speculators")
    edit_tensors(drafter, lambda tensors: tensors["d2t"].add_(torch.arange(64)))
    assert "drafter tensor 'd2t': expected target ids in 0..271" in pair_refusal(checkpoints / "qwen3", drafter)
    edit_tensors(drafter, lambda tensors: tensors["d2t"].copy_(-torch.arange(64) - torch.arange(1, 65)))
    message = pair_refusal(checkpoints / "qwen3", drafter)
    assert "drafter tensor 'd2t': expected target ids in 0..271, found 64 outside" in message


def test_two_draft_tokens_for_one_target_token_are_refused(checkpoints: Path, copy_of: Copy) -> None:
    drafter = copy_of("speculators")

    def change(tensors: Tensors) -> None:
        tensors["d2t"][1] = tensors["d2t"][0] - 1
        del tensors["t2d"]

    edit_tensors(drafter, change)
    assert "drafter tensor 'd2t': expected 64 different target ids, found 63" in pair_refusal(
        checkpoints / "qwen3", drafter
    )


def test_a_map_that_contradicts_t2d_is_refused(checkpoints: Path, copy_of: Copy) -> None:
    drafter = copy_of("speculators")
    edit_tensors(drafter, lambda tensors: tensors["t2d"].logical_not_())
    message = pair_refusal(checkpoints / "qwen3", drafter)
    assert "drafter tensor 'd2t': expected the target ids that t2d marks, found others" in message


def test_a_32_bit_map_gives_the_same_ids(checkpoints: Path, copy_of: Copy) -> None:
    drafter = copy_of("speculators")
    expected = weights_of(open_pair(checkpoints / "qwen3", drafter))["draft.draft_to_target"]
    edit_tensors(drafter, lambda tensors: tensors.update({"d2t": tensors["d2t"].int()}))
    found = weights_of(open_pair(checkpoints / "qwen3", drafter))["draft.draft_to_target"]
    assert found.dtype == torch.int64
    assert torch.equal(found, expected)
