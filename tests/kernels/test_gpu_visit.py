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
from dflash_trt.plan.computed_rows import ComputedRows
from dflash_trt.plan.step_work import EngineWork

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
    import gpu_visit_parts.timing
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


def test_a_tiny_step_is_measured(parts: Any) -> None:
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
    assert "- part 3: 9 ok" in first.stdout and "## 3. steps" in (tmp_path / "out" / "results.md").read_text()
    resumed = [*command[:-1], str(tmp_path / "next"), "--resume", str(tmp_path / "out")]
    second = subprocess.run(resumed, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "part 3: ok: demo" not in second.stdout and "- part 3: 9 ok" in second.stdout


def test_carried_wheels_are_unpacked_without_an_index(parts: Any, tmp_path: Path) -> None:
    metadata = "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n"
    with zipfile.ZipFile(tmp_path / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "found = True\n")
        wheel.writestr("carried-1.0.dist-info/METADATA", metadata)
        wheel.writestr("carried-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("carried-1.0.dist-info/RECORD", "")
    assert parts.wheels.install(tmp_path, tmp_path / "site") == ["carried-1.0-py3-none-any.whl"]
    assert (tmp_path / "site" / "carried.py").read_text() == "found = True\n"


def test_packages_that_a_part_needs_are_named_where_they_are_missing(parts: Any, tmp_path: Path) -> None:
    missing = parts.wheels.missing_packages
    assert missing([1, 2, 3], sys.path) == []
    (tmp_path / "numpy.py").touch()
    assert missing([2], [str(tmp_path)]) == ["torch", "triton"]
    assert missing([1, 2], [str(tmp_path)]) == ["torch", "triton", "pytest"]
    bare = [sys.executable, "-I", "-S", SCRIPTS / "gpu_visit.py", "--part", "1", "--out", tmp_path / "out"]
    done = subprocess.run(bare, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "error: Python: expected numpy, torch, triton, pytest, found none" in done.stderr


def test_random_weights_of_every_format_keep_activations_finite(parts: Any) -> None:
    """Weights have the size of one over the root of the inputs, whatever they are stored in."""
    random = parts.models._random
    torch.manual_seed(0)
    plain = random("target.layers.0.qkv", (256, 1024), torch.float32, "cpu")
    assert float(plain.std()) == pytest.approx(1 / 32, rel=0.05)
    codes = random("target.layers.0.qkv", (256, 1024), torch.float8_e4m3fn, "cpu").float()
    scale = float(random("target.layers.0.qkv.weight_scale", (1,), torch.float32, "cpu"))
    assert 0.2 < float(codes.std()) * scale * 32 < 0.6 and bool(codes.isfinite().all())
    powers = random("target.layers.0.experts.down.block_scale", (4, 8, 8), torch.uint8, "cpu")
    assert {*powers.unique().tolist()} <= {*range(116, 122)}  # never 255, which is NaN
    assert len(random("target.layers.0.experts.down", (4, 8, 8), torch.uint8, "cpu").unique()) > 100
    assert float(random("target.layers.0.qkv_bias", (8,), torch.bfloat16, "cpu").abs().max()) == 0


def test_a_floor_counts_what_the_plan_counts(parts: Any) -> None:
    opened = parts.steps.open_engine(("demo", False))
    one = ComputedRows.decode(num_requests=1, context_len=20, num_draft_tokens=0)
    with_drafts = ComputedRows.decode(num_requests=1, context_len=20, num_draft_tokens=2)
    roofs = parts.timing.machine_roofs()
    work = EngineWork(opened.format, has_drafter=False).of(one)
    of_bytes = 1e3 * (work.weights_bytes + work.kv_bytes) / roofs.copy_bytes_per_s
    assert opened.floor_ms(one) >= of_bytes * 0.999
    assert opened.floor_ms(with_drafts) > opened.floor_ms(one)


def test_jobs_share_the_cases_and_their_results_come_together(parts: Any, tmp_path: Path) -> None:
    results = parts.results.Results(tmp_path)
    child = CHILD.replace(
        '("first", "crash", "broken", "hang", "last")', "tuple('abcdefg')[int(sys.argv[6])::int(sys.argv[7])]"
    )
    child = child.replace("Path(sys.argv[2])", "Path(sys.argv[4])")
    command = [sys.executable, "-c", child, str(SCRIPTS), "unused"]
    results.start(7, "a")
    results.end(7, "a", "ok")
    parts.supervisor.run_part(7, command, results, deadline_s=time.monotonic() + 60, num_jobs=3)
    found = {case: row["status"] for (_, case), row in results.cases(7).items() if len(case) == 1}
    assert found == dict.fromkeys("abcdefg", "ok")
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["status"] for row in lines if row["case"] == "a"] == ["running", "ok"]  # and not again
