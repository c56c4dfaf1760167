"""Where a text ends, however it is cut into pieces."""

import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.core.errors import RequestError
from dflash_trt.core.request import MAX_STOP_LEN, MAX_STOP_STRINGS, SamplingParams
from dflash_trt.serving.stop_strings import StopStrings


def read(stop: Sequence[str], parts: Sequence[str]) -> tuple[list[str], bool]:
    """What comes out per piece (and at the end), and whether a stop string was found."""
    strings, out = StopStrings(stop), []
    for part in parts:
        if strings.is_found:
            break
        out.append(strings.push(part))
    out.append(strings.flush())
    return out, strings.is_found


@pytest.mark.parametrize(
    ("stop", "parts", "out", "is_found"),
    [
        (["END"], ["a E", "N", "D b"], ["a ", "", "", ""], True),
        (["END"], ["a E", "N", "X"], ["a ", "", "ENX", ""], False),
        (["END"], ["a EN"], ["a ", "EN"], False),
        (["aab"], ["a", "a", "a", "b", "c"], ["", "", "a", "", ""], True),
        (["bc", "abcd"], ["ab", "cd"], ["", "a", ""], True),
        (["\n\n"], ["x\n", "y\n", "\nz"], ["x", "\ny", "", ""], True),
        ([], ["a", "b"], ["a", "b", ""], False),
    ],
)
def test_text_is_held_only_while_it_may_be_a_stop_string(
    stop: list[str], parts: list[str], out: list[str], is_found: bool
) -> None:
    assert read(stop, parts) == (out, is_found)


@given(st.lists(st.text("ab", min_size=1, max_size=3), max_size=3), st.lists(st.text("ab", max_size=4), max_size=8))
def test_the_text_ends_at_the_stop_string_that_is_complete_first_however_it_is_cut(
    stop: list[str], parts: list[str]
) -> None:
    text = "".join(parts)
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(s) for s in stop)]
    kept = text
    if ends:
        longest = max(len(s) for s in stop if text[: ends[0]].endswith(s))
        kept = text[: ends[0] - longest]
    out, is_found = read(stop, parts)
    assert "".join(out) == kept
    assert is_found == bool(ends)


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text("ab", max_size=3), max_size=8),
)
def test_no_more_is_held_than_may_become_a_stop_string(stop: list[str], parts: list[str]) -> None:
    strings, read_so_far, given_out = StopStrings(stop), "", ""
    for part in parts:
        would_end = strings.would_end(part)
        given_out += strings.push(part)
        assert strings.is_found == would_end
        if would_end:
            return
        read_so_far += part
        beginnings = {s[:n] for s in stop for n in range(1, len(s))}
        num_held = max((n for n in range(1, len(read_so_far) + 1) if read_so_far[-n:] in beginnings), default=0)
        assert given_out == read_so_far[: len(read_so_far) - num_held]


def test_as_many_and_as_long_stop_strings_as_are_allowed_cost_little() -> None:
    """The worst there is: every text is a beginning of all of them."""
    stop = ["a" * (MAX_STOP_LEN - 3) + f"{number:03}" for number in range(MAX_STOP_STRINGS)]
    SamplingParams(stop=tuple(stop))
    strings = StopStrings(stop)
    started = time.process_time()
    out = [strings.push("a") for _ in range(20_000)]
    assert "".join([*out, strings.flush()]) == "a" * 20_000
    assert time.process_time() - started < 2.0  # 0.05 s on two shared cores


def test_too_many_and_too_long_stop_strings_are_refused_together() -> None:
    with pytest.raises(RequestError, match="2 problems") as refusal:
        SamplingParams(stop=("x" * (MAX_STOP_LEN + 1), *map(str, range(100_000))))
    assert "at most 64 strings, found 100001" in str(refusal.value)
    assert "at most 256 characters in a string, found 257" in str(refusal.value)
    assert len(str(refusal.value)) < 400
