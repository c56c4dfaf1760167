"""Rows of Hugging Face data sets on this disk. Reads files, downloads nothing.

Layouts: a directory that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote (Arrow), a snapshot of a repository
of the Hub (Parquet), or one file of either kind. Only this module imports pyarrow, which reads them.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_trt.cli.prompts import KWARGS_FIELD, PROMPT_FIELDS
from dflash_trt.core.errors import ConfigError

# Fields of a row, and the names of the columns that hold them unless --column says otherwise.
FIELDS = (*PROMPT_FIELDS, "category", "question_id", KWARGS_FIELD)
_ENDINGS = (".parquet", ".arrow")
_SHARD = re.compile(r"[-.]?\d+(-of-\d+)?$")  # as of train-00000-of-00002
_IPC_FILE = b"ARROW1"  # which a file of the other Arrow format, a stream, does not begin with


def is_data_set(path: Path) -> bool:
    return path.is_dir() or path.suffix in _ENDINGS


def columns_of(words: Sequence[str]) -> dict[str, str]:
    """Columns by field, of words such as `prompt=instruction`. Raises ConfigError."""
    columns = dict(word.split("=", 1) for word in words if "=" in word)
    wrong = [word for word in words if word.partition("=")[0] not in FIELDS or not word.partition("=")[2]]
    if wrong or len(columns) < len(words):
        expected = f"FIELD=COLUMN, each field once, of {', '.join(FIELDS)}"
        raise ConfigError.about("--column", expected=expected, found=", ".join(wrong or words))
    return columns


def rows_of_data_set(path: Path, *, columns: Mapping[str, str], split: str | None) -> Iterator[dict[str, Any]]:
    """The fields of each row that have a value.

    `columns` are columns by field; by default a field is its own column.

    Raises:
        ConfigError: pyarrow is not installed, there is no such split or column, or a file cannot be read.
    """
    if find_spec("pyarrow") is None:
        hint = "Install it with: pip install 'dflash-trt[datasets]'"
        raise ConfigError.about(str(path), expected="the package pyarrow", found="none", hint=hint)
    for file in _files(path, split):
        for row in _table(file, columns).to_pylist():
            yield {name: _plain(value) for name, value in row.items() if value is not None}


def _files(path: Path, split: str | None) -> list[Path]:
    by_split = {"": [path]} if path.is_file() else dict(_splits(path))
    names = sorted(by_split)
    if not names:
        raise ConfigError.about(str(path), expected="a directory with Parquet or Arrow files", found="none")
    if split is None and len(names) == 1:
        return by_split[names[0]]
    if split not in by_split:
        expected = "no --split for it" if names == [""] else f"--split to be one of {', '.join(names)}"
        raise ConfigError.about(str(path), expected=expected, found=split or "none")
    return by_split[split]


def _splits(path: Path) -> Iterator[tuple[str, list[Path]]]:
    """Files by split. One in a folder of its configuration is CONFIGURATION/SPLIT; '' is the only one."""
    if (path / "dataset_dict.json").is_file():
        for name in _json(path / "dataset_dict.json", "splits"):
            yield name, _saved(path / name)
    elif (path / "state.json").is_file():
        yield "", _saved(path)
    else:
        found: dict[str, list[Path]] = {}
        for file in sorted(path.rglob("*.parquet")):
            folders = [part for part in file.relative_to(path).parts[:-1] if part != "data"]
            names = [*folders, _SHARD.sub("", file.stem)]
            found.setdefault("/".join(filter(None, names)) or "train", []).append(file)
        yield from found.items()


def _saved(directory: Path) -> list[Path]:
    return [directory / entry["filename"] for entry in _json(directory / "state.json", "_data_files")]


def _json(path: Path, key: str) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        expected = f"a JSON object with the key '{key}'"
        raise ConfigError.about(str(path), expected=expected, found=type(error).__name__) from error


def _table(path: Path, columns: Mapping[str, str]) -> Any:
    """The wanted columns under the names of their fields, as a table of pyarrow."""
    from pyarrow import ArrowException, ipc, memory_map, parquet  # type: ignore[import-untyped, unused-ignore]

    try:
        if path.suffix == ".parquet":
            chosen = _chosen(path, parquet.read_schema(path).names, columns)
            table = parquet.read_table(path, columns=list(chosen.values()), partitioning=None)
        else:
            with path.open("rb") as stream:
                is_file = stream.read(len(_IPC_FILE)) == _IPC_FILE
            source = memory_map(str(path))
            table = (ipc.open_file(source) if is_file else ipc.open_stream(source)).read_all()
            chosen = _chosen(path, table.column_names, columns)
    except (ArrowException, OSError) as error:
        found = str(error).partition("\n")[0]
        raise ConfigError.about(str(path), expected=f"a readable {path.suffix[1:]} file", found=found) from error
    return table.select(list(chosen.values())).rename_columns(list(chosen))


def _chosen(path: Path, names: Sequence[str], columns: Mapping[str, str]) -> dict[str, str]:
    """Columns by field. Raises ConfigError."""
    chosen = dict(columns) or {name: name for name in FIELDS if name in names}
    missing = [name for name in chosen.values() if name not in names]
    if missing or not chosen.keys() & set(PROMPT_FIELDS):
        expected = f"a column {', '.join(missing)}" if missing else f"a column of {', '.join(PROMPT_FIELDS)}"
        hint = "Name it, for example --column prompt=text."
        raise ConfigError.about(str(path), expected=expected, found=", ".join(names), hint=hint)
    return chosen


def _plain(value: Any) -> Any:
    """`value` without struct fields that Arrow fills with nulls.

    A struct of lists, as older `datasets` write messages, becomes a list of objects.
    """
    if isinstance(value, dict):
        fields = {name: _plain(inner) for name, inner in value.items() if inner is not None}
        if fields.keys() >= {"role", "content"} and all(isinstance(inner, list) for inner in fields.values()):
            return [dict(zip(fields, row, strict=True)) for row in zip(*fields.values(), strict=True)]
        return fields
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
