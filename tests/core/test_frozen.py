"""Frozen values: what they refuse, and how a problem is told."""

import pytest
from pydantic import ValidationError

from dflash_trt.core.frozen import MAX_INT32, Frozen, Index, Scale, Size, checked, nearest_name


class Layer(Frozen):
    width: Size
    first: Index = 0
    scale: Scale = 1.0
    offset: float = 0.0


class Model(Frozen):
    layers: tuple[Layer, ...]


def test_a_value_is_frozen_complete_and_finite() -> None:
    layer = Layer(width=MAX_INT32, first=MAX_INT32, scale=1e6)
    for fields in (
        *({"width": value} for value in (0, MAX_INT32 + 1)),
        *({"width": 1, "first": value} for value in (-1, MAX_INT32 + 1)),
        *({"width": 1, "scale": value} for value in (0.0, 1e6 + 1, float("nan"))),
        *({"width": 1, "offset": value} for value in (float("nan"), float("inf"))),
        {"width": 1, "depth": 2},
        {},
    ):
        with pytest.raises(ValidationError):
            Layer(**fields)
    with pytest.raises(ValidationError, match="frozen"):
        layer.width = 2  # type: ignore[misc]


def test_a_problem_that_all_layers_have_is_told_once() -> None:
    problems: list[str] = []
    model = checked(Model, {"layers": [{"width": 2}]}, label="config.json", problems=problems)
    assert model == Model(layers=(Layer(width=2),)) and problems == []
    layers = [{"width": 0}, {"width": 0}, {"width": -1}, {"width": 1, "first": "x" * 200}]
    assert checked(Model, {"layers": layers}, label="config.json", problems=problems) is None
    assert problems[:2] == [
        "config.json: layers.0.width: expected greater than or equal to 1, found 0.",
        "config.json: layers.2.width: expected greater than or equal to 1, found -1.",
    ]
    assert problems[2].startswith("config.json: layers.3.first: expected a valid integer") and len(problems) == 3
    assert len(problems[2]) < 200


def test_a_misspelt_name_is_near_and_another_one_is_not() -> None:
    known = ("max_batch_size", "max_num_tokens", "page_size")
    assert [nearest_name(name, known) for name in ("max_batchsize", "batch_size", "pagesiz", "x", "dtype")] == [
        "max_batch_size",
        "max_batch_size",
        "page_size",
        None,
        None,
    ]
