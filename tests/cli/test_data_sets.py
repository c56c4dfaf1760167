"""Rows of Hugging Face data sets, as `datasets` itself writes them."""

import re
from pathlib import Path

import pytest

pytest.importorskip("datasets", reason="writes what is read here")

import datasets
import pyarrow as pa

from dflash_trt.bench.conversation import Conversation
from dflash_trt.cli import data_sets
from dflash_trt.cli.bench_options import conversations_of
from dflash_trt.cli.data_sets import columns_of
from dflash_trt.cli.prompt_source import PromptSource
from dflash_trt.core.errors import ConfigError

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "s", "name": "n"}  # a field that the other message lacks
ROWS = [{"prompt": f"p{index}", "category": "ab"[index % 2], "source": "s"} for index in range(6)]
SPEED_BENCH = {"question_id": "0" * 32, "category": "qa", "turns": ["one", "two"], "multiturn": True}


def read_conversations(path: Path, **options: object) -> list[Conversation]:
    return conversations_of(PromptSource(path=path, **options).jobs(takes_turns=True))


def prompts(path: Path, **options: object) -> list[object]:
    return [one.prompt for one in read_conversations(path, **options)]


def test_what_save_to_disk_wrote_is_read_with_all_its_shards(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "all", num_shards=3)
    assert prompts(tmp_path / "all") == [f"p{index}" for index in range(6)]
    assert prompts(tmp_path / "all", categories=("b",)) == ["p1", "p3", "p5"]
    data.select([4, 2]).save_to_disk(tmp_path / "some")
    assert prompts(tmp_path / "some") == ["p4", "p2"], "rows that were left out stay out"
    (shard, *_) = sorted((tmp_path / "all").glob("*.arrow"))
    assert prompts(shard) == ["p0", "p1"]


def test_a_split_is_named_where_there_are_several(tmp_path: Path) -> None:
    splits = {name: datasets.Dataset.from_list(ROWS[:count]) for name, count in (("test", 1), ("train", 4))}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "d")
    assert len(prompts(tmp_path / "d", split="train")) == 4
    for split in (None, "valid"):
        with pytest.raises(ConfigError, match="--split to be one of test, train"):
            read_conversations(tmp_path / "d", split=split)
    datasets.DatasetDict({"train": splits["train"]}).save_to_disk(tmp_path / "single")
    assert len(prompts(tmp_path / "single")) == 4, "the only one needs no name"
    splits["test"].save_to_disk(tmp_path / "one")
    with pytest.raises(ConfigError, match="no --split for it, found test"):
        read_conversations(tmp_path / "one", split="test")


def test_a_snapshot_of_the_hub_is_read_by_configuration_and_split(tmp_path: Path) -> None:
    """As SPEED-Bench's repository: a folder for each configuration."""
    data = datasets.Dataset.from_list([SPEED_BENCH])
    for name in ("qualitative/test", "throughput_1k/test"):
        (tmp_path / name).parent.mkdir()
        data.to_parquet(tmp_path / f"{name}-00000-of-00001.parquet")
    (one,) = read_conversations(tmp_path, split="qualitative/test")
    assert one.category == "qa" and [turn["content"] for (turn,) in one.turns] == ["one", "two"]
    (tmp_path / "h" / "data").mkdir(parents=True)
    for index in range(2):
        part = datasets.Dataset.from_list(ROWS[3 * index : 3 * index + 3])
        part.to_parquet(tmp_path / "h" / "data" / f"train-0000{index}-of-00002.parquet")
    assert len(prompts(tmp_path / "h")) == 6, "one split needs no name"
    for split, count in (("train", 4), ("test", 1)):  # as the Hub converts others: numbers in a folder of the split
        (tmp_path / "converted" / "default" / split).mkdir(parents=True)
        datasets.Dataset.from_list(ROWS[:count]).to_parquet(tmp_path / "converted" / "default" / split / "0000.parquet")
    assert len(prompts(tmp_path / "converted", split="default/test")) == 1
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "0000.parquet")
    assert len(prompts(tmp_path, split="train")) == len(ROWS), "of a number alone"


