"""A network that overflows for one request: `run` says so, the others get their texts, and the exit code is 1."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.conftest import Invoke

BAD_TOKEN = 77


@pytest.fixture
def damaged_engine(engine_dir: Path, tmp_path: Path) -> Path:
    """Whoever feeds BAD_TOKEN to the target gets NaN from it."""
    path = shutil.copytree(engine_dir, tmp_path / "engine")
    tensors = load_file(path / "rank0.safetensors")
    tensors["target.embedding"][BAD_TOKEN] = torch.nan
    save_file(tensors, path / "rank0.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("options", [[], ["--temperature", "0.8", "--top-p", "0.9"], ["--no-drafter"]])
def test_a_row_whose_logits_are_not_finite_fails_alone(
    damaged_engine: Path, engine_dir: Path, tmp_path: Path, invoke: Invoke, options: list[str]
) -> None:
    prompts = [[10 + i, 20, 30] for i in range(12)]
    prompts[4:4] = [[5, BAD_TOKEN, 9]]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt_token_ids": p, "seed": 3, "max_new_tokens": 6}) + "\n" for p in prompts)
    )
    runs = []
    for engine in (engine_dir, damaged_engine):
        result = invoke(
            "run", engine, "--input-file", rows, "--output-file", tmp_path / f"{engine.parent.name}.jsonl", *options
        )
        lines = (tmp_path / f"{engine.parent.name}.jsonl").read_text().splitlines()
        runs.append((result, [json.loads(line) for line in lines]))
    (healthy, expected), (damaged, found) = runs
    assert (healthy.exit_code, damaged.exit_code) == (0, 1)
    assert "1 of 13 requests failed" in damaged.stderr
    assert found[4]["finish_reason"] == "error"
    assert "the logits are not finite at position 2" in found[4]["error"]
    for row, other in zip(found[:4] + found[5:], expected[:4] + expected[5:], strict=True):
        assert BAD_TOKEN not in other["token_ids"], "choose another token"
        assert (row["token_ids"], row["text"], row["error"]) == (other["token_ids"], other["text"], None)
