"""`build --check` from config.json files alone, through TensorRT-RTX."""

import json
import shutil
import sys

import pytest
from click.testing import CliRunner

from dflash_trt.cli.main import cli
from tests.checkpoint.expert_files import to_mxfp4
from tests.factories import make_target
from tests.trt.test_step_tokens import make_pair

BACKENDS = ("torch", "tensorrt")
LIMITS = ["--max-batch-size", 4, "--max-num-tokens", 64, "--max-seq-len", 64, "--page-size", 4]


def check(*words):
    return CliRunner().invoke(cli, [str(word) for word in ("build", "--check", *words)])


def planned_for(*words):
    result = CliRunner().invoke(cli, [str(word) for word in ("plan", *words, "--gpu", "h200", "--json")])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def config_of(path, directory, **changes):
    """A directory with a checkpoint's config.json, changed, and nothing else."""
    directory.mkdir()
    fields = json.loads((path / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def test_2_to_the_33_logits_of_a_step_compile(trt, tmp_path):
    """A full batch of 2048 with K 15 over a vocabulary of 262144; and sizes are those that the weights will have."""
    target, drafter = make_pair(tmp_path, block_size=16)
    target = config_of(target, tmp_path / "t", vocab_size=262144)
    drafter = config_of(drafter, tmp_path / "d", vocab_size=262144)
    result = check(
        "--target", target, "--drafter", drafter, "--max-batch-size", 2048, "--max-num-tokens", 32768,
        "--max-seq-len", 64, "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["profiles"]["decode"]["K+1"] == [2, 16, 16]
    assert report["layer_ids"] == {"target": [0], "draft": [0]}
    heads = 2 * 262144 * 64 * 2  # embedding and lm_head in bfloat16; the layers of this pair are small
    assert heads < report["weights_bytes"] < 1.02 * heads
    assert report["weights_bytes"] < report["plan_bytes"] < 1.01 * report["weights_bytes"]
    assert report["peak_memory_bytes"] < 4e9
    assert report["notes"][0] == "4,096 of 262,144 rows of the embedding were built (--check=full: all)"
    assert "only config.json files were read" in report["notes"][1]


def test_each_rank_whose_network_differs_is_checked(trt, tmp_path):
    """Rank 0 alone adds the biases of linear layers whose results are summed."""
    target = make_target(tmp_path / "target", family="llama", tokenizer=False, attention_bias=True, mlp_bias=True)
    result = check("--target", config_of(target, tmp_path / "t"), *LIMITS, "--tp-size", 2, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ranks"] == [0, 1]
    assert report["layer_counts"]["DIST_COLLECTIVE"] == 2 + 1  # two sums in the layer, and one gathering of logits
    assert "state_pools INT64 [1]" in report["inputs"]


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_a_deterministic_engine_adds_up_nothing_in_tensorrts_own_layers(trt, tmp_path, family):
    target = make_target(tmp_path / "target", family=family, tokenizer=False)
    words = ["--backend", "tensorrt", "--deterministic", "--tp-size", 2, "--json"]
    result = check("--target", config_of(target, tmp_path / "t"), *LIMITS, *words)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert list(report["profiles"]) == ["mixed"]
    assert not {"MATRIX_MULTIPLY", "REDUCE"} & set(report["layer_counts"])


def test_hybrids_are_checked_with_their_recurrent_state(trt, tmp_path):
    target = make_target(tmp_path / "hybrid", family="qwen3_5_text", tokenizer=False)
    pair = ["--target", config_of(target, tmp_path / "t")]
    result = check(*pair, *LIMITS, "--tp-size", 2, "--backend", "tensorrt", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["layer_ids"]["target"] == [0, 2]  # a delta net and attention
    assert "slot_ids INT64 [-1]" in report["inputs"]
    assert "state_pools INT64 [7]" in report["inputs"]  # six of a delta net, and one
    assert report["layer_counts"]["PLUGIN_V3"] == 2 + 2  # a mixer each, the sampler and scores
    heads, channels, records = 2, 2 * 8 + 2 * 12, 1
    floats = heads * 8 * 12 + records * (8 + heads * 12 + heads)
    window = (4 - 1 + records) * channels
    assert report["state_bytes_per_slot"] == 3 * (4 * floats + 2 * window + 4)  # of three of four layers
    planned = planned_for(*pair, *LIMITS, "--tp-size", 2, "--backend", "tensorrt")
    assert planned["rank_memory"]["weights_bytes"] == report["plan_bytes"]


def test_the_tables_of_a_plan_show_mixers_that_are_not_alike(tmp_path):
    target = config_of(make_target(tmp_path / "hybrid", family="qwen3_5_text", tokenizer=False), tmp_path / "t")
    result = CliRunner().invoke(cli, ["plan", "--target", str(target), *map(str, LIMITS), "--gpu", "h200"])
    assert result.exit_code == 0, result.output
    rows = {tuple(word.strip() for word in line.split("│")[1:-1]) for line in result.stdout.splitlines()}
    assert {("gated delta nets", "3 of 4 layers"), ("num_heads", "4")} <= rows
    assert any(row[:1] == ("rope",) and "theta" in row[1] for row in rows)


def test_ranks_that_cannot_be_are_refused_before_any_work(tmp_path):
    target = config_of(make_target(tmp_path / "target"), tmp_path / "t")
    result = check("--target", target, "--tp-size", 3)
    assert result.exit_code == 2
    assert "num_heads" in result.stderr


def test_what_tensorrt_lacks_on_so_many_ranks_is_refused_before_any_work(tmp_path, monkeypatch):
    def problems(target, draft, quantization, dtype, mapping):
        return [f"refused on {mapping.tp_size} ranks in {dtype}"]

    monkeypatch.setattr("dflash_trt.compile.tensorrt_check.unsupported_problems", problems)
    result = check("--target", config_of(make_target(tmp_path / "target"), tmp_path / "t"), "--tp-size", 2)
    assert result.exit_code == 1
    assert "refused on 2 ranks in bfloat16" in result.stderr


@pytest.mark.parametrize("words", [(), pytest.param(("--tp-size", 2, "--ep-size", 2), marks=pytest.mark.slow)])
def test_experts_in_mxfp4_are_checked_packed(trt, tmp_path, words):
    target = make_target(tmp_path / "moe", family="gpt_oss", tokenizer=False)
    to_mxfp4(target)
    result = check("--target", config_of(target, tmp_path / "e"), *LIMITS, *words, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["layer_ids"] == {"target": [0, 1]}  # with a window and without
    assert {"page_table INT32 [-1, -1]", "page_table.6 INT32 [-1, -1]"} <= set(report["inputs"])
    assert report["layer_counts"]["PLUGIN_V3"] == 2 + 2 + 2  # attention, experts, the sampler and scores
    assert report["ranks"] == ([0, 1] if words else [0])
    assert report["weights_bytes"] < 0.6 * (4 * 8 * 3 * 64 * 64 * 2)  # less than the experts alone in bfloat16
    planned = [planned_for("--target", tmp_path / "e", *LIMITS, *words, "--backend", name) for name in BACKENDS]
    assert [plan["rank_memory"]["weights_bytes"] for plan in planned] == [report["weights_bytes"], report["plan_bytes"]]
    assert planned[0]["target"]["kv_bytes_per_token"] == report["kv_bytes_per_token"]
    assert planned[0]["build_config"] == report["build_config"]


def test_experts_in_int8_are_checked_as_integers(trt, tmp_path):
    target = config_of(make_target(tmp_path / "moe", family="qwen3_moe", tokenizer=False), tmp_path / "e")
    words = ("--target", target, *LIMITS, "--quantization", "int8")
    result = check(*words, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["layer_counts"]["PLUGIN_V3"] == 2 + 2 + 2  # attention and experts, qkv and o, the sampler and scores
    planned = [planned_for(*words, "--backend", name)["rank_memory"]["weights_bytes"] for name in BACKENDS]
    assert planned == [report["weights_bytes"], report["plan_bytes"]]


def test_experts_without_triton_are_refused_with_the_way_to_get_it(trt, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    target = make_target(tmp_path / "moe", family="gpt_oss", tokenizer=False)
    result = check("--target", config_of(target, tmp_path / "e"), *LIMITS)
    assert result.exit_code == 1
    assert "triton: expected an importable Python package" in result.stderr
    assert "pip install 'dflash-trt[kernels]'" in result.stderr


def test_mxfp4_in_float16_is_refused_before_any_work(tmp_path):
    target = make_target(tmp_path / "moe", family="gpt_oss", tokenizer=False)
    to_mxfp4(target)
    words = ["--target", config_of(target, tmp_path / "e"), "--backend", "tensorrt", "--dtype", "float16"]
    result = check(*words)
    assert result.exit_code == 1
    assert "dtype of weights in mxfp4: expected bfloat16 or float32, found float16" in result.stderr


def test_tensors_that_are_there_are_proven(tmp_path):
    target = shutil.copytree(make_target(tmp_path / "target"), tmp_path / "t")
    fields = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(fields | {"intermediate_size": 48}))
    result = check("--target", target, *LIMITS)
    assert result.exit_code == 1
    assert "gate_proj.weight" in result.stderr


@pytest.mark.parametrize("word", ["--check=some", "--check="])
def test_another_word_for_the_checked_layers_is_refused(word):
    result = CliRunner().invoke(cli, ["build", word])
    assert result.exit_code == 2
    assert "'kinds', 'full'" in result.output
