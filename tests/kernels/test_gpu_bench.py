"""scripts/gpu_bench as far as a machine without a GPU goes: every measured call runs, on tiny shapes; none is timed."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_bench_parts.kernels
    import gpu_bench_parts.models
    import gpu_bench_parts.report
    import gpu_bench_parts.steps
    import gpu_bench_parts.timing

    yield gpu_bench_parts
    for name in [name for name in sys.modules if name.startswith("gpu_bench_parts")]:
        del sys.modules[name]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it measures instead")
def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    command = [sys.executable, str(SCRIPTS / "gpu_bench.py"), "--part", "kernels"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: gpu_bench: expected a CUDA GPU") and result.stderr.count("\n") == 1


def test_every_kernel_case_launches_and_its_floor_counts_real_bytes(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = parts.kernels
    for name, size in {"HEADS": 2, "KV_HEADS": 1, "HEAD_DIM": 16, "HIDDEN": 64, "FFN": 96, "VOCAB": 300}.items():
        monkeypatch.setattr(kernels, name, size)
    monkeypatch.setattr(kernels, "_SPLIT", (2, 1, 1))
    monkeypatch.setattr(kernels, "PAGE_SIZE", 4)
    monkeypatch.setattr(kernels, "DTYPE", torch.float32)
    monkeypatch.setattr(kernels, "DEVICE", torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    cases = [
        kernels._decode_attention(2, 3, 9),
        kernels._draft_attention(2, 3, 9),
        kernels._prefill_attention(6),
        *kernels._row_kernels(3),
        *kernels._linears(16),
        *kernels._vocabulary_kernels(2),
    ]
    for case in cases:
        case.make()()
        for name, make in case.torch_kernels.items():
            if not name.startswith("SDPA"):  # those are the GPU's
                make()()
        assert case.num_bytes > 0
    assert len({(case.kernel, case.shape) for case in cases}) == len(cases)


def test_a_tiny_fp8_engine_with_random_weights_steps(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    models = parts.models
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        monkeypatch.setattr(models, "DTYPE", torch.float32)  # the interpreter's bfloat16 is not to be trusted
    target = models.target_spec("tiny")
    draft = models.draft_spec("tiny", target)
    executor = models.make_executor(target, draft, "fp8", max_batch_size=2, max_seq_len=40, device=device)
    batch = parts.steps.decode_batch(1, 2, 20, vocab_size=target.vocab_size)
    result = executor.step(batch)
    assert all(len(row.draft_tokens) == 2 for row in result.requests)
    executor.enqueue(batch, times=1)
    executor.wait()
    again = executor.step(batch)
    assert [row.draft_tokens for row in again.requests] == [row.draft_tokens for row in result.requests]


def test_results_are_written_as_json_and_as_tables(parts: Any, tmp_path: Path) -> None:
    from gpu_bench_parts.report import Report

    report = Report(directory=tmp_path / "out", command=["gpu_bench", "--part", "kernels"])
    report.add("kernels", {"kernel": "a", "time_us": 1.23456})
    report.add("kernels", {"kernel": "b", "time_us": 2.0, "note": "x"})
    report.leave_out("kernel c: out of time")
    report.fail("kernel d", RuntimeError("it broke\nhere"))
    report.write()
    assert json.loads((tmp_path / "out" / "results.json").read_text())["tables"]["kernels"][0]["time_us"] == 1.23456
    lines = (tmp_path / "out" / "results.md").read_text().splitlines()
    assert "| kernel | time_us | note |" in lines and "| a | 1.235 |  |" in lines and "| b | 2 | x |" in lines
    assert "- kernel c: out of time" in lines and "- kernel d: RuntimeError: it broke" in lines


def test_weights_and_sums_of_a_step_are_counted(parts: Any) -> None:
    models = parts.models
    target = models.target_spec("qwen3-8b")
    draft = models.draft_spec("qwen3-8b", target)
    plain = models.weight_bytes(target, draft, "bf16", has_drafts=False)
    with_drafts = models.weight_bytes(target, draft, "bf16", has_drafts=True)
    packed = models.weight_bytes(target, draft, "fp8", has_drafts=True)
    embedding = 151936 * 4096
    parameters = 8_190_735_360  # published as 8.2 B
    fc_and_kv = 5 * 4096 * 4096 + 10 * 1024 * 4096 + 4096
    assert plain == 2 * (parameters - embedding + fc_and_kv)
    assert packed < with_drafts < 1.3 * plain
    one = models.linear_flops(target, draft, num_tokens=1, num_rows=1, num_drafts=0)
    assert one == pytest.approx(plain, rel=1e-3)  # two operations for every two bytes read
