"""A network that overflows for one request: `run` says so, the others get their texts, and the exit code is 3."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.backends.torch import executor as torch_executor
from tests.cli.conftest import Invoke

BAD_TOKEN = 77


def damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory, for files are verified: whoever feeds BAD_TOKEN to the target gets NaN from it."""
    load = torch_executor.load_network

    def load_damaged(engine: Any, **options: Any) -> Any:
        network = load(engine, **options)
        embedding = network.target_weights.embedding.clone()
        embedding[BAD_TOKEN] = torch.nan
        return replace(network, target_weights=replace(network.target_weights, embedding=embedding))

    monkeypatch.setattr(torch_executor, "load_network", load_damaged)


@pytest.mark.parametrize("options", [[], ["--temperature", "0.8", "--top-p", "0.9"], ["--no-drafter"]])
def test_a_row_whose_logits_are_not_finite_fails_alone(
    engine_dir: Path, tmp_path: Path, invoke: Invoke, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[10 + i, 20, 30] for i in range(12)]
    prompts[4:4] = [[5, BAD_TOKEN, 9]]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt_token_ids": p, "seed": 3, "max_new_tokens": 6}) + "\n" for p in prompts)
    )
    runs = []
    for is_damaged in (False, True):
        if is_damaged:
            damage(monkeypatch)
        output = tmp_path / f"results {len(runs)}.jsonl"
        result = invoke("run", engine_dir, "--input-file", rows, "--output-file", output, *options)
        assert output.is_file(), result.stderr
        lines = output.read_text().splitlines()
        runs.append((result, [json.loads(line) for line in lines]))
    (healthy, expected), (damaged, found) = runs
    assert (healthy.exit_code, damaged.exit_code) == (0, 3)
    assert "1 of 13 requests failed" in damaged.stderr
    assert found[4]["finish_reason"] == "error"
    assert "the logits are not finite at position 2" in found[4]["error"]
    for row, other in zip(found[:4] + found[5:], expected[:4] + expected[5:], strict=True):
        assert BAD_TOKEN not in other["token_ids"], "choose another token"
        assert (row["token_ids"], row["text"]) == (other["token_ids"], other["text"])
