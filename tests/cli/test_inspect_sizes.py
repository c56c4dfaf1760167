"""The sizes that `inspect` prints are those of the files, and of the pages that a run allocates, in every format.

Those that `plan` prints before the build are the same.
"""

import importlib.util
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.filesize import decimal
from safetensors.torch import load_file

from dflash_trt.backends.page_budget import plan_engine_pages
from dflash_trt.backends.torch.loading import allocate_state, load_network, states_of
from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from tests.factories import make_speculators_drafter, make_target, make_zlab_drafter

needs_modelopt = pytest.mark.skipif(
    importlib.util.find_spec("modelopt") is None, reason="nvidia-modelopt is not installed: scripts/test installs it"
)

KV_CACHE_BYTES = 1 << 20
LIMITS = {"max_seq_len": 64, "page_size": 4, "max_batch_size": 2}
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "fp8", torch.int64: "int64"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`dense` with a z-lab drafter and biases, `vocabulary` with a head and a vocabulary of its own, `experts`."""
    root = tmp_path_factory.mktemp("pairs")
    biases = {"attention_bias": True, "intermediate_size": 128}
    dense = make_target(root / "dense", vocab_size=32, tokenizer=False, **biases)
    make_zlab_drafter(root / "drafter", target_dir=dense, attention_bias=True, intermediate_size=128)
    make_speculators_drafter(root / "vocabulary", target_dir=dense, draft_vocab_size=16)
    experts = make_target(root / "experts", family="qwen3_moe", vocab_size=32, tokenizer=False)
    make_zlab_drafter(root / "experts_drafter", target_dir=experts)
    rows = [{"prompt_token_ids": [(i * k) % 32 for i in range(40)]} for k in (1, 5, 7, 11)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


CASES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "draft vocabulary": {"dtype": "bfloat16", "drafter": "vocabulary"},
    "no drafter": {"dtype": "bfloat16", "drafter": None},
    "fp8 pages": {"dtype": "bfloat16", "quantization": {"kv_cache": "fp8"}},
    "fp8 target pages": {"dtype": "float32", "quantization": {"kv_cache": "fp8", "draft_kv_cache": "none"}},
    "fp8": {"dtype": "bfloat16", "quantization": {"target": "fp8"}},
    "fp8, fp8 pages": {"dtype": "float32", "quantization": {"target": "fp8", "lm_head": "fp8", "kv_cache": "fp8"}},
    "nvfp4": {"dtype": "bfloat16", "quantization": {"target": "nvfp4"}},
    "nvfp4, fp8 pages": {"dtype": "bfloat16", "quantization": {"target": "nvfp4", "kv_cache": "fp8"}},
    "nvfp4_w4a16": {"dtype": "bfloat16", "quantization": {"target": "nvfp4_w4a16", "draft_lm_head": "nvfp4_w4a16"}},
    "nvfp4_w4a16, fp8 pages": {
        "dtype": "float32",
        "quantization": {"target": "nvfp4_w4a16", "drafter": "fp8", "kv_cache": "fp8"},
    },
    "experts": {"dtype": "bfloat16", "target": "experts", "drafter": "experts_drafter"},
    "experts, fp8, fp8 pages": {
        "dtype": "bfloat16",
        "target": "experts",
        "drafter": "experts_drafter",
        "quantization": {"target": "fp8", "kv_cache": "fp8"},
    },
    "two ranks": {"dtype": "bfloat16", "tp_size": 2},
    "four ranks, with copies of the K/V heads": {"dtype": "bfloat16", "tp_size": 4},
    "two ranks, nvfp4_w4a16, fp8 pages": {
        "dtype": "bfloat16",
        "tp_size": 2,
        "quantization": {"target": "nvfp4_w4a16", "drafter": "fp8", "kv_cache": "fp8"},
    },
}


def build(root: Path, output: Path, fields: dict[str, Any]) -> EngineDir:
    fields = {"target": "dense", "drafter": "drafter"} | LIMITS | fields
    if "quantization" in fields:
        fields["quantization"] = fields["quantization"] | {"calibration": {"prompts": "prompts.jsonl"}}
    config = BuildConfig(**fields)
    return build_engine(
        config, output, base_dir=root, overwrite=False, command=("build",), progress=lambda progress: None
    )


@needs_modelopt
@pytest.mark.parametrize("case", CASES)
def test_sizes_are_those_of_the_files_and_of_the_pages(case: str, root: Path, tmp_path: Path, invoke) -> None:
    engine = build(root, tmp_path / "engine", CASES[case])
    report = json.loads(invoke("inspect", engine.path, "--json").stdout)
    shown = invoke("inspect", engine.path).stdout
    config = engine.manifest.pretrained_config
    network = load_network(engine, rank=0)
    plan = plan_engine_pages(engine.manifest, RuntimeConfig(kv_cache_bytes=KV_CACHE_BYTES))
    states = states_of(network, config.quantization)
    pages = allocate_state(states, num_pages=plan.num_pages, page_size=plan.page_size)
    files = [load_file(engine.weights_path(rank)) for rank in range(config.mapping.world_size)]
    for model, pool in (("target", pages.target_kv), ("draft", pages.draft_kv)):
        if report[model] is None:
            assert not pool
            continue
        stored = [tensor for file in files for name, tensor in file.items() if name.startswith(f"{model}.")]
        weights_bytes = sum(tensor.nbytes for tensor in stored)
        kv_bytes = sum(layer.tensor.nbytes for layer in pool) // plan.num_tokens
        assert report[model]["weights_bytes"] == weights_bytes
        assert report[model]["kv_bytes_per_token"] == kv_bytes
        assert report[model]["kv_format"] == DTYPES[pool[0].tensor.dtype]
        assert decimal(weights_bytes) in shown
        assert f" {kv_bytes:,} " in shown
    checkpoint = load_file(root / CASES[case].get("target", "dense") / "model.safetensors")
    assert report["target"]["num_parameters"] == sum(tensor.numel() for tensor in checkpoint.values())
    _assert_formats(report, files, config.quantization.linears if config.quantization else {}, shown)
    _assert_planned(engine, report, files, CASES[case], root, tmp_path, invoke)


def _assert_planned(
    engine: EngineDir,
    report: dict[str, Any],
    files: list[dict[str, torch.Tensor]],
    fields: dict[str, Any],
    root: Path,
    tmp_path: Path,
    invoke: Any,
) -> None:
    """From the checkpoints, and from their config.json files alone, where these say everything."""
    directories = {"target": fields.get("target", "dense"), "drafter": fields.get("drafter", "drafter")}
    directories = {role: name for role, name in directories.items() if name}
    for name in directories.values():
        (tmp_path / name).mkdir()
        shutil.copy(root / name / "config.json", tmp_path / name)
    rank_bytes = sum(tensor.nbytes for tensor in files[0].values())
    for parent in (root, tmp_path) if directories.get("drafter") != "vocabulary" else (root,):
        options = LIMITS | fields | {role: str(parent / name) for role, name in directories.items()}
        (tmp_path / "plan.yaml").write_text(yaml.safe_dump(options))
        planned = json.loads(invoke("plan", tmp_path / "plan.yaml", "--gpu", "b300", "--json").stdout)
        for part in ("target", "draft"):
            assert planned[part] == report[part]
        for part in ("dtype", "mapping", "build_config"):
            assert planned[part] == report[part]
        assert planned["rank_memory"]["weights_bytes"] == rank_bytes
        free_bytes = planned["gpu"]["memory_bytes"] - planned["rank_memory"]["context_bytes"] - rank_bytes
        budget = RuntimeConfig(kv_cache_bytes=int(0.8 * free_bytes))
        assert planned["kv_pages"] == json.loads(json.dumps(asdict(plan_engine_pages(engine.manifest, budget))))
        assert planned["fits"]


def _assert_formats(
    report: dict[str, Any], files: list[dict[str, torch.Tensor]], linears: dict[str, str], shown: str
) -> None:
    """By format: codes and scales of quantized linears under its name, other tensors under that of their dtype."""
    expected: dict[str, dict[str, int]] = {"target": {}, "draft": {}}
    for name, tensor in ((name, tensor) for file in files for name, tensor in file.items()):
        owner = next((linear for linear in linears if name == linear or name.startswith(f"{linear}.")), None)
        tensor_format = DTYPES[tensor.dtype] if owner is None else linears[owner]
        formats = expected[name.partition(".")[0]]
        formats[tensor_format] = formats.get(tensor_format, 0) + tensor.nbytes
    for model, formats in expected.items():
        if report[model] is not None:
            assert report[model]["weights_bytes_by_format"] == formats
            for name, num_bytes in formats.items():
                assert f"in {name}" in shown
                assert decimal(num_bytes) in shown
