"""EAGLE-3 heads that PyPI `speculators` writes, exported for TensorRT-LLM in SafeAILab's format."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import BuildError
from dflash_trt.engine_dir import EngineDir
from tests.eagle3_files import convert_safeailab, save_eagle3_head
from tests.engines import decode, make_executor
from tests.factories import edit_json, make_target, read_json
from tests.parity.test_eagle3 import NUM_NEW, PROMPT, SOME, K, expected_blocks

HEADS: dict[str, dict[str, Any]] = {
    "full vocabulary": {},
    "norm of all taps, in another order": {"norm_before_fc": True, "aux_hidden_state_layer_ids": (3, 1)},
    "norm of each tap, in another order": {
        "fc_norm": True,
        "norm_output": True,
        "aux_hidden_state_layer_ids": (4, 1, 2),
    },
}
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("pair") / "target", vocab_size=12, tokenizer=False)


def save_head(path: Path, *, target_dir: Path, **options: Any) -> Path:
    """With the target's embedding, which `speculators` trains only when told to."""
    save_eagle3_head(path, target_dir=target_dir, **options)
    with_embedding(path, target_dir)
    return path


def with_embedding(head: Path, target_dir: Path) -> None:
    """The target's, which files in SafeAILab's format do without and `speculators` would draw by chance."""
    embedding = load_file(target_dir / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(head, **{"embed_tokens.weight": embedding})


def edit_tensors(head: Path, **changes: torch.Tensor) -> None:
    save_file(load_file(head / "model.safetensors") | changes, head / "model.safetensors", {"format": "pt"})


def exported(target: Path, head: Path, output: Path) -> EngineDir:
    config = BuildConfig(target=str(target), drafter=str(head), backend="tensorrt_llm", max_seq_len=64)
    return build_engine(
        config, output, base_dir=target, overwrite=False, command=("build",), progress=lambda report: None
    )


@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS.keys())
def test_an_exported_head_drafts_as_speculators_does_with_the_source(
    target: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    head = save_head(tmp_path / "head", target_dir=target, **options)
    engine = exported(target, head, tmp_path / "engine")
    run = decode(make_executor(target, engine.path / "drafter"), PROMPT, NUM_NEW, num_draft_tokens=K)
    assert run.blocks == expected_blocks(target, head, run)
    draft = engine.manifest.draft
    assert draft is not None and draft.target_layer_ids == tuple(sorted(draft.target_layer_ids))
    assert (draft.source_format, draft.has_own_embedding, draft.max_draft_len) == ("eagle3", False, 7)
    assert engine.manifest.tensorrt_llm is not None
    speculative = engine.manifest.tensorrt_llm.llm_args["speculative_config"]
    assert speculative["eagle3_layers_to_capture"] == list(draft.target_layer_ids)


def test_its_files_are_safeailab_s_which_speculators_reads_back(target: Path, tmp_path: Path) -> None:
    """The names that Eagle3ForCausalLM loads, and each field where it is read."""
    head = save_head(tmp_path / "head", target_dir=target, draft_tokens=SOME)
    directory = exported(target, head, tmp_path / "engine").path / "drafter"
    config, stored = read_json(directory / "config.json"), load_file(directory / "model.safetensors")
    layer = read_json(head / "config.json")["transformer_layer_config"]
    assert {name.split(".")[0] for name in stored} == {"d2t", "fc", "lm_head", "midlayer", "norm", "t2d"}
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "norm_before_fc": False}
    assert (config["draft_vocab_size"], config["vocab_size"], config["target_hidden_size"]) == (len(SOME), 12, 64)
    assert (config["torch_dtype"], config["tie_word_embeddings"]) == ("bfloat16", False)
    assert config["rope_theta"] == layer["rope_parameters"]["rope_theta"]
    assert not {"dtype", "layer_types", "rope_parameters", "rope_scaling"} & set(config)
    run = decode(make_executor(target, directory), PROMPT, NUM_NEW, num_draft_tokens=K)
    edit_json(directory / "config.json", torch_dtype="float32")  # the reference computes as our run does
    again = convert_safeailab(directory, tmp_path / "converted", target_dir=target)
    with_embedding(again, target)
    assert run.blocks == expected_blocks(target, again, run) == expected_blocks(target, head, run)


def test_scaled_rope_is_exported(target: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    head = save_head(tmp_path / "head", target_dir=target)
    layer = read_json(head / "config.json")["transformer_layer_config"]
    edit_json(head / "config.json", transformer_layer_config=layer | {"rope_parameters": rope})
    engine = exported(target, head, tmp_path / "engine")
    again, draft = open_pair(target, engine.path / "drafter").draft, engine.manifest.draft
    assert again == draft and draft is not None and draft.attentions[0].rope.scaling == "yarn"


def test_biases_of_attention_are_exported(target: Path, tmp_path: Path) -> None:
    head = save_head(tmp_path / "head", target_dir=target)
    tensors = load_file(head / "model.safetensors")
    biases = {
        f"{name.removesuffix('.weight')}.bias": torch.linspace(-1, 1, len(tensor))
        for name, tensor in tensors.items()
        if ".self_attn." in name
    }
    edit_tensors(head, **biases)
    config = read_json(head / "config.json")
    edit_json(
        head / "config.json", transformer_layer_config=config["transformer_layer_config"] | {"attention_bias": True}
    )
    directory = exported(target, head, tmp_path / "engine").path / "drafter"
    assert read_json(directory / "config.json")["attention_bias"] is True
    assert "midlayer.self_attn.o_proj.bias" in load_file(directory / "model.safetensors")
    run = decode(make_executor(target, directory), PROMPT, NUM_NEW, num_draft_tokens=K)
    assert run.blocks == decode(make_executor(target, head), PROMPT, NUM_NEW, num_draft_tokens=K).blocks
    save_file(tensors, head / "model.safetensors", {"format": "pt"})
    edit_json(head / "config.json", **config)
    assert run.blocks != decode(make_executor(target, head), PROMPT, NUM_NEW, num_draft_tokens=K).blocks


REFUSED: dict[str, tuple[dict[str, Any], Change, str]] = {
    "a normed residual": (
        {"norm_before_residual": True},
        lambda head: None,
        "drafter chain has_normed_residual: expected False, for TensorRT-LLM would ignore it, found True",
    ),
    "Qwen3's layer": ({"architecture": "qwen3"}, lambda head: None, "mixer has_qk_norm: expected False"),
    "a window": ({"sliding_window": 5}, lambda head: None, "mixer mask window: expected None"),
    "an embedding that was trained": (
        {"draft_tokens": SOME},
        lambda head: edit_tensors(head, **{"embed_tokens.weight": torch.ones(12, 64)}),
        "drafter embedding: expected the target's, which TensorRT-LLM takes where both are equally wide",
    ),
    "a whole vocabulary in another order": (
        {},
        lambda head: edit_tensors(head, d2t=torch.tensor([11, *[-1] * 11])),
        "drafter tensor 'd2t': expected zeros",
    ),
}


@pytest.mark.parametrize(("options", "change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_heads_that_tensorrt_llm_would_read_otherwise_are_refused(
    target: Path, tmp_path: Path, options: dict[str, Any], change: Change, message: str
) -> None:
    head = save_head(tmp_path / "head", target_dir=target, **options)
    change(head)
    with pytest.raises(BuildError) as raised:
        exported(target, head, tmp_path / "engine")
    assert message in str(raised.value) and not (tmp_path / "engine").exists()