def test_columns_are_those_that_the_command_line_names(tmp_path: Path) -> None:
    rows = [{"question": "q", "domain": "math", "chat": [SYSTEM, USER], "day": b"x", "turns": None}]
    data = datasets.Dataset.from_list(rows)
    path = tmp_path / "d.parquet"
    data.to_parquet(path)
    (one,) = read_conversations(path, columns=columns_of(["turns=question", "category=domain"]))
    assert one == Conversation(category="math", turns=(({"role": "user", "content": "q"},),))
    (one,) = read_conversations(path, columns=columns_of(["messages=chat"]))
    assert one.turns == ((SYSTEM, USER),), "without the nulls that Arrow fills in"
    line = tmp_path / "d.jsonl"
    line.write_text('{"question": "q", "domain": "math", "other": 1}\n')
    assert prompts(line, columns={"prompt": "question"}) == ["q"]
    with pytest.raises(ConfigError, match="a column text, found question, domain, other"):
        prompts(line, columns={"prompt": "text"})


def test_arrow_files_are_read_as_files_and_as_streams(tmp_path: Path) -> None:
    """With conversations as structs of lists, as older versions of `datasets` wrote them."""
    chats = [{"role": ["system", "user"], "content": ["s", "hi"]}, {"role": [], "content": []}]
    table = pa.table({"messages": chats})
    for name, new in {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}.items():
        path = tmp_path / f"{name}.arrow"
        with new(str(path), table.schema) as writer:
            writer.write_table(table.slice(0, 1))
        (one,) = read_conversations(path)
        assert one.turns == (({"role": "system", "content": "s"}, USER),)


def test_a_row_keeps_its_own_question_id_and_a_value_that_is_missing_is_no_field(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"id": "q7", "text": ["a", "b"], "kind": null}\n\n{"text": "c"}\n')
    columns = {"turns": "text", "category": "kind"}
    assert [(one.category, len(one.turns)) for one in read_conversations(path, columns=columns)] == [
        (None, 2),
        (None, 1),
    ]
    path.write_text('{"question_id": {}, "turns": ["a"]}\n')
    with pytest.raises(ConfigError, match="an id that is a string or an integer"):
        read_conversations(path, columns={"turns": "turns", "question_id": "question_id"})
    path.write_text("\n")
    with pytest.raises(ConfigError, match="at least one prompt"):
        read_conversations(path, columns=columns)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"a column of prompt, messages, .*found question, day"),
        ({"columns": {"prompt": "text"}}, "a column text, found question, day"),
        ({"columns": {"prompt": "day"}}, "d.parquet, row 1: expected text, numbers, lists"),
        ({"split": "test"}, "no --split for it"),
    ],
)
def test_what_has_no_prompts_is_refused_by_name(options: dict, message: str, tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    datasets.Dataset.from_list([{"question": "q", "day": b"x"}]).to_parquet(path)
    with pytest.raises(ConfigError, match=message):
        read_conversations(path, **options)


def test_files_that_are_broken_and_a_library_that_is_missing_are_refused(tmp_path, monkeypatch) -> None:
    for name, text in {"a.parquet": "no parquet", "a.arrow": "no arrow"}.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=f"a readable {name[2:]} file"):
            read_conversations(tmp_path / name)
    (tmp_path / "e").mkdir()
    with pytest.raises(ConfigError, match="a directory with Parquet or Arrow files, found none"):
        read_conversations(tmp_path / "e")
    (tmp_path / "e" / "state.json").write_text("[]")
    with pytest.raises(ConfigError, match="with the key '_data_files'"):
        read_conversations(tmp_path / "e")
    with pytest.raises(ConfigError, match="--split: expected a directory of a data set"):
        read_conversations(tmp_path / "rows.jsonl", split="test")
    for words in (["prompt"], ["text=prompt"], ["prompt="], ["prompt=a", "prompt=b"]):
        with pytest.raises(ConfigError, match="--column: expected FIELD=COLUMN"):
            columns_of(words)
    monkeypatch.setattr(data_sets, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"the package pyarrow.*dflash-trt\[datasets\]"):
        read_conversations(tmp_path / "e")


def test_a_column_is_named_once_by_a_known_field() -> None:
    assert columns_of(["prompt=a=b", "category=c"]) == {"prompt": "a=b", "category": "c"}
    for words, found in (
        (["prompt=a", "prompt=b"], "prompt=a, prompt=b"),
        (["prompt=a", "x=b", "category"], "x=b, category"),
        (["prompt="], "prompt="),
    ):
        with pytest.raises(ConfigError, match=f"--column: expected FIELD=COLUMN.*, found {re.escape(found)}\\."):
            columns_of(words)
