"""scripts/english.py finds phrases that the house style avoids."""

import pytest

from scripts.english import findings


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ('"""Of each request, its pages."""', ["opens with Of"]),
        ("x = 1  # of a request\n", ["opens with Of"]),
        ("# rows\n# behind the prompt\n", ["behind"]),
        ('def f():\n    """What a step costs."""\n', ["opens with What"]),
        ('help = "Take so many rows."', ["so many"]),
        (f'"""{"word " * 21}"""', ["long first line"]),
        ('"""Rows of a step. None means all of them, of course."""\nx = "behind"\n', []),
    ],
)
def test_phrases_are_found(source: str, names: list[str]) -> None:
    assert [name for _, name, _ in findings(source)] == names
