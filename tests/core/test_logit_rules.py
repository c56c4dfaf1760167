"""What a request's parameters become: rules, refusals, and tokens by slot."""

import numpy as np
import pytest

from dflash_trt.core.errors import RequestError
from dflash_trt.core.logit_rules import (
    ANY_TOKEN,
    MAX_BAD_WORD_TOKENS,
    MAX_BIASES,
    LogitRules,
    RuledSlots,
    SlotUpdate,
    rules_bytes,
)
from dflash_trt.core.request import Request
from dflash_trt.core.sampling import MAX_BAD_WORDS, MAX_LOGIT_BIASES, SamplingParams


def make_request(*, stop=(2,), bad=(), **sampling) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(**sampling),
        stop_token_ids=frozenset(stop),
        bad_word_ids=bad,
    )


def test_a_request_that_asks_for_nothing_has_no_rules() -> None:
    assert LogitRules.of(make_request()) is None
    assert LogitRules.of(make_request(logit_bias={4: 0.0}, temperature=0.5, top_p=0.5)) is None
    assert LogitRules.of(make_request(min_tokens=5, stop=())) is None  # nothing would stop it


def test_biases_have_a_token_an_end_and_a_prefix() -> None:
    rules = LogitRules.of(make_request(logit_bias={9: 1.5}, bad=((4,), (5, 6, 7)), min_tokens=4))
    assert rules is not None and not rules.has_penalties
    assert rules.token_ids.tolist() == [9, 4, 7, 2]
    assert rules.biases.tolist() == [1.5, -np.inf, -np.inf, -np.inf]
    assert rules.ends[3] == 3 + 4 and (rules.ends[:3] > 1e9).all()
    assert rules.prefixes.tolist() == [[ANY_TOKEN] * 2, [ANY_TOKEN] * 2, [5, 6], [ANY_TOKEN] * 2]


def test_too_many_biases_and_too_long_words_are_refused_in_one_error() -> None:
    long_word = tuple(range(MAX_BAD_WORD_TOKENS + 1))
    with pytest.raises(RequestError, match="2 problems") as refused:
        LogitRules.of(make_request(bad=(long_word,), min_tokens=1, stop=range(MAX_BIASES)))
    assert f"at most {MAX_BIASES} together, found {MAX_BIASES + 1}" in str(refused.value)
    assert f"at most {MAX_BAD_WORD_TOKENS} tokens in a word, found {len(long_word)}" in str(refused.value)


def test_as_many_biases_and_as_long_words_as_are_allowed_are_taken() -> None:
    word = tuple(range(MAX_BAD_WORD_TOKENS))
    rules = LogitRules.of(make_request(bad=(word,), min_tokens=1, stop=range(MAX_BIASES - 1)))
    assert rules is not None and rules.prefixes.shape == (MAX_BIASES, MAX_BAD_WORD_TOKENS - 1)


def test_each_penalty_is_its_own() -> None:
    fields = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    rules = LogitRules.of(make_request(repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=-0.75))
    assert [getattr(rules, name) for name in fields] == [1.5, 0.25, -0.75]
    assert rules is not None and rules.has_penalties and rules.num_prompt_tokens == 3
    for name in fields:
        found = LogitRules.of(make_request(**{name: 0.5}))
        assert found is not None and found.has_penalties
    assert [LogitRules.of(make_request(**{name: off})) for name, off in zip(fields, (1.0, 0.0, 0.0), strict=True)] == [
        None
    ] * 3


def test_a_bias_holds_before_its_end_behind_its_prefix() -> None:
    """At every row of a text: words of one to three tokens, and tokens that stop before the fourth of an answer."""
    words, text = ((4,), (5, 6), (5, 5, 6)), np.array([5, 5, 6, 5, 5, 5, 6, 0])
    rules = LogitRules.of(make_request(bad=words, min_tokens=3, stop=(2, 9)))
    assert rules is not None
    found = rules.active_biases(text, np.arange(len(text)))
    for row in range(len(text)):
        before = text[:row].tolist()
        of_words = [before[len(before) - len(word) + 1 :] == list(word[:-1]) and row >= len(word) - 1 for word in words]
        assert found[row].tolist() == [*of_words, row < 6, row < 6], row


def test_memory_of_rules_grows_with_slots_and_positions() -> None:
    assert rules_bytes(6, 100) == 3 * rules_bytes(2, 100)
    assert rules_bytes(2, 101) - rules_bytes(2, 100) == 2 * 4
    assert rules_bytes(1, 0) == 4 * (6 + MAX_BIASES * (3 + MAX_BAD_WORD_TOKENS))


BIASES = [
    {5: 1, 3: -2.5}, {"5": 1.0, "3": -2.5}, ["5=1", "3=-2.5"], [(3, -2.5), (5, 1)], ((5, np.float32(1)), (3, -2.5))
]  # fmt: skip
NO_BIASES = [3, "3=1", {3: 101.0}, {-1: 1.0}, {3: "much"}, {"x": 1.0}, ["3"], ["3=1=2"], [(3,)], {3: True}, {3: np.nan}]


@pytest.mark.parametrize("given", BIASES)
def test_a_logit_bias_is_read_as_json_options_and_python_write_it(given) -> None:
    assert SamplingParams(logit_bias=given).logit_bias == ((3, -2.5), (5, 1.0))


@pytest.mark.parametrize("given", NO_BIASES)
def test_another_logit_bias_is_refused(given) -> None:
    with pytest.raises(RequestError, match="sampling logit_bias: expected biases from -100 to 100 by token id"):
        SamplingParams(logit_bias=given)


def test_a_token_cannot_have_two_biases() -> None:
    with pytest.raises(RequestError, match="each token once"):
        SamplingParams(logit_bias=["3=1", "3=2"])


def test_sizes_and_a_minimum_above_the_maximum_are_refused_by_name() -> None:
    words = ["x"] * (MAX_BAD_WORDS + 1)
    with pytest.raises(RequestError, match="2 problems") as refused:
        SamplingParams(bad_words=words, min_tokens=129)
    for said in ("bad_words: expected at most 64 strings", "max_new_tokens 128"):
        assert said in str(refused.value)


def test_too_many_biases_are_refused_before_any_is_read() -> None:
    """A million of them would take seconds."""
    unreadable = dict.fromkeys(range(MAX_LOGIT_BIASES + 1), None)
    with pytest.raises(RequestError, match=r"sampling logit_bias: .*at most 512 tokens"):
        SamplingParams(logit_bias=unreadable)
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIASES), 1)).logit_bias) == MAX_LOGIT_BIASES


def test_a_slot_has_the_rules_and_tokens_of_its_last_update() -> None:
    slots = RuledSlots(8)
    rules = LogitRules.of(make_request(repetition_penalty=2.0))
    assert slots.rows(np.array([0, 3])) == []
    slots.update([SlotUpdate(slot=3, rules=rules, token_ids=np.array([1, 2, 3]))])
    ((row, found, tokens),) = slots.rows(np.array([0, 3]))
    assert (row, found, tokens.tolist()) == (1, rules, [1, 2, 3, 0, 0, 0, 0, 0])
    slots.update([SlotUpdate(slot=3, rules=None, token_ids=np.array([]))])
    assert slots.rows(np.array([0, 3])) == []
