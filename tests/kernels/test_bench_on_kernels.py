"""`bench speedup` over the GPU kernels: its sides, its options, and K by batch size, as on a CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.backends.torch.backend import TorchBackend
from dflash_trt.cli.main import cli
from tests.dflash2_files import make_dflash2_drafter
from tests.engine_dir.building import build
from tests.factories import make_target, make_zlab_drafter
from tests.kernels.test_step_on_dflash2 import FEW_HEADS

LIMITS = {"max_batch_size": 2, "max_seq_len": 32, "max_num_tokens": 32, "page_size": 4}
COUNTED = ("algorithm", "num_draft_tokens", "num_equal_texts", "acceptance_length", "accepted_fraction_by_position")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines dflash, dflash2 and eagle3 of one target."""
    from tests.eagle3_files import save_eagle3_head  # skips without `speculators`

    root = tmp_path_factory.mktemp("bench")
    target = make_target(root / "target", num_hidden_layers=2, **FEW_HEADS)
    sizes = {"target_layer_ids": (0,), "block_size": 3, **FEW_HEADS}
    drafters = {
        "dflash": make_zlab_drafter(root / "drafter.dflash", target_dir=target, **sizes),
        "dflash2": make_dflash2_drafter(root / "drafter.dflash2", target_dir=target, **sizes),
        "eagle3": save_eagle3_head(root / "drafter.eagle3", target_dir=target, aux_hidden_state_layer_ids=(1, 2)),
    }
    for name, drafter in drafters.items():
        build(root, root / name, target=str(target), drafter=str(drafter), **LIMITS)
    (root / "prompts.jsonl").write_text(json.dumps({"prompt": "x="}) + "\n")
    return root


def compared(root: Path, *options: object) -> list[dict[str, Any]]:
    engines = [root / name for name in ("dflash", "dflash2", "eagle3")]
    few = ("--rounds", 1, "--max-new-tokens", 3, "--concurrency", 1, "--json", "--device", "cpu")
    words = ["bench", "speedup", *engines, "--input-file", root / "prompts.jsonl", *few, *options]
    result = CliRunner().invoke(cli, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    reports: list[dict[str, Any]] = json.loads(result.stdout)
    return [{name: report[name] for name in COUNTED} for report in reports]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")
def test_drafters_are_compared_over_the_kernels_as_on_a_cpu(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--draft-length", "1:2,2:1", "--kv-cache-bytes", 1 << 20)
    expected, opened = compared(root, *options), []

    def open_on_kernels(backend: TorchBackend, engine: Any, config: Any, **rest: Any) -> TorchGpuExecutor:
        opened.append(rest["draft_lens"])
        return TorchGpuExecutor.open(engine, config, device=torch.device("cpu"), draft_lens=rest["draft_lens"])

    monkeypatch.setattr(TorchBackend, "open", open_on_kernels)
    assert compared(root, *options) == expected
    assert [report["algorithm"] for report in expected] == [None, "dflash", "dflash2", "eagle3"]
    assert [report["num_equal_texts"] for report in expected] == [1] * 4
    assert opened == [(0,), (1, 2), (1, 2), (1, 2)] * 2
