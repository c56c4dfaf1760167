"""A serving run of a whole recipe: what it reports, and that it sees a wait: scripts/test_cuda."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("SOFTWARE_GPU_EXECUTES") != "1":
    pytest.skip("needs PyTorch's CUDA build on a GPU made of software: scripts/test_cuda", allow_module_level=True)

from software_gpu.runtime.library import environment
from software_gpu.serving.run import bars

ROOT = Path(__file__).resolve().parents[2]
WAITS_IN_EVERY_STEP = """
import torch
from dflash_trt.backends.staging import InputStaging
from software_gpu.serving.run import main

upload = InputStaging.upload

def wait_and_upload(staging):
    torch.cuda.current_stream().synchronize()
    upload(staging)

InputStaging.upload = wait_and_upload
main()
"""


def report_of(directory: Path, *program: str, options: Sequence[str] = ()) -> dict[str, Any]:
    path = directory / "report.json"
    command = [sys.executable, *program, "demo", "--shapes", "few", "--json", str(path), *options]
    subprocess.run(command, env=os.environ | environment("h200"), cwd=ROOT, check=True)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.timeout(900)
def test_a_recipe_serves_without_a_wait_and_leaves_nothing(tmp_path: Path) -> None:
    report = report_of(tmp_path, "-m", "software_gpu.serving.run")
    plain, mixed = report["serving"]["plain"], report["serving"]["mixed"]
    for part in (plain, mixed):
        assert (part["num_compiled"], part["num_waits"], part["errors"]) == (0, 0, {}), part
        assert part["num_requests"] == 80 and part["num_new_tokens"] == sum(20 + i % 50 for i in range(80))
    assert report["num_graphs"] > 0 and plain["decode"]["num_on_device"] > 100
    assert mixed["kernels_per_step"] and report["problems"] == [] and report["left_bytes"] == 0
    assert 0 < report["memory_gib"]["weights"] < report["memory_gib"]["graphs"] < report["peak_gib"] < report["gpu_gib"]
    assert report["memory_gib"]["weights"] < report["tensors_gib"] < report["peak_gib"]


@pytest.mark.timeout(900)
def test_a_wait_while_serving_is_reported_with_its_place(tmp_path: Path) -> None:
    """The negative control."""
    report = report_of(tmp_path, "-c", WAITS_IN_EVERY_STEP, options=("--set", "max_seq_len=384"))
    assert "max_seq_len 384 at once" in report["page_plan"]
    plain = report["serving"]["plain"]
    assert plain["num_waits"] >= plain["num_steps"]
    assert all("cudaStreamSynchronize" in wait and "executor.py" in wait for wait in plain["waits"])
    assert any("hold the host up while serving plain" in missed for missed in bars(report))
