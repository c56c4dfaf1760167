"""The rows that a calibration runs, and the ranges that it keeps for the next build."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from dflash_trt.core.errors import ConfigError
from dflash_trt.core.quantization import Calibration, CalibrationConfig
from dflash_trt.quantize import calibrate
from dflash_trt.quantize.calibrate import cache_dir, cache_key, read_cached, write_cached
from dflash_trt.quantize.calibrate_prompts import BUILT_IN_PROMPTS, calibration_prompts
from tests.factories import edit_json
from tests.serving.tokenizers import write_byte_fallback

BEGIN = 1  # "<s>"
HI = [{"role": "user", "content": "hi"}]
Read = Callable[..., list[list[int]]]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """The prompts of these rows, read with a tokenizer that frames a text, and with a vocabulary of 300."""
    path = write_byte_fallback(tmp_path / "tokenizer")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BEGIN)])
    tokenizer.save(str(path / "tokenizer.json"))
    template = (
        "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}?{% endif %}"
        "{{ mood }}{{ end }}"
    )
    edit_json(path / "tokenizer_config.json", chat_template=template)

    def prompts(*rows: Any, options: dict[str, Any] | None = None, **config: Any) -> list[list[int]]:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        return calibration_prompts(
            CalibrationConfig(prompts="rows.jsonl", **config),
            base_dir=tmp_path,
            tokenizer_dir=path,
            vocab_size=300,
            template_options=options or {},
        )

    return prompts


def ids(*rows: list[int]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": row} for row in rows]


def test_the_first_rows_count_and_the_first_tokens_of_each(read: Read) -> None:
    rows = ids([1, 2, 3], [4, 5], [6, 7])
    assert read(*rows) == [[1, 2, 3], [4, 5], [6, 7]]
    assert read(*rows, num_prompts=2, max_prompt_tokens=2) == [[1, 2], [4, 5]]
    assert read(*rows, num_prompts=2, max_prompt_tokens=3) == [[1, 2, 3], [4, 5]]


def test_a_prompt_has_two_tokens_and_an_empty_line_is_no_row(read: Read) -> None:
    assert read(*ids([1], [2, 3], []), "", *ids([4, 5])) == [[2, 3], [4, 5]]
    with pytest.raises(ConfigError, match="expected prompts of 2 tokens or more, found none"):
        read(*ids([1], []))


def test_a_text_is_framed_and_a_conversation_is_as_its_template_has_it(read: Read) -> None:
    """Without a prompt for an answer, which calibration does not ask for."""
    text, conversation = read({"prompt": "hi"}, {"messages": HI})
    assert text == [BEGIN, *conversation]


def test_a_row_replaces_options_of_the_template_by_name(read: Read) -> None:
    rows = [{"messages": HI}, {"messages": HI, "chat_template_kwargs": {"mood": "b"}}]
    expected = read(*({"messages": [{"role": "user", "content": text}]} for text in ("hiae", "hibe")))
    assert read(*rows, options={"mood": "a", "end": "e"}) == expected


@pytest.mark.parametrize("token_id", [-1, 300])
def test_token_ids_are_of_the_targets_vocabulary(read: Read, token_id: int) -> None:
    assert read(*ids([0, 299])) == [[0, 299]]
    with pytest.raises(ConfigError, match=r"rows\.jsonl line 2: expected token ids below the target's vocab_size 300"):
        read(*ids([0, 1], [0, token_id]))


def test_what_is_no_prompt_is_named_by_its_line_and_five_times_at_most(read: Read) -> None:
    with pytest.raises(
        ConfigError, match=r"line 3: expected a JSON object with one of prompt, messages, .*another row"
    ):
        read(*ids([1, 2]), "", {"prompt": "a", "messages": HI})
    with pytest.raises(ConfigError, match="line 1: expected a prompt to tokenize, found TypeError"):
        read({"prompt_token_ids": 3})
    with pytest.raises(ConfigError) as error:
        read(*["{"] * 9)
    assert [f"line {number}:" in str(error.value) for number in (5, 6)] == [True, False]


def test_without_a_file_the_prompts_of_the_package_are_taken(tmp_path: Path) -> None:
    tokenizer = write_byte_fallback(tmp_path / "tokenizer")
    found = calibration_prompts(
        CalibrationConfig(max_prompt_tokens=9),
        base_dir=tmp_path / "nowhere",
        tokenizer_dir=tokenizer,
        vocab_size=2000,
        template_options={},
    )
    assert len(found) == len(BUILT_IN_PROMPTS.read_text().splitlines()) and {len(prompt) for prompt in found} == {9}
    with pytest.raises(ConfigError, match=r"expected a JSONL file, found .*No such file"):
        calibration_prompts(
            CalibrationConfig(prompts="none"), base_dir=tmp_path, tokenizer_dir=None, vocab_size=9, template_options={}
        )


def test_ranges_are_kept_under_all_that_they_depend_on(monkeypatch, tmp_path: Path) -> None:
    assert cache_key({"a": 1, "b": 2}) == cache_key({"b": 2, "a": 1}) != cache_key({"a": 1, "b": 3})
    before = cache_key({"a": 1})
    monkeypatch.setattr(calibrate, "CALIBRATION_VERSION", 10**6)
    assert cache_key({"a": 1}) != before
    calibration = Calibration(input_amax={"target.layers.0.o": 2.5})
    write_cached("k", calibration)
    assert read_cached("k") == calibration and read_cached("l") is None
    assert [path.name for path in cache_dir().iterdir()] == ["k.json"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert read_cached("k") is None and cache_dir() == tmp_path / "other/dflash-trt/calibration"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home/.cache/dflash-trt/calibration"
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")  # where nothing can be kept
    write_cached("k", calibration)
    assert read_cached("k") is None
