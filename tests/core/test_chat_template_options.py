import pytest

from dflash_trt.core.chat_template_options import options_from_words, shown_options
from dflash_trt.core.errors import ConfigError


def test_a_value_is_json_where_it_can_be_and_text_otherwise() -> None:
    words = ["a=false", "b=2", 'c="2"', "d=low", "e=", "f=x=y", "g=[1, null]", "h=NaN"]
    expected = {"a": False, "b": 2, "c": "2", "d": "low", "e": "", "f": "x=y", "g": [1, None], "h": "NaN"}
    assert options_from_words(words, flag="--option") == expected
    assert shown_options({"a": False, "d": "low"}) == 'a=false, d="low"'


def test_what_looks_like_json_or_python_is_not_taken_for_text() -> None:
    words = ["a=False", "b=NONE", "c={", 'd="', "e", "=f", "g=[NaN]", "tokenize=1", "right=true"]
    with pytest.raises(ConfigError) as error:
        options_from_words(words, flag="--option")
    message = str(error.value)
    for word in words[:7]:
        assert f"--option: expected NAME=VALUE, where VALUE is JSON or text, found {word!r}" in message
    assert "found tokenize, decided by the engine" in message
    assert "right" not in message
