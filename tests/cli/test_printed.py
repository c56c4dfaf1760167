"""What commands print of measurements, plans and engines, whole: `printed/NAME.txt` has the text.

The measurements are made up (tests/distinct.py), so that each number stands in its place and nowhere else. After a
wanted change of a text, `WRITE=1 scripts/test tests/cli/test_printed.py` writes the files again.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from dflash_trt.backends.machine import Machine
from dflash_trt.bench.comparison import Comparison, Gate
from dflash_trt.bench.host import HostReport
from dflash_trt.bench.load_report import LoadReport
from dflash_trt.bench.roofline import Roofline
from dflash_trt.bench.speedup import SideReport
from dflash_trt.bench.throughput import PolicyReport
from dflash_trt.cli import build, eval, inspect, plan, plan_advice
from dflash_trt.cli import check as checks
from dflash_trt.cli.bench_report import gate_lines
from dflash_trt.cli.report import RunSummary, summary_lines
from dflash_trt.demo import PROMPTS
from dflash_trt.recipes import Recipe
from tests.cli.conftest import Invoke
from tests.cli.test_check import report as report_of_a_check
from tests.cli.test_help import COMMANDS
from tests.cli.test_inspect import RECORD
from tests.distinct import Distinct
from tests.factories import make_target
from tests.plan.test_machine_file import MACHINE
from tests.plan.test_step_floor import DRAFTER, QWEN3_8B, write

PRINTED = Path(__file__).parent / "printed"
ROWS = [{"prompt": "x", "category": "a"}, {"prompt": "y", "category": "b"}, {"prompt": "z"}]
GPUS = [{"name": "GPU A"}, {"name": "GPU B"}, {"name": "GPU A"}]


def check(name: str, text: str) -> None:
    """Compare with the file, or write it."""
    path = PRINTED / f"{name}.txt"
    if os.environ.get("WRITE"):
        path.write_text(text)
    assert text == path.read_text()


class Roofs:
    """Floors that have what they were asked for as their numbers."""

    def __init__(self, *of: object) -> None:
        self._distinct = Distinct()

    def fixed_drafts(self, config: object) -> None:
        return None

    def beside(
        self, tok_per_s: float, *, acceptance_length: float | None, num_draft_tokens: int | None, **given: Any
    ) -> Roofline:
        given |= {"num_draft_tokens": -1 if num_draft_tokens is None else num_draft_tokens, "is_least_k": False}
        speeds = {"reached_fraction": tok_per_s, "floor_tok_per_s": 1000 * (acceptance_length or 0)}
        return self._distinct.of(Roofline, **given, **speeds)


@pytest.fixture
def bench(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs `bench` in a directory with rows.jsonl and machine.json, on a machine with two kinds of GPUs."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("machine.json").write_text(MACHINE.text())
    monkeypatch.setattr("dflash_trt.doctor.machine.gpus", lambda: GPUS)
    monkeypatch.setattr("dflash_trt.bench.roofline.Roofs", Roofs)
    monkeypatch.setattr("dflash_trt.engine_dir.EngineDir.open", lambda path: path)

    def run(*words: object) -> str:
        ran = invoke("bench", *map(str, words))
        assert ran.exit_code == 0, ran.stderr
        return ran.stdout + ran.stderr

    return run


FILES = ("--input-file", "rows.jsonl", "--machine", "machine.json")


def drafts(distinct: Distinct, temperature: float) -> list[SideReport]:
    fixed: dict[str, Any] = {"temperature": temperature, "num_prompts": 20}
    nothing = dict.fromkeys(["algorithm", "acceptance", "acceptance_ratio", "acceptance_ratio_interval"])
    sampled = {"num_equal_texts": None} if temperature else {}
    return [
        distinct.of(SideReport, name="autoregressive", **fixed, **nothing),
        distinct.of(SideReport, name="one", algorithm="dflash", acceptance_ratio=1.0, **(fixed | sampled)),
        distinct.of(SideReport, name="two", algorithm="eagle3", **(fixed | sampled)),
    ]


def test_drafters(bench, monkeypatch) -> None:
    distinct = Distinct()
    found = [report for temperature in (0.0, 0.5) for report in drafts(distinct, temperature)]
    monkeypatch.setattr("dflash_trt.bench.speedup.compare", lambda *_, **__: found)
    words = ["--max-new-tokens", 9, "--concurrency", 3, "--rounds", 7, "--temperature", 0, "--temperature", 0.5]
    check("bench_speedup", bench("speedup", "one=a", "two=b", *FILES, *words))
    document = json.loads(bench("speedup", "one=a", "two=b", *FILES, *words, "--json", "--csv", "table.csv"))
    before = [
        report | {"acceptance": report["acceptance"] and {"length": 10.0 * number}}
        for number, report in enumerate(document["reports"], start=1)
    ]
    Path("before.json").write_text(json.dumps(document | {"reports": before}))
    gates = bench("speedup", "one=a", "two=b", *FILES, *words, "--baseline", "before.json", "--min-acceptance-ratio", 1)
    check(
        "bench_speedup_gates", "\n".join(line for line in gates.splitlines() if "before.json" in line or "gate" in line)
    )
    check("bench_speedup_json", json.dumps(document | {"reports": document["reports"][2:3]}, indent=1))
    check("bench_speedup_csv", "".join(Path("table.csv").read_text().splitlines(keepends=True)[:4]))


def test_policies(bench, monkeypatch) -> None:
    distinct = Distinct()
    found = [distinct.of(PolicyReport) for _ in range(2)]
    monkeypatch.setattr("dflash_trt.bench.throughput.compare_policies", lambda *_, **__: found)

    def context_len(engine_dir: Path, prompts: list[object], tokens: float) -> int:
        assert (engine_dir, len(prompts)) == (Path("dir"), 2)
        return round(tokens)

    monkeypatch.setattr("dflash_trt.cli.bench_throughput.context_len_of", context_len)
    words = ["--max-new-tokens", 999, "--rounds", 7, "--requests-per-client", 5, "--num-prompts", 2]
    check("bench_throughput", bench("throughput", "dir", *FILES, *words))


def loads(distinct: Distinct) -> list[LoadReport]:
    """Two servers under two closed loads and one open."""
    kinds: list[dict[str, Any]] = [
        {"concurrency": 1, "request_rate_per_s": None, "num_errors": 0, "first_error": None},
        {"concurrency": 4},
        {"concurrency": None, "request_rate_per_s": 2.5, "acceptance": None, "tok_per_s_per_user": None},
    ]
    return [distinct.of(LoadReport, server=server, **kind) for server in ("a", "b") for kind in kinds]


def test_servers(bench, monkeypatch) -> None:
    found = loads(Distinct())
    monkeypatch.setattr("dflash_trt.bench.server_sweep.sweep_servers", lambda *_, **__: found)
    floor = Distinct().of(Roofline, is_least_k=True)
    monkeypatch.setattr("dflash_trt.cli.bench_serve.floors_beside", lambda *_: [floor, *[None] * 5])
    servers = ("a=http://127.0.0.1:1", "b=http://127.0.0.1:2")
    words = ["--max-new-tokens", 9, "--temperature", 0.5, "--rounds", 7, "--ignore-eos", "--goodput", "ttft:5"]
    check("bench_serve", bench("serve", *servers, *FILES, *words, "--interactivity", 5, "--interactivity", 30))
    check("bench_serve_gpus", bench("serve", *servers, *FILES, "--num-gpus", 2, "--hardware", "a laptop"))


def test_host(bench, monkeypatch) -> None:
    distinct = Distinct()

    def measured(num_requests: int, *, num_ranks: int, is_chained: bool, num_steps: int, **_: int) -> HostReport:
        given = {"num_requests": num_requests, "num_ranks": num_ranks, "is_chained": is_chained}
        return distinct.of(HostReport, num_steps=num_steps, **given)

    monkeypatch.setattr("dflash_trt.bench.host.measure_host", measured)
    words = ["--requests", 3, "--requests", 5, "--ranks", 2, "--steps", 7]
    check("bench_host", bench("host", *words) + bench("host", *words, "--json"))


def test_defaults() -> None:
    """Of every option that has one; values that follow from an engine are in the help."""
    shown = [
        f"{name} {option.opts[0]}: {option.default}".replace(f"{PROMPTS.parents[2]}/", "")
        for name, command in COMMANDS.items()
        for option in command.params
        if isinstance(option, click.Option) and option.default and "UNSET" not in repr(option.default)
    ]
    check("defaults", "\n".join(shown))


def test_comparisons() -> None:
    comparison = Distinct().of(Comparison, texts=())
    texts = Distinct().of(Comparison, texts=(), kl_nats=None, candidate_perplexity=None)
    lines = [line for found in (comparison, texts) for line in eval._table(found, baseline="B", candidate="C")]
    gates = eval._gates(comparison, {"max_kl": 1.0, "min_acceptance_ratio": None, "min_agreement": 0.5})
    gates += [Gate(name="other", bound=2.0, value=value, is_upper=False) for value in (None, 2.0)]
    check("eval", "\n".join([*lines, *gate_lines(gates)]))


def test_runs() -> None:
    summary = Distinct().of(RunSummary, accepted_fraction_by_position=(0.75, 0.5))
    check("run_summary", "\n".join(summary_lines(summary)))


def planned(invoke: Invoke, *words: object) -> dict[str, Any]:
    result = invoke("plan", *map(str, words), "--json")
    assert result.exit_code == 0, result.stderr
    report: dict[str, Any] = Distinct().renumbered(json.loads(result.stdout))
    return report | {"notes": ["one", "two"]}


def with_names(report: dict[str, Any]) -> dict[str, Any]:
    """Sources of times do not depend on tables of measured kernels here."""
    steps = [step | {"expected_s_by_source": {"one": 1.0, "two": 2.0}} for step in report["steps"]]
    return report | {"steps": steps}


def test_a_plan_of_a_pair(target: Path, drafter: Path, invoke, capsys) -> None:
    more = ("--tp-size", 2, "--concurrency", "1,4", "--context", "512,1024", "--acceptance-length", "2,3.5")
    report = with_names(planned(invoke, target, drafter, "--gpu", "b300", *more))
    plan._print(report)
    remedies = [{"change": "--one", "kv_tokens": 1234}, {"change": "--two", "kv_tokens": 5678}]
    mapping = report["mapping"] | {"world_size": 1}
    plan._print(report | {"fits": False, "remedies": remedies, "mapping": mapping, "steps": []})
    check("plan", capsys.readouterr().out)


@pytest.mark.parametrize("family", ["qwen3_5_text", "gpt_oss", "deepseek_v3"])
def test_plans_of_other_layers(family: str, tmp_path: Path, invoke, capsys) -> None:
    target = make_target(tmp_path / "target", family=family)
    report = planned(invoke, target, "--gpu", 40)
    windows = {"page_windows": [{"window": 5}, {"window": 7}], "num_windows": 3}
    plan._print(report | {"kv_pages": report["kv_pages"] | windows})
    check(f"plan_{family}", capsys.readouterr().out)


def test_advice(tmp_path: Path, invoke, capsys) -> None:
    pair = write(tmp_path, "target", QWEN3_8B), write(tmp_path, "drafter", DRAFTER)
    words = ("--gpu", "h200", "--gpus", 2, "--per-user", 100, "--price", 3, "--max-seq-len", 4096)
    report = planned(invoke, *pair, *words)
    choices = [
        item | {"layout": f"layout {i}", "format": [None, "fp8"][i]} for i, item in enumerate(report["choices"][:2])
    ]
    report |= {
        "choices": choices,
        "goals": ["one", "two"],
        "assumptions": ["three", "four"],
        "left_out": ["five", "six"],
    }
    report |= {"draft_lengths": {"1": 7, "4": 5}, "commands": ["build", "serve"]}
    plan_advice._print(report)
    alone = choices[1] | {"has_drafter": False, "num_prefill_workers": 0, "price_per_million_tokens": None}
    plan_advice._print(report | {"choices": [alone], "is_acceptance_assumed": False, "goals": [], "sensitivity": []})
    check("plan_advice", capsys.readouterr().out)


def test_a_sweep(tmp_path: Path, invoke) -> None:
    """Simulated loads of clients and of arrivals, with a prefix in common; each number of a row has six digits."""
    pair = write(tmp_path, "target", QWEN3_8B), write(tmp_path, "drafter", DRAFTER)
    machine, rows = tmp_path / "machine.json", tmp_path / "rows.csv"
    assert MACHINE.costs is not None
    rates: dict[str, Any] = {"product_rates": {1: 5e12, 64: 1.5e13}, "kv_s_per_byte": 3e-12, "mixing_s_per_flop": 7e-14}
    rates |= {"token_s": 1e-6, "request_s": 2e-5, "pass_s": 3e-4, "step_s": 5e-4, "exchange_latency_s": 7e-7}
    costs = MACHINE.costs.model_copy(update=rates)
    known = {"memory_bytes": 1 << 36, "link_bytes_per_s": 1e11, "costs": costs, "copy_bytes_per_s": 1e12}
    known |= {"copy_bytes_per_s_by_working_set_bytes": {1 << 30: 4e12, 1 << 35: 1e12}}
    known |= {"peak_flops_per_s_by_operand_bits": {32: 2e13}}
    machine.write_text(MACHINE.model_copy(update=known).text())
    lengths = ("--prompt-tokens", 300, "--output-tokens", 20, "--shared-prefix", 70, "--max-seq-len", 1024)
    loads = (
        "--concurrency",
        "1,6",
        "--request-rate",
        40,
        "--requests-per-client",
        2,
        "--duration",
        0.3,
        "--spread",
        0.3,
    )
    layouts = ("--layout", "tp1x2", "--layout", "tp2", "--layout", "tp3")
    drafts = ("--accepted", "0.8,0.6,0.4", "--sweep-draft-length", 2, "--sweep-draft-length", 3)
    words = (*layouts, *drafts, *lengths, *loads, "--max-num-tokens", 256, "--per-user", 90, "--per-user", 1000)
    found = invoke("plan", *pair, "--sweep", "--machine", machine, *words, "--csv", rows)
    assert found.exit_code == 0, found.stderr
    check("plan_sweep", f"{found.stdout}\n{_rounded(rows.read_text())}")


def _rounded(text: str) -> str:
    """Floating-point sums differ in their last digits from machine to machine."""
    return re.sub(r"\d+\.\d+(e-?\d+)?", lambda number: f"{float(number[0]):.6g}", text)


def test_recipes(invoke, monkeypatch, capsys) -> None:
    """Two recipes on GPUs and without one: too new a format, too many ranks, too large, and one that fits."""
    gpu = Machine(name="GPU A", memory_bytes=80 << 30, num_devices=2, capability=(8, 0))
    newer, more = (replace(gpu, num_devices=count, capability=(9, 0)) for count in (1, 2))
    host = Machine(name="no GPU", memory_bytes=60 << 30, num_devices=1, capability=None)
    listed = (
        Recipe(name="demo", format="float32", gpus=(), weights_gib=1.5),
        Recipe(name="minimax-m2.5-fp8-h200", format="fp8", gpus=("A", "B"), weights_gib=150.25),
    )
    monkeypatch.setattr("dflash_trt.recipes.recipes", lambda: listed)
    texts = []
    for machine in (gpu, newer, more, host):
        monkeypatch.setattr("dflash_trt.backends.machine.this_machine", lambda machine=machine: machine)
        texts += [invoke("recipes").stdout, invoke("recipes", "--json").stdout]
    texts.append(invoke("recipes", "show", "demo").stdout.splitlines()[0])
    check("recipes", "\n".join(texts).replace(str(listed[0].path.parent), "recipes") + "\n")


def test_engines(engine_dir: Path, invoke, capsys) -> None:
    report = Distinct().renumbered(json.loads(invoke("inspect", engine_dir, "--json").stdout))
    provenance = {
        "command": ["dflash-trt", "build"],
        "versions": {"torch": "1", "numpy": "2"},
        "build_time_s": 1.5,
        "checkpoints": {"target": "t", "drafter": "d"},
        "hub": {"drafter": {"name": "n", "commit": "c"}},
        "notes": ["one", "two"],
    }
    kernels = {
        name: {"num_kernels": n, "triton_version": v} for name, n, v in (("sm_90a", 3, "4"), ("sm_100a", 5, "6"))
    }
    report |= {"engine_dir": "dir", "provenance": provenance, "kernels": kernels, "tensorrt": RECORD}
    report |= {"kv_pages_here": "pages", "chat_template_options": {"a": 1, "b": False}}
    first = next(iter(report["files"]))
    report["files"][first]["is_hash_verified"] = False
    inspect._print(report)
    inspect._print(report | {"tensorrt": None, "tensorrt_llm": {"versions": "5.6"}, "kernels": {}})
    check("inspect", capsys.readouterr().out)


def test_checks(capsys) -> None:
    """Of layers the eight kinds that come first are named."""
    fields = checks.describe(report_of_a_check())
    fields |= {"layer_counts": {f"KIND_{i}": 100 + i for i in range(10)}, "inputs": ["a", "b"], "outputs": ["c", "d"]}
    fields |= {"flags": ["one", "two"], "warnings": ["three", "four"], "notes": ["five", "six"]}
    checks._print(fields)
    checks._print(fields | {"flags": [], "state_bytes_per_slot": 0, "ranks": [0]})
    check("check", capsys.readouterr().out)


def test_builds(engine_dir: Path, monkeypatch, capsys) -> None:
    from dflash_trt.engine_dir import EngineDir

    parts = [{"component": name, "plain_bytes": 0, "planned_bytes": 0} for name in ("target", "draft")]
    monkeypatch.chdir(engine_dir.parent)  # the width of the path is that of its name
    path = Path(engine_dir.name)
    fields = {"notes": ["one", "two"], "quantization": {}, "component_bytes": parts, "build_time_s": 1.0}
    summary = Distinct().renumbered(build._summary(EngineDir.open(path)) | fields)
    monkeypatch.setattr(build, "_summary", lambda engine: summary)
    build._print_summary(EngineDir.open(path))
    check("build", capsys.readouterr().out)
