"""What CI leaves out for its time: chosen by durations, and still there."""

import ast
from pathlib import Path

import pytest

from scripts import slow_tests
from scripts.code_size import ROOT
from tests.conftest import pytest_collection_modifyitems


def test_every_fifth_long_case_of_a_test_stays_and_no_single_test_that_takes_very_long() -> None:
    seconds = {f"f.py::of_cases[{i}]": 3.0 + i for i in range(7)} | {"f.py::of_cases[short]": 1.0}
    seconds |= {"f.py::single": 30.0, "f.py::quick": 7.0, slow_tests.NEEDED[0]: 99.0, "f.py::one_case[a]": 5.0}
    assert slow_tests.slow_tests(seconds) == {"f.py::single", *(f"f.py::of_cases[{i}]" for i in (1, 2, 3, 4, 6))}


def test_reports_are_read_and_tests_that_did_not_run_stay_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.test_slow_tests" name="a" time="20.5"/>'
        '<testcase classname="tests.test_slow_tests.TestLong" name="b[x::y.z]" time="0.1"/>'
        '<testcase classname="tests.test_slow_tests" name="c" time="0"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    own = "tests/test_slow_tests.py"
    assert dict(slow_tests.durations(report)) == {f"{own}::a": 20.5, f"{own}::TestLong::b[x::y.z]": 0.1}
    monkeypatch.setattr(slow_tests, "LIST", tmp_path / "list.txt")
    monkeypatch.setattr("sys.argv", ["slow_tests", str(report)])
    slow_tests.write(["other.py::stays", f"{own}::TestLong::b[x::y.z]"])
    assert slow_tests.main() == 0
    assert slow_tests.listed() == {"other.py::stays", f"{own}::a"}
    assert capsys.readouterr().out == "1 of 2 tests, 20 of 21 s\n"


def test_every_listed_test_is_there() -> None:
    for node_id in slow_tests.listed():
        path, *_, function = node_id.partition("[")[0].split("::")
        nodes = [*ast.walk(ast.parse((ROOT / path).read_text()))]
        names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.alias)}
        assert function in names or "*" in names, node_id  # "*": of another file's tests


class Item:
    def __init__(self, node_id: str) -> None:
        self.nodeid, self.marks = node_id, list[str]()

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.name)


def test_a_listed_test_is_marked_and_the_others_are_not() -> None:
    listed, other = Item(min(slow_tests.listed())), Item("tests/test_slow_tests.py::another")
    pytest_collection_modifyitems([listed, other])  # type: ignore[list-item]
    assert (listed.marks, other.marks) == (["slow"], [])
