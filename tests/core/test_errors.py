"""Errors: what a message says, and how several become one."""

import pytest

from dflash_trt.core.errors import (
    BuildError,
    CapacityError,
    CheckpointError,
    ConfigError,
    DFlashError,
    ErrorCollector,
    QueueFullError,
    RankError,
    RequestError,
    problem,
    raise_all,
)


def failing(error: DFlashError) -> None:
    raise error


def test_a_problem_ends_with_its_hint_or_with_what_was_found() -> None:
    assert problem("x", expected="1", found="2", hint="Try 1.") == "x: expected 1, found 2. Try 1."
    assert str(ConfigError.about("x", expected="1", found="2")) == "x: expected 1, found 2."


def test_a_command_s_exit_code_says_whose_mistake_it_was() -> None:
    kinds = (ConfigError, CheckpointError, BuildError, CapacityError, RankError, RequestError, QueueFullError)
    assert [kind.exit_code for kind in kinds] == [2, 1, 1, 1, 1, 3, 3]


def test_problems_become_one_error_with_a_shared_hint_said_once() -> None:
    raise_all(ConfigError, "file", [])
    lines = [problem(name, expected="1", found="2", hint="Try 1.") for name in "ab"]
    with pytest.raises(ConfigError) as one:
        raise_all(ConfigError, "file", lines[:1], hint="Try 1.")
    assert str(one.value) == "file: a: expected 1, found 2. Try 1."
    with pytest.raises(CheckpointError) as both:
        raise_all(CheckpointError, "file", lines, hint="Try 1.")
    assert str(both.value) == "file: 2 problems\n  - a: expected 1, found 2.\n  - b: expected 1, found 2.\nTry 1."
    with pytest.raises(ConfigError) as mixed:
        raise_all(ConfigError, "file", [lines[0], "c"], hint="Try 1.")
    assert str(mixed.value) == f"file: 2 problems\n  - {lines[0]}\n  - c", "the hint of one problem stays with it"


@pytest.mark.parametrize(("num_problems", "num_listed"), [(100, 100), (101, 100), (250, 100)])
def test_a_flood_of_problems_is_counted_and_not_listed(num_problems: int, num_listed: int) -> None:
    with pytest.raises(ConfigError) as error:
        raise_all(ConfigError, "file", [f"p{i}" for i in range(num_problems)])
    heading, *lines = str(error.value).splitlines()
    assert heading == f"file: {num_problems} problems"
    rest = [f"  - and {num_problems - num_listed} more"] if num_problems > num_listed else []
    assert lines == [*(f"  - p{i}" for i in range(num_listed)), *rest]


def test_checks_that_fail_are_one_error_and_the_others_give_their_results() -> None:
    checks = ErrorCollector()
    assert checks.run(lambda: 5) == 5
    checks.raise_all("checks")
    only = CapacityError("full")
    assert checks.run(lambda: failing(only)) is None
    with pytest.raises(CapacityError) as one:
        checks.raise_all("checks")
    assert one.value is only
    checks.run(lambda: failing(BuildError("two\nlines")))
    with pytest.raises(CapacityError) as several:
        checks.raise_all("checks")
    assert str(several.value) == "checks: 2 checks failed\n  - full\n  - two\n  lines"
    checks.run(lambda: failing(ConfigError("wrong")))
    with pytest.raises(ConfigError, match="3 checks failed"):
        checks.raise_all("checks")


def test_a_bug_is_no_failed_check() -> None:
    with pytest.raises(ZeroDivisionError):
        ErrorCollector().run(lambda: 1 // 0)
