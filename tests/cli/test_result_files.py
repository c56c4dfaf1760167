"""Files of results appear whole or not at all; rows are emitted in their order, as soon as they can be."""

import json
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.cli.prompts import Refusal
from dflash_trt.cli.result_files import InOrder, json_line, new_jsonl_file, output_rows, write_all
from dflash_trt.core.errors import CapacityError, ConfigError


@given(st.permutations(range(7)))
def test_each_row_is_emitted_once_all_before_it_are_done(order: list[int]) -> None:
    emitted: list[int] = []
    rows = InOrder(lambda index, output: emitted.append(index))
    for number, index in enumerate(order, start=1):
        rows.done(index, None)
        done = set(order[:number])
        assert emitted == list(range(next(i for i in range(8) if i not in done)))


def test_a_line_is_written_whole_however_little_the_system_takes_at_once(tmp_path: Path) -> None:
    class Slow(FileIO):
        def write(self, line: Any) -> int:
            return super().write(bytes(line[:3]))

    with Slow(str(tmp_path / "f"), "w") as stream:
        write_all(stream, json_line({"text": "naïve 你好"}))
    assert (tmp_path / "f").read_text("utf-8") == '{"text": "naïve 你好"}\n'


def test_a_file_is_replaced_when_its_block_ends_well_and_kept_otherwise(tmp_path: Path) -> None:
    path, link = tmp_path / "f", tmp_path / "link"
    path.write_text("old\n")
    link.symlink_to("f")

    def fail(error: BaseException) -> None:
        with new_jsonl_file(link) as write:
            write({"a": 1})
            raise error

    for error in (ValueError("stop"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            fail(error)
        assert path.read_text() == "old\n" and set(tmp_path.iterdir()) == {path, link}
    with new_jsonl_file(link) as write:
        for number in range(3):
            write({"a": number})
        assert path.read_text() == "old\n"
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": number} for number in range(3)]
    assert link.is_symlink() and set(tmp_path.iterdir()) == {path, link}


def test_a_new_file_is_there_when_its_block_has_ended_well_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "new"

    def write_file(error: BaseException | None) -> None:
        with new_jsonl_file(path) as write:
            write({"a": 1})
            assert not path.exists()
            if error is not None:
                raise error

    with pytest.raises(KeyboardInterrupt):
        write_file(KeyboardInterrupt())
    assert not list(tmp_path.iterdir())
    write_file(None)
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == '{"a": 1}\n'


def test_what_cannot_be_made_or_written_says_so() -> None:
    with pytest.raises(ConfigError, match="a file to write, found No such file"), new_jsonl_file(Path("/nowhere/f")):
        pass
    full = "/dev/full: expected a disk that takes the results, found No space left"
    with pytest.raises(CapacityError, match=full), new_jsonl_file(Path("/dev/full")) as write:
        write({"a": 1})


def test_a_refused_row_has_the_fields_of_a_failed_one() -> None:
    [row] = output_rows(Refusal(row_id="x", error="bad"), None)
    assert (row["id"], row["finish_reason"], row["error"], row["text"]) == ("x", "error", "bad", None)
    assert (row["token_ids"], row["num_prompt_tokens"], row["num_output_tokens"]) == ([], 0, 0)
    assert row["acceptance_length"] is None
