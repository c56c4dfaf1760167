"""scripts/gpu_visit as far as a machine without a GPU goes: cases run on tiny shapes; crashes cost themselves alone."""

import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_trt.kernels import attention_launch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package, at the sizes of a dry run."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_visit_parts.choices
    import gpu_visit_parts.engines
    import gpu_visit_parts.kernel_case
    import gpu_visit_parts.kernels
    import gpu_visit_parts.models
    import gpu_visit_parts.results
    import gpu_visit_parts.setting
    import gpu_visit_parts.steps
    import gpu_visit_parts.supervisor
    import gpu_visit_parts.wheels

    gpu_visit_parts.setting.SETTING.shrink()
    yield gpu_visit_parts
    for name in [name for name in sys.modules if name.startswith("gpu_visit_parts")]:
        del sys.modules[name]


def test_every_kernel_case_launches_and_its_floor_counts_real_bytes(parts: Any) -> None:
    kernels = list(parts.kernels.kernels())
    for kernel in kernels:
        kernel.make()()
        assert kernel.num_bytes > 0
    names = [case.name for case in parts.kernels.cases()]
    assert len(set(names)) == len(names) == len(kernels)


def test_a_broken_kernel_of_pytorch_leaves_our_number(parts: Any) -> None:
    def broken() -> Any:
        raise NotImplementedError("no such kernel\nhere")

    x = torch.ones(4)
    kernel = parts.kernel_case.Kernel(
        kernel="ours", shape="4", num_bytes=16.0, make=lambda: x.sum, torch_kernels={"theirs": broken}
    )
    row = parts.kernel_case.measured(kernel)
    assert row["time_us"] > 0 and row["theirs_us"] == "NotImplementedError: no such kernel"


def test_a_choice_that_computes_something_else_shows(parts: Any) -> None:
    kernel = parts.kernels.decode_attention(2, 3, 9)
    same = parts.choices._attention(kernel, "as it is", {})["attention"][0]
    attend = attention_launch.attend_pages
    patches = {"attend_pages": lambda *given, **words: 2 * attend(*given, **words)}
    other = parts.choices._attention(kernel, "doubled", patches)["attention"][0]
    assert same["max_difference"] == 0 and same["time_us"] > 0
    assert other["max_difference"] > 0.1


def test_a_tiny_fp8_step_is_measured(parts: Any) -> None:
    case = next(iter(parts.steps.cases()))
    (row,) = case.run()["steps"]
    assert row["step_ms"] > 0 and row["device_ms"] > 0 and row["floor_ms"] > 0


def test_an_engine_is_compared_text_by_text(parts: Any) -> None:
    (case,) = parts.engines.cases()
    tables = case.run()
    (row,) = tables["engines"]
    assert row["open_s"] > 0 and row["tok_per_s"] > 0
    kinds = {row["requests"]: row for row in tables["tokens on GPU and CPU"]}
    assert kinds.keys() > {"greedy", "sampled", "rules", "constrained"}
    assert all(row["equal"] == row["texts"] == 4 and row["refused"] == "" for row in kinds.values())
    assert kinds["rules"]["largest_logprob_difference"] < 1e-4
    assert kinds["greedy"]["equal_tokens"] == kinds["greedy"]["tokens"] > 0


def test_texts_that_differ_are_counted_up_to_there(parts: Any) -> None:
    def output(*tokens: int) -> Any:
        logprobs = tuple(-0.1 * token for token in tokens)
        return SimpleNamespace(token_ids=tokens, logprobs=logprobs, error=None, acceptance_length=2.0)

    found, expected = [output(1, 2, 3), output(4, 5)], [output(1, 2, 3), output(4, 6)]
    row = parts.engines._agreement("pair", "greedy", found, expected)
    assert (row["texts"], row["equal"], row["tokens"], row["equal_tokens"]) == (2, 1, 5, 4)


