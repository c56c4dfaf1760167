"""`build --backend tensorrt --tp-size N`: every rank's network through TensorRT-RTX's real builder."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from dflash_trt.backends.tensorrt import build_rank
from dflash_trt.backends.tensorrt.build_rank import record_of
from dflash_trt.backends.tensorrt.builder import PlanOptions
from dflash_trt.cli.main import cli
from dflash_trt.engine_dir import EngineDir
from dflash_trt.engine_dir.provenance import TensorRTRecord
from tests.factories import make_target, make_zlab_drafter


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair whose columns are whole blocks of 16 on 4 ranks, with 2 K/V heads and 1."""
    root = tmp_path_factory.mktemp("pair")
    target = make_target(root / "target", vocab_size=64, tokenizer=False, num_hidden_layers=1, intermediate_size=128)
    sizes = {"num_layers": 1, "target_layer_ids": (0,), "intermediate_size": 128, "num_key_value_heads": 1}
    make_zlab_drafter(root / "drafter", target_dir=target, mask_token_id=63, **sizes)
    prompts = [{"prompt_token_ids": [(i * k) % 60 for i in range(40)]} for k in (1, 7, 11, 13)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return root


def built(
    root: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, **fields: Any
) -> tuple[EngineDir, list[TensorRTRecord]]:
    """An engine of a pair, and what was recorded of each rank."""
    records: list[TensorRTRecord] = []
    library = directory / "library.so"
    library.write_bytes(b"plugins")
    options = PlanOptions(flavor="tensorrt_rtx", plugin_library=library, compute_capability="SM120")
    monkeypatch.setattr(build_rank, "plan_options", lambda config, base_dir: options)

    def recorded(*built: Any, **fields: Any) -> TensorRTRecord:
        """With the rank as its time, by which ranks differ."""
        records.append(record_of(*built, **fields).model_copy(update={"build_time_s": float(len(records))}))
        return records[-1]

    monkeypatch.setattr(build_rank, "record_of", recorded)
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / "cache"))
    pair = {"target": str(root / "target"), "drafter": str(root / "drafter"), "backend": "tensorrt"}
    sizes = {"max_batch_size": 2, "max_num_tokens": 16, "max_seq_len": 32, "page_size": 8, "max_draft_len": 2}
    (directory / "build.yaml").write_text(json.dumps(pair | sizes | fields))
    result = CliRunner().invoke(cli, ["build", str(directory / "build.yaml"), "-o", str(directory / "engine")])
    assert result.exit_code == 0, result.output
    return EngineDir.open(directory / "engine"), records


def plans_of(engine: EngineDir, num_ranks: int) -> list[bytes]:
    return [(engine.path / f"rank{rank}.engine").read_bytes() for rank in range(num_ranks)]


@pytest.mark.parametrize(
    ("tp_size", "quantization"),
    [
        (2, "nvfp4"),
        pytest.param(2, "none", marks=pytest.mark.slow),
        pytest.param(2, "fp8", marks=pytest.mark.slow),
        pytest.param(4, "none", marks=pytest.mark.slow),
        pytest.param(4, "fp8", marks=pytest.mark.slow),
        pytest.param(4, "nvfp4", marks=pytest.mark.slow),
    ],
)
def test_a_plan_for_every_rank_is_built_and_written(
    trt: ModuleType, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp_size: int, quantization: str
) -> None:
    fields: dict[str, Any] = {"tp_size": tp_size}
    if quantization != "none":
        fields["quantization"] = {"target": quantization, "drafter": quantization, "kv_cache": "fp8"}
        fields["quantization"]["calibration"] = {"prompts": str(root / "prompts.jsonl")}
    engine, records = built(root, tmp_path, monkeypatch, **fields)
    plans = plans_of(engine, tp_size)
    assert min(map(len, plans)) > 50_000
    assert len(set(plans)) == tp_size  # each with its own weights
    record = engine.manifest.tensorrt
    assert record is not None and record.collectives == "native"
    assert len(records) == tp_size and record == records[0] != records[-1]


def test_ranks_with_requests_of_their_own_have_plans(
    trt: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(tmp_path / "target", family="qwen3_moe", vocab_size=64, tokenizer=False, num_hidden_layers=1)
    make_zlab_drafter(tmp_path / "drafter", target_dir=target, mask_token_id=63, num_layers=1, target_layer_ids=(0,))
    fields = {"tp_size": 2, "ep_size": 2, "attention_dp": True, "dtype": "float32"}
    engine, _ = built(tmp_path, tmp_path, monkeypatch, **fields)
    assert len(set(plans_of(engine, 2))) == 2
    assert engine.manifest.pretrained_config.mapping.dp_size == 2
