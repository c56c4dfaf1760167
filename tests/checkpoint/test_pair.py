"""A pair is proven before any work, and then gives the tensors that it promised."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.mapping import Mapping
from tests.checkpoint.joining import join, ranks, ranks_of_own_requests
from tests.checkpoint.refusals import Copy, edit_tensors, pair_refusal, weights_of
from tests.factories import edit_json, make_speculators_drafter, make_target, make_zlab_drafter, read_json, write_json
from tests.specs import Flat

# What a pair gives


@pytest.mark.parametrize("name", ["qwen3", "llama", "sharded"])
def test_target_weights_are_those_that_transformers_loads(checkpoints: Path, name: str) -> None:
    pair = open_pair(checkpoints / name, None)
    weights = weights_of(pair)
    reference = AutoModelForCausalLM.from_pretrained(checkpoints / name).state_dict()
    layer = "model.layers.3"
    attention = [f"{layer}.self_attn.{letter}_proj" for letter in "qkv"]
    assert torch.equal(weights["target.layers.3.qkv"], torch.cat([reference[f"{x}.weight"] for x in attention]))
    mlp = [reference[f"{layer}.mlp.{word}_proj.weight"] for word in ("gate", "up")]
    assert torch.equal(weights["target.layers.3.gate_up"], torch.cat(mlp))
    assert torch.equal(weights["target.layers.3.down"], reference[f"{layer}.mlp.down_proj.weight"])
    assert torch.equal(weights["target.layers.3.o"], reference[f"{layer}.self_attn.o_proj.weight"])
    assert torch.equal(weights["target.layers.3.attention_norm"], reference[f"{layer}.input_layernorm.weight"])
    assert torch.equal(weights["target.layers.3.mlp_norm"], reference[f"{layer}.post_attention_layernorm.weight"])
    assert torch.equal(weights["target.embedding"], reference["model.embed_tokens.weight"])
    assert torch.equal(weights["target.lm_head"], reference["lm_head.weight"])
    if Flat(pair.target).has_qk_norm:
        assert torch.equal(weights["target.layers.3.q_norm"], reference[f"{layer}.self_attn.q_norm.weight"])
        assert torch.equal(weights["target.layers.3.k_norm"], reference[f"{layer}.self_attn.k_norm.weight"])
    if Flat(pair.target).has_qkv_bias:
        assert torch.equal(weights["target.layers.3.qkv_bias"], torch.cat([reference[f"{x}.bias"] for x in attention]))
        assert torch.equal(weights["target.layers.3.o_bias"], reference[f"{layer}.self_attn.o_proj.bias"])
        assert torch.equal(weights["target.layers.3.down_bias"], reference[f"{layer}.mlp.down_proj.bias"])
    assert sum(tensor.numel() for tensor in weights.values()) == sum(tensor.numel() for tensor in reference.values())


def test_draft_weights_stack_k_and_v_of_all_layers(checkpoints: Path, tmp_path: Path) -> None:
    drafter = make_zlab_drafter(tmp_path / "d", target_dir=checkpoints / "qwen3", attention_bias=True)
    weights = weights_of(open_pair(checkpoints / "qwen3", drafter))
    reference = load_file(drafter / "model.safetensors")
    for kind, suffix in (("weight", ""), ("bias", "_bias")):
        parts = [reference[f"layers.{i}.self_attn.{letter}_proj.{kind}"] for i in range(2) for letter in "kv"]
        assert torch.equal(weights[f"draft.kv{suffix}"], torch.cat(parts))
        assert torch.equal(weights[f"draft.layers.1.q{suffix}"], reference[f"layers.1.self_attn.q_proj.{kind}"])
    assert torch.equal(weights["draft.fc"], reference["fc.weight"])
    assert torch.equal(weights["draft.context_norm"], reference["hidden_norm.weight"])
    assert torch.equal(weights["draft.norm"], reference["norm.weight"])
    num_values = sum(tensor.numel() for name, tensor in weights.items() if name.startswith("draft."))
    assert num_values == sum(tensor.numel() for tensor in reference.values())


def test_the_draft_vocabulary_becomes_absolute_target_ids(checkpoints: Path) -> None:
    weights = weights_of(open_pair(checkpoints / "qwen3", checkpoints / "speculators"), torch.bfloat16)
    reference = load_file(checkpoints / "speculators" / "model.safetensors")
    draft_to_target = weights["draft.draft_to_target"]
    assert draft_to_target.dtype == torch.int64  # never cast to the engine's dtype
    assert torch.equal(draft_to_target, reference["t2d"].nonzero().flatten())
    assert not torch.equal(draft_to_target, reference["d2t"])
    assert torch.equal(weights["draft.lm_head"].float(), reference["lm_head.weight"].bfloat16().float())


def test_a_full_vocabulary_with_its_own_head_maps_every_token_to_itself(checkpoints: Path, tmp_path: Path) -> None:
    drafter = make_speculators_drafter(
        tmp_path / "d", target_dir=checkpoints / "qwen3", draft_vocab_size=272, has_own_embedding=True
    )
    edit_tensors(drafter, lambda tensors: [tensors.pop(name) for name in ("d2t", "t2d")])
    weights = weights_of(open_pair(checkpoints / "qwen3", drafter))
    assert torch.equal(weights["draft.draft_to_target"], torch.arange(272))
    assert torch.equal(weights["draft.embedding"], load_file(drafter / "model.safetensors")["embed_tokens.weight"])


def test_weights_come_in_the_order_and_shapes_of_the_table(checkpoints: Path) -> None:
    pair = open_pair(checkpoints / "qwen3", checkpoints / "speculators")
    weights = list(pair.iter_weights(dtype=torch.bfloat16, mapping=Mapping()))
    assert [name for name, _ in weights] == list(pair.table)
    assert {name: tuple(tensor.shape) for name, tensor in weights} == {n: spec.shape for n, spec in pair.table.items()}
    floats = {tensor.dtype for name, tensor in weights if not pair.table[name].is_integer}
    assert floats == {torch.bfloat16}


@pytest.mark.parametrize("drafter", ["zlab", "speculators"])
def test_the_ranks_together_hold_the_whole_pair(checkpoints: Path, drafter: str) -> None:
    pair = open_pair(checkpoints / "sharded", checkpoints / drafter)
    whole = weights_of(pair)
    shards = [dict(pair.iter_weights(dtype=torch.float32, mapping=mapping)) for mapping in ranks(2)]
    for name, tensor in whole.items():
        assert torch.equal(join([held[name] for held in shards], pair.table[name]), tensor), name


def test_ranks_of_own_requests_divide_vocabulary_and_mlps_besides_experts(tmp_path: Path) -> None:
    target = make_target(tmp_path / "t", family="deepseek_v3", tokenizer=False)
    pair = open_pair(target, make_zlab_drafter(tmp_path / "d", target_dir=target))
    mappings = ranks_of_own_requests(2)
    shards = [dict(pair.iter_weights(dtype=torch.float32, mapping=mapping)) for mapping in mappings]
    for name, tensor in weights_of(pair).items():
        parts = [held[name] for held in shards]
        if pair.table[name].num_experts:
            continue
        assert torch.equal(join(parts, pair.table[name], have_own_requests=True), tensor), name
        is_divided = name.rpartition(".")[2] in ("embedding", "lm_head", "gate_up", "down")
        assert is_divided == (parts[0].shape != tensor.shape), name


def test_a_tied_target_has_no_head_of_its_own(tmp_path: Path) -> None:
    target = make_target(tmp_path / "t", tie_word_embeddings=True)
    pair = open_pair(target, make_zlab_drafter(tmp_path / "d", target_dir=target))
    assert pair.target.is_embedding_tied
    assert "target.lm_head" not in weights_of(pair)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_stored_copy_of_a_tied_head_is_no_second_head(tmp_path: Path, dtype: torch.dtype) -> None:
    sizes = {"vocab_size": 5000, "dtype": torch.bfloat16}  # more rows than are compared at a time
    target = make_target(tmp_path / "t", tie_word_embeddings=True, **sizes)

    def copy(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].to(dtype).clone()

    edit_tensors(target, copy)
    pair = open_pair(target, None)
    assert pair.target.is_embedding_tied and pair.notes == ()
    assert "target.lm_head" not in weights_of(pair)
    edit_tensors(target, lambda tensors: tensors["lm_head.weight"][-1, -1].add_(1.0))
    pair = open_pair(target, None)
    assert not pair.target.is_embedding_tied
    assert "lm_head.weight differs from its embedding" in pair.notes[0]
    weights, reference = weights_of(pair), AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert torch.equal(weights["target.lm_head"], reference.lm_head.weight)
    assert torch.equal(weights["target.embedding"], reference.model.embed_tokens.weight)
    assert not torch.equal(weights["target.lm_head"], weights["target.embedding"])


def test_a_second_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    target = make_target(tmp_path / "t", tie_word_embeddings=True)
    edit_tensors(target, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(271, 64)}))
    assert "tensor 'lm_head.weight': expected shape [272, 64], found [271, 64]" in pair_refusal(target, None)


@pytest.mark.parametrize(
    ("make", "layers", "is_noted"),
    [(make_zlab_drafter, (0, 2), False), (make_zlab_drafter, (0, 3), True), (make_speculators_drafter, (3,), True)],
)
def test_a_tap_on_the_last_layer_is_noted(
    checkpoints: Path, tmp_path: Path, make: Any, layers: tuple[int, ...], is_noted: bool
) -> None:
    drafter = make(tmp_path / "d", target_dir=checkpoints / "qwen3", target_layer_ids=layers)
    notes = open_pair(checkpoints / "qwen3", drafter).notes
    said = "the drafter's tap on the target's last layer, 3, is read before the final norm"
    assert [said in note for note in notes] == [True] * is_noted


def test_sources_and_tokenizer_files_are_listed(checkpoints: Path, tmp_path: Path) -> None:
    target = checkpoints / "sharded"
    pair = open_pair(target, checkpoints / "zlab")
    names = sorted(path.relative_to(checkpoints).as_posix() for path in pair.source_files)
    shards = [f"sharded/{path.name}" for path in target.glob("*.safetensors")]
    json_files = ["config.json", "generation_config.json", "model.safetensors.index.json"]
    drafter_files = ["zlab/config.json", "zlab/model.safetensors"]
    assert names == sorted([*shards, *(f"sharded/{name}" for name in json_files), *drafter_files])
    assert {path.name for path in pair.tokenizer_files} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    }
    bare = make_target(tmp_path / "bare", tokenizer=False)
    assert open_pair(bare, None).tokenizer_files == ()


def test_a_pair_is_immutable(checkpoints: Path) -> None:
    pair = open_pair(checkpoints / "qwen3", None)
    assert pair.draft is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        pair.draft = None  # type: ignore[misc]


# Pairs that do not fit


@pytest.mark.parametrize(
    ("overrides", "subject"),
    [
        ({"num_target_layers": 5}, "num_target_layers: expected 4 (the target's), found 5"),
        ({"vocab_size": 300}, "vocab_size: expected 272 (the target's), found 300"),
        ({"hidden_size": 32}, "hidden_size (it shares the target's embedding and lm_head): expected 64"),
        ({"target_hidden_size": 32}, "target_hidden_size: expected 64 (the target's), found 32"),
        ({"target_layer_ids": (0, 4)}, "drafter target_layer_ids: expected layers 0..3, found [4]"),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    checkpoints: Path, tmp_path: Path, overrides: dict[str, Any], subject: str
) -> None:
    drafter = make_zlab_drafter(tmp_path / "d", target_dir=checkpoints / "qwen3", **overrides)
    message = pair_refusal(checkpoints / "qwen3", drafter, ConfigError)
    assert subject in message
    assert "Use the drafter trained for this target." in message


def test_a_drafter_with_its_own_embedding_and_head_may_have_another_hidden_size(
    checkpoints: Path, tmp_path: Path
) -> None:
    target = checkpoints / "qwen3"
    narrow = make_target(tmp_path / "narrow", hidden_size=32)
    drafter = make_speculators_drafter(tmp_path / "d", target_dir=narrow, has_own_embedding=True, target_hidden_size=64)
    edit_tensors(drafter, lambda tensors: tensors.update({"fc.weight": torch.zeros(32, 128)}))
    pair = open_pair(target, drafter)
    assert pair.draft is not None
    assert (pair.draft.hidden_size, pair.draft.target_hidden_size) == (32, 64)
    edit_tensors(drafter, lambda tensors: tensors.pop("embed_tokens.weight"))
    assert "it shares the target's embedding): expected 64" in pair_refusal(target, drafter, ConfigError)


def test_a_drafter_with_another_tokenizer_is_refused(checkpoints: Path, copy_of: Copy) -> None:
    target, drafter = checkpoints / "qwen3", copy_of("zlab")
    path = drafter / "tokenizer.json"
    shutil.copyfile(target / "tokenizer.json", path)
    open_pair(target, drafter)
    fields = read_json(path)
    vocabulary = fields["model"]["vocab"]
    vocabulary["!"], vocabulary["A"] = vocabulary["A"], vocabulary["!"]
    write_json(path, fields)
    message = pair_refusal(target, drafter)
    assert "drafter tokenizer: expected the target's 260 tokens ('!' is 4), found 260 tokens ('!' is 36)" in message


def test_an_added_token_counts_as_vocabulary(checkpoints: Path, copy_of: Copy) -> None:
    target, drafter = checkpoints / "qwen3", copy_of("zlab")
    fields = read_json(target / "tokenizer.json")
    fields["added_tokens"].append({"id": 260, "content": "<|think|>"})
    write_json(drafter / "tokenizer.json", fields)
    assert "'<|think|>' is absent), found 261 tokens ('<|think|>' is 260)" in pair_refusal(target, drafter)


def test_unigram_vocabularies_are_compared_too(checkpoints: Path, copy_of: Copy) -> None:
    target, drafter = copy_of("qwen3"), copy_of("zlab")
    write_json(target / "tokenizer.json", {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}})
    write_json(drafter / "tokenizer.json", {"model": {"vocab": [["a", -1.5], ["b", -2.5]]}, "added_tokens": []})
    open_pair(target, drafter)
    write_json(drafter / "tokenizer.json", {"model": {"vocab": [["b", -1.5], ["a", -2.5]]}})
    assert "drafter tokenizer: expected the target's 2 tokens ('a' is 0)" in pair_refusal(target, drafter)


def test_a_drafter_tokenizer_that_cannot_be_compared_is_refused(checkpoints: Path, copy_of: Copy) -> None:
    target, drafter = copy_of("qwen3"), copy_of("zlab")
    write_json(drafter / "tokenizer.json", {"model": {"vocab": 3}})
    assert "drafter tokenizer.json: expected a model.vocab and added_tokens" in pair_refusal(target, drafter)
    (target / "tokenizer.json").unlink()
    assert "target tokenizer: expected a tokenizer.json" in pair_refusal(target, drafter)


# Files that are not there, and everything at once


def test_a_missing_shard_is_one_problem_not_one_per_tensor(copy_of: Copy) -> None:
    target = copy_of("sharded")
    (target / "model-00002-of-00007.safetensors").unlink()
    message = pair_refusal(target, None)
    assert "file 'model-00002-of-00007.safetensors': expected a shard" in message
    assert "problems" not in message


def test_a_truncated_file_is_one_problem_not_one_per_tensor(checkpoints: Path, copy_of: Copy) -> None:
    drafter = copy_of("zlab")
    path = drafter / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    message = pair_refusal(checkpoints / "qwen3", drafter)
    assert "drafter file 'model.safetensors': expected" in message
    assert "problems" not in message


def test_a_directory_that_is_not_there_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    absent, file = tmp_path / "nothing", checkpoints / "qwen3" / "config.json"
    message = pair_refusal(absent, file, ConfigError)
    assert f"target {absent}: expected a checkpoint directory, found nothing at that path" in message
    assert f"drafter {file}: expected a checkpoint directory, found a file" in message
    assert pair_refusal(absent, None, ConfigError).startswith(f"target {absent}: expected a checkpoint directory")


def test_a_target_and_a_drafter_in_each_others_place_are_told_apart(checkpoints: Path) -> None:
    message = pair_refusal(checkpoints / "zlab", checkpoints / "qwen3", ConfigError)
    assert "This is a drafter: pass it as the drafter" in message
    assert "This is a model to serve: pass it as the target" in message


def test_a_target_quantized_in_an_unknown_way_is_refused_by_name(copy_of: Copy) -> None:
    target = copy_of("qwen3")
    write_json(target / "hf_quant_config.json", {"quantization": {"quant_algo": "W4A16_AWQ"}})
    assert "quant_algo: expected one of FP8, NVFP4, W4A16_NVFP4" in pair_refusal(target, None, ConfigError)


def test_all_problems_of_a_pair_come_in_one_error(copy_of: Copy) -> None:
    target, drafter = copy_of("qwen3"), copy_of("zlab")
    edit_tensors(target, lambda tensors: tensors.pop("model.norm.weight"))
    edit_tensors(target, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(272, 32)}))
    edit_tensors(drafter, lambda tensors: tensors.update({"extra": torch.zeros(1)}))
    write_json(drafter / "tokenizer.json", {"model": {"vocab": {"a": 0}}})
    message = pair_refusal(target, drafter)
    assert "4 problems" in message
    for part in ("'model.norm.weight'", "'lm_head.weight'", "'extra'", "drafter tokenizer"):
        assert part in message


def test_config_and_tensor_problems_come_in_one_config_error(copy_of: Copy) -> None:
    target, drafter = copy_of("qwen3"), copy_of("zlab")
    edit_json(target / "config.json", hidden_act="gelu")
    edit_json(drafter / "config.json", is_neox_style=False)
    (target / "model.safetensors").unlink()
    message = pair_refusal(target, drafter, ConfigError)
    assert "3 problems" in message
    assert all(part in message for part in ("'hidden_act'", "'is_neox_style'", "target tensors: expected"))


def test_proving_a_pair_reads_no_weights(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("dflash_trt.checkpoint.weights.safe_open", lambda *args, **_: opened.append(str(args)))
    monkeypatch.setattr("dflash_trt.checkpoint.vocabulary.safe_open", lambda *args, **_: opened.append(str(args)))
    pair = open_pair(checkpoints / "sharded", checkpoints / "zlab")
    weights = pair.iter_weights(dtype=torch.float32, mapping=Mapping())
    assert opened == []
    with pytest.raises(TypeError):
        next(weights)
    assert len(opened) == 1
