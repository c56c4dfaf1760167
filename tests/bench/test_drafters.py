"""`bench drafters`: one target with every drafting algorithm, side by side."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dflash_trt.cli.main import cli
from tests.dflash2_files import make_dflash2_drafter
from tests.eagle3_files import save_eagle3_head
from tests.factories import make_target, make_zlab_drafter
from tests.plan.test_machine_file import MACHINE


def run(*words: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, words)))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines dflash, dflash2 and eagle3 of one target, one without a drafter, and one of another target and dtype."""
    root = tmp_path_factory.mktemp("bench")
    target = make_target(root / "target")
    drafters = {
        "dflash": make_zlab_drafter(root / "drafter.dflash", target_dir=target),
        "dflash2": make_dflash2_drafter(root / "drafter.dflash2", target_dir=target),
        "eagle3": save_eagle3_head(root / "drafter.eagle3", target_dir=target, draft_tokens=range(0, 272, 2)),
        "none": "none",
    }
    for name, drafter in drafters.items():
        options = ("--dtype", "float32", "--max-seq-len", 96)
        built = run("build", "--target", target, "--drafter", drafter, "-o", root / name, *options)
        assert built.exit_code == 0, built.output
    other = make_target(root / "other", num_hidden_layers=3)
    make_zlab_drafter(root / "drafter.other", target_dir=other)
    built = run("build", "--target", other, "--drafter", root / "drafter.other", "-o", root / "another")
    assert built.exit_code == 0, built.output
    rows = (json.dumps({"prompt": text}) + "\n" for text in ("def f():", "import os", "x = 1"))
    (root / "prompts.jsonl").write_text("".join(rows))
    return root


def compared(root: Path, *names: str, options: tuple[object, ...] = ()) -> Result:
    engines = [root / name for name in names]
    few = ("--rounds", 2, "--max-new-tokens", 12, "--concurrency", 2)
    return run("bench", "drafters", *engines, "--input-file", root / "prompts.jsonl", *few, *options)


def test_every_algorithm_gives_the_texts_of_none(root: Path) -> None:
    (root / "machine.json").write_text(MACHINE.text())
    options = ("--json", "--machine", root / "machine.json")
    result = compared(root, "dflash", "dflash2", "eagle3", options=options)
    assert result.exit_code == 0, result.output
    reports = json.loads(result.stdout)
    assert [report["algorithm"] for report in reports] == [None, "dflash", "dflash2", "eagle3"]
    assert [report["num_draft_tokens"] for report in reports] == [0, 3, 3, 7]
    assert all(report["num_equal_texts"] == report["num_prompts"] == 3 for report in reports)
    assert all(len(report["speedup_by_round"]) == 2 for report in reports)
    assert reports[0]["speedup"] == 1.0 and reports[0]["acceptance_length"] is None
    assert all(len(report["accepted_fraction_by_position"]) == report["num_draft_tokens"] for report in reports)
    context_len = round((8 + 9 + 5) / 3 + 12 / 2)  # half way through the 12 tokens
    for report in reports:
        roof = report["roofline"]
        assert (roof["machine"], roof["num_requests"], roof["context_len"]) == (MACHINE.name, 2, context_len)
        assert roof["num_draft_tokens"] == report["num_draft_tokens"]


def test_the_table_has_a_line_for_each_side_and_k_holds_for_all(root: Path) -> None:
    result = compared(root, "eagle3", "dflash", options=("--num-draft-tokens", 2))
    assert result.exit_code == 0, result.output
    header, *lines = result.stdout.splitlines()
    assert "acceptance length" in header
    assert [line.split("  ")[0] for line in lines[:3]] == [
        "autoregressive",
        "eagle3, K = 2 (eagle3)",
        "dflash, K = 2 (dflash)",
    ]
    assert all("3 of 3" in line for line in lines[:3])
    floors = [line.partition(": floor of a step (2 x ") for line in lines[3:]]
    assert [name for name, _, _ in floors] == [line.split("  ")[0] for line in lines[:3]]
    assert [found.partition("K = ")[2][0] for _, _, found in floors] == ["0", "2", "2"]


def test_engines_that_cannot_be_compared_are_refused(root: Path) -> None:
    result = compared(root, "dflash", "none", "another")
    assert result.exit_code == 2
    assert "none: expected an engine with a drafter" in result.output
    assert "another dtype: expected float32, found bfloat16. Build it as" in result.output
    assert "another target: expected that of" in result.output


def test_more_drafts_than_an_engine_makes_are_refused_before_any_side_runs(root: Path) -> None:
    result = compared(root, "eagle3", "dflash", options=("--num-draft-tokens", 5))
    assert result.exit_code == 2 and "expected 0 to 3" in result.output
    assert "round" not in result.output
