import json
import math

from safetensors.torch import load_file

FULL = {"window": None, "is_causal": False, "is_window_anchored": False}


def test_json_describes_both_models_limits_files_and_provenance(engine_dir, invoke) -> None:
    result = invoke("inspect", engine_dir, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["target"]["family"] == "qwen3"
    assert report["target"]["num_layers"] == 4
    assert [layer["mixer"]["mask"] for layer in report["draft"]["layers"]] == [FULL] * 2
    assert report["draft"]["target_layer_ids"] == [0, 2]
    assert report["draft"]["max_draft_len"] == 3
    assert report["build_config"]["max_seq_len"] == 96
    assert report["has_tokenizer"] is True
    assert all(entry["is_hash_verified"] for entry in report["files"].values())
    assert report["provenance"]["command"][:2] == ["dflash-trt", "build"]


def test_sizes_are_those_of_the_stored_tensors(engine_dir, invoke) -> None:
    report = json.loads(invoke("inspect", engine_dir, "--json").stdout)
    tensors = load_file(engine_dir / "rank0.safetensors")
    for model in ("target", "draft"):
        own = [tensor for name, tensor in tensors.items() if name.startswith(f"{model}.")]
        assert report[model]["num_parameters"] == sum(math.prod(tensor.shape) for tensor in own)
        assert report[model]["weights_bytes"] == sum(tensor.nbytes for tensor in own)
    # K and V, layers, heads, head_dim, float32
    assert report["target"]["kv_bytes_per_token"] == 2 * 4 * 2 * 16 * 4
    assert report["draft"]["kv_bytes_per_token"] == 2 * 2 * 4 * 8 * 4


def test_text_says_what_a_person_asks(engine_dir, invoke) -> None:
    result = invoke("inspect", engine_dir)
    assert result.exit_code == 0
    for words in (
        "qwen3",
        "not causal",
        "target layers 0, 2 (0-based)",
        "K = 3 tokens",
        "K/V bytes per token",
        "max_seq_len 96",
        "size and sha256",
        "built by: dflash-trt build",
    ):
        assert words in result.stdout


def test_an_engine_without_a_drafter_is_described(target, tmp_path, invoke) -> None:
    assert invoke("build", "--target", target, "-o", tmp_path / "engine[1]").exit_code == 0
    result = invoke("inspect", tmp_path / "engine[1]")
    assert result.exit_code == 0
    assert "drafter" not in result.stdout
    assert f"engine {tmp_path}/engine[1]: version 2" in result.stdout


def test_a_missing_engine_is_one_clear_error(tmp_path, invoke) -> None:
    result = invoke("inspect", tmp_path / "none")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "expected an engine directory, found nothing at that path. Build one:" in result.stderr
