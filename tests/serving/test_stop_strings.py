"""Where a text ends, however it is cut into pieces."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@given(
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
    st.lists(st.text("ab", max_size=4), max_size=8),
)
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
