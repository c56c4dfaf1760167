"""Every key, type and literal of llm_args.yaml and model.yaml stands in the manifest of TensorRT-LLM."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_trt.backends.tensorrt_llm.llm_args import llm_args
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.mapping import Mapping as RankMapping
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from dflash_trt.engine_dir import EngineLimits, PretrainedConfig
from dflash_trt.engine_dir.provenance import triton_model, yaml_text
from scripts.compare_trtllm_manifest import SNAPSHOT, arguments_of, differences, snapshot_arguments
from tests.factories import make_eagle3_head, make_target, make_zlab_drafter

KNOWN = json.loads(SNAPSHOT.read_text())
TYPES: dict[str, type | tuple[type, ...]] = {"int": int, "bool": bool, "float": (int, float), "str": str}
LIMITS = EngineLimits(max_batch_size=6, max_seq_len=128, max_num_tokens=256, max_draft_len=3, page_size=32)


def problems(args: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """What the manifest does not know, or does not allow."""
    for name, value in args.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from problems(value, f"{path}.")
            if name == "speculative_config":
                known = KNOWN["decoding_configs"].get(value["decoding_type"], value)
                yield from (f"{path}.{field}: not of {value['decoding_type']}" for field in value if field not in known)
        elif path in KNOWN["free_text"]:
            if not isinstance(value, str):
                yield f"{path}: {value!r} is no text"
        elif path not in KNOWN["llm_args"]:
            yield f"{path}: unknown"
        elif not _fits(value, *KNOWN["llm_args"][path]):
            yield f"{path}: {value!r} is no {KNOWN['llm_args'][path]}"


def _fits(value: Any, annotation: str, allowed: list[str]) -> bool:
    if allowed:
        return value in allowed
    kind = next(kind for kind in ("int", "bool", "float") if kind in annotation)
    if "List[" in annotation or "Set[" in annotation:
        return isinstance(value, list) and all(type(item) is int for item in value)
    return isinstance(value, TYPES[kind]) and (kind == "bool") == isinstance(value, bool)


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> list[PretrainedConfig]:
    """With everything that a build can ask for: drafters and none, experts, ranks, FP8 K/V."""
    base = tmp_path_factory.mktemp("pairs")
    dense, experts = make_target(base / "dense"), make_target(base / "experts", family="qwen3_moe")
    first = open_pair(dense, make_zlab_drafter(base / "drafter", target_dir=dense))
    second = open_pair(experts, None)
    third = open_pair(dense, make_eagle3_head(base / "eagle3", target_dir=dense))
    fp8_kv = QuantizationSpec(target_kv=(LayerKvScales(),) * 4)
    mapping = RankMapping(world_size=2, tp_size=2, ep_size=2)
    return [
        PretrainedConfig(target=first.target, draft=first.draft, dtype="bfloat16", quantization=fp8_kv),
        PretrainedConfig(target=second.target, dtype="float16", mapping=mapping),
        PretrainedConfig(target=third.target, draft=third.draft, dtype="bfloat16"),
    ]


def test_every_argument_is_known_with_its_type_and_literal(configs: list[PretrainedConfig]) -> None:
    emitted = [llm_args(config, LIMITS, has_tokenizer=True) for config in configs]
    assert [list(problems(args)) for args in emitted] == [[], [], []]
    assert emitted[0]["kv_cache_config"]["dtype"] == "fp8" and emitted[1]["moe_expert_parallel_size"] == 2
    assert emitted[0]["cuda_graph_config"]["batch_sizes"] == [1, 2, 4, 6]
    assert "speculative_config" in emitted[0] and "speculative_config" not in emitted[1]
    without = llm_args(configs[0], LIMITS, has_tokenizer=False)
    assert emitted[0] == {**without, "guided_decoding_backend": "llguidance"}


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("", {"max_batchsize": 4}, "max_batchsize: unknown"),
        ("", {"attn_backend": "FA3"}, "attn_backend: 'FA3' is no"),
        ("", {"max_seq_len": "128"}, "max_seq_len: '128' is no"),
        ("kv_cache_config", {"enable_block_reuse": 0}, "kv_cache_config.enable_block_reuse: 0 is no"),
        ("speculative_config", {"use_dynamic_tree": True}, "speculative_config.use_dynamic_tree: not of DFlash"),
        ("speculative_config", {"decoding_type": "dflash"}, "speculative_config.decoding_type: 'dflash' is no"),
    ],
)
def test_a_misspelt_key_or_a_wrong_value_is_found(
    configs: list[PretrainedConfig], section: str, change: dict[str, Any], message: str
) -> None:
    args = llm_args(configs[0], LIMITS, has_tokenizer=True)
    (args[section] if section else args).update(change)
    (found,) = problems(args)
    assert found.startswith(message)


def test_the_yaml_says_what_was_meant(configs: list[PretrainedConfig]) -> None:
    for config in configs:
        args = llm_args(config, LIMITS, has_tokenizer=True)
        assert yaml.safe_load(yaml_text(args)) == args
        of_triton = yaml.safe_load(yaml_text(triton_model(args)))
        assert set(of_triton.pop("triton_config")) == set(KNOWN["triton_config"])
        assert of_triton == args


def test_a_newer_manifest_is_compared_path_by_path(tmp_path: Path) -> None:
    rows = [
        {"path": name, "annotation": annotation, "allowed_values": sorted(allowed)}
        for name, (annotation, allowed) in snapshot_arguments().items()
    ]
    assert list(differences(snapshot_arguments(), arguments_of({"TorchLlmArgs": rows}))) == []
    newer = [row for row in rows if row["path"] != "max_seq_len"]
    for row in newer:
        if row["path"] == "kv_cache_config.dtype":
            row["allowed_values"] = ["auto", "nvfp4", "float16", "bfloat16", "float32", "fp8_ds_mla", "mxfp8"]
        if row["path"] == "max_batch_size":
            row["annotation"] = "<class 'str'>"
    (tmp_path / "newer.json").write_text(json.dumps({"TorchLlmArgs": newer}))
    words = [sys.executable, "scripts/compare_trtllm_manifest.py", tmp_path / "newer.json"]
    done = subprocess.run(words, cwd=SNAPSHOT.parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == [
        "kv_cache_config.dtype: no longer fp8",
        "max_batch_size: Optional[int] is now <class 'str'>",
        "max_seq_len: gone",
    ]