CHILD = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from gpu_visit_parts import supervisor
from gpu_visit_parts.results import Results
results = Results(Path(sys.argv[2]))
supervisor.has_started(7, results)
for case in ("first", "crash", "broken", "hang", "last"):
    if case in results.done(7):
        continue
    results.start(7, case)
    if case == "crash":
        os.abort()
    if case == "hang":
        time.sleep(60)
    results.end(7, case, "failed" if case == "broken" else "ok", tables={"t": [{"case": case, "us": 1.23456}]})
    if case == "broken":
        sys.exit(supervisor.CONTEXT_IS_BROKEN)
"""


def test_a_case_that_crashes_or_hangs_costs_itself_alone(parts: Any, tmp_path: Path) -> None:
    results = parts.results.Results(tmp_path)
    command = [sys.executable, "-c", CHILD, str(SCRIPTS), str(tmp_path)]
    parts.supervisor.run_part(7, command, results, deadline_s=time.monotonic() + 60, max_case_s=2.0)
    found = {case: (row["status"], row.get("why", "")) for (_, case), row in results.cases().items()}
    assert found["first"] == found["last"] == ("ok", "")
    assert found["crash"] == ("failed", "the process ended with -6")
    assert found["broken"][0] == "failed" and found["hang"] == ("failed", "no end after 2 s")
    lines = (tmp_path / "results.md").read_text().splitlines()
    assert "- part 7: 3 ok, 3 failed" in lines and "| first | 1.235 |" in lines
    assert all(json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines())


def test_the_deadline_costs_the_case_that_runs_and_resuming_runs_it_again(parts: Any, tmp_path: Path) -> None:
    results = parts.results.Results(tmp_path)
    command = [sys.executable, "-c", CHILD.replace('"crash", "broken", ', ""), str(SCRIPTS), str(tmp_path)]
    parts.supervisor.run_part(7, command, results, deadline_s=time.monotonic() + 3)
    assert results.cases()[7, "hang"]["status"] == "unfinished" and (7, "last") not in results.cases()
    again = [word.replace("time.sleep(60)", "pass") for word in command]
    parts.supervisor.run_part(7, again, results, deadline_s=time.monotonic() + 60)
    assert {row["status"] for row in results.cases().values()} == {"ok"}


def test_a_part_that_cannot_start_says_so_and_ends(parts: Any, tmp_path: Path) -> None:
    results = parts.results.Results(tmp_path)
    command = [sys.executable, "-c", "raise SystemExit(5)"]
    parts.supervisor.run_part(7, command, results, deadline_s=time.monotonic() + 60)
    [row] = results.cases().values()
    assert (row["status"], row["why"]) == ("failed", "the process ended with 5")


def test_a_dry_run_leaves_json_and_tables_and_is_resumed(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(SCRIPTS / "gpu_visit.py"),
        "--dry-run",
        "--part",
        "3",
        "--out",
        str(tmp_path / "out"),
    ]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "- part 3: 10 ok" in first.stdout and "## 3. steps" in (tmp_path / "out" / "results.md").read_text()
    resumed = [*command[:-1], str(tmp_path / "next"), "--resume", str(tmp_path / "out")]
    second = subprocess.run(resumed, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "part 3: ok: tiny" not in second.stdout and "- part 3: 10 ok" in second.stdout


def test_carried_wheels_are_unpacked_without_an_index(parts: Any, tmp_path: Path) -> None:
    metadata = "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n"
    with zipfile.ZipFile(tmp_path / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "found = True\n")
        wheel.writestr("carried-1.0.dist-info/METADATA", metadata)
        wheel.writestr("carried-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("carried-1.0.dist-info/RECORD", "")
    assert parts.wheels.install(tmp_path, tmp_path / "site") == ["carried-1.0-py3-none-any.whl"]
    assert (tmp_path / "site" / "carried.py").read_text() == "found = True\n"


def test_weights_and_sums_of_a_step_are_counted(parts: Any) -> None:
    parts.setting.SETTING.dtype = torch.bfloat16
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
