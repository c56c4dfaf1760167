"""Acceptance of drafts by position and by group, and intervals over texts."""

import random

import numpy as np
import pytest

from dflash_trt.bench.acceptance import (
    acceptance,
    accepted_by_category,
    counts_of_answers,
    counts_of_texts,
    ratio_interval,
)
from dflash_trt.bench.intervals import quotient_interval, speedup_interval
from dflash_trt.core.acceptance import acceptance_length, accepted_fractions
from dflash_trt.core.request import TokenEvent
from tests.bench.test_load_report import speculation
from tests.core.test_acceptance import output

STEPS = [[(3, 3), (3, 0), (1, 1)], [(2, 1)], []]  # of each text: drafts verified, and accepted


def texts(*steps: list[tuple[int, int]]) -> list[tuple[TokenEvent, ...]]:
    return [output(*text).steps for text in steps]


@pytest.mark.parametrize("steps", [STEPS, [[(3, 1), (2, 0)], [(1, 1), (3, 0)]]], ids=["all positions", "the first"])
def test_the_numbers_of_an_engine_are_those_of_its_outputs(steps: list[list[tuple[int, int]]]) -> None:
    outputs = [output(*text) for text in steps]
    found = acceptance(counts_of_texts([one.steps for one in outputs]))
    assert found is not None and found.num_verify_steps == 4 and len(found.by_position) == 3
    assert found.length == acceptance_length(outputs)
    assert found.by_position == accepted_fractions(outputs)
    assert acceptance(counts_of_texts(texts([], []))) is None and acceptance([]) is None


def test_a_server_that_tells_the_same_steps_has_the_same_numbers() -> None:
    steps = [[(3, 3), (3, 0), (1, 1)], [(2, 1), (3, 2)]]
    told = acceptance(counts_of_answers([speculation(text) for text in steps]))
    assert told == acceptance(counts_of_texts(texts(*steps)))


def test_answers_with_fewer_positions_count_where_they_have_drafts() -> None:
    steps = [(3, 3), (1, 1)]
    shorter = speculation([(1, 1)]) | {"acceptance_histogram": [0, 1], "num_spec_tokens": 1}
    for answers in ([speculation(steps), shorter], [shorter, speculation(steps)]):
        found = acceptance(counts_of_answers(answers))
        assert found is not None and (found.num_verify_steps, found.length) == (3, pytest.approx(8 / 3))
        assert found.by_position == (1.0, 1.0, 1.0)


def test_a_position_that_no_step_verified_is_none() -> None:
    found = acceptance(counts_of_answers([speculation([(1, 1), (1, 0)])]))
    assert found is not None and (found.by_position, len(found.by_position_interval)) == ((0.5,), 1)


def test_the_interval_holds_the_mean_and_narrows_with_more_texts() -> None:
    """Texts that are all alike leave no doubt."""
    few = [[(3, 3)], [(3, 0)], [(3, 1), (3, 1)]]
    wide, narrow = (acceptance(counts_of_texts(texts(*count * few))) for count in (1, 30))
    assert wide is not None and narrow is not None
    outer, inner = wide.length_interval, narrow.length_interval
    assert 1.0 <= outer.low < inner.low < wide.length < inner.high < outer.high <= 4.0
    alike = acceptance(counts_of_texts(texts(*[[(3, 2)]] * 5)))
    assert alike is not None and (alike.length_interval.low, alike.length_interval.high) == (3.0, 3.0)


def test_the_interval_is_that_of_a_bootstrap_written_out() -> None:
    parts, wholes = np.array([9.0, 2, 5, 4, 8, 1]), np.array([3.0, 1, 2, 2, 3, 1])
    dice, drawn = random.Random(5), []
    for _ in range(20_000):
        chosen = dice.choices(range(6), k=6)
        drawn.append(parts[chosen].sum() / wholes[chosen].sum())
    found = quotient_interval(parts, wholes)
    assert (found.low, found.high) == pytest.approx(np.percentile(drawn, (2.5, 97.5)), rel=0.05)


def test_a_draw_without_a_step_does_not_count() -> None:
    found = quotient_interval(np.array([3.0, 0.0, 0.0]), np.array([2.0, 0.0, 0.0]))
    assert (found.low, found.high) == (1.5, 1.5)


def test_the_interval_of_a_speedup_is_over_prompts_and_rounds() -> None:
    plain, own = [[2.0, 4.0, 6.0]] * 3, [[1.0, 2.0, 3.0]] * 3
    sure = speedup_interval(plain, own)
    assert (sure.low, sure.high) == (2.0, 2.0)
    of_prompts = speedup_interval(plain, [[1.0, 4.0, 3.0]] * 3)
    assert 1.0 <= of_prompts.low < 12 / 8 < of_prompts.high <= 2.0
    of_rounds = speedup_interval(plain, [[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [4.0, 8.0, 12.0]])
    assert (of_rounds.low, of_rounds.high) == (0.5, 2.0)
    one_quick = speedup_interval([[2.0, 2.0]] * 9, [[1.0, 1.0]] * 8 + [[0.1, 0.1]])
    assert (one_quick.low, one_quick.high) == (2.0, 2.0), "the median over rounds that are drawn one by one"


def test_two_drafters_are_compared_text_by_text() -> None:
    """Texts differ much more than the drafters: their ratio is certain all the same."""
    ours = counts_of_texts(texts(*[[(9, accepted)] for accepted in (1, 3, 5, 7)]))  # 2, 4, 6, 8 tokens
    theirs = counts_of_texts(texts(*[[(9, accepted)] for accepted in (0, 1, 2, 3)]))  # 1, 2, 3, 4
    found = ratio_interval(ours, theirs)
    assert (found.low, found.high) == (2.0, 2.0) and not found.contains(1)
    same = ratio_interval(ours, ours)
    assert (same.low, same.high) == (1.0, 1.0) and same.contains(1)


def test_categories_are_counted_apart_and_rows_without_one_nowhere() -> None:
    counts = counts_of_texts(texts([(3, 3)], [(3, 0)], [(3, 1)], []))
    found = accepted_by_category(["b", "a", None, "c"], counts)
    assert {name: value.length for name, value in found.items()} == {"a": 1.0, "b": 4.0}
    assert list(found) == ["a", "b"], "in the order of their names; c verified nothing"
