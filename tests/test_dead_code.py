"""scripts/dead_code.py finds what nothing calls, and entries of its list that are left over."""

from pathlib import Path

import pytest

pytest.importorskip("vulture")

from scripts.dead_code import ALLOWED, problems_of, unused_names


def test_a_function_that_nothing_calls_is_found(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("def called():\n    pass\n\n\ndef forgotten():\n    pass\n\n\ncalled()\n")
    assert list(unused_names([str(tmp_path)])) == ["forgotten"]


def test_an_entry_that_is_called_after_all_is_a_problem() -> None:
    names = {pattern.replace("*", "x"): "a.py:1: function" for pattern in ALLOWED}
    assert problems_of(names) == []
    left_out = names.pop("worker_process_ids")
    assert problems_of(names) == ["scripts/dead_code.py: worker_process_ids: something calls it. Remove the entry."]
    assert len(problems_of(names | {"worker_process_ids": left_out, "forgotten": left_out})) == 1
