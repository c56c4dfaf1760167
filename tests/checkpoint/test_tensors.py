"""Safetensors files are proven whole from their headers; a broken one is refused and never crashes us."""

import json
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint import weights
from dflash_trt.checkpoint.tensors import StoredTensor, StoredTensors, listed, read_header, scan_tensors
from tests.checkpoint.refusals import Copy
from tests.factories import edit_json, read_json, write_json


def scan(directory: Path) -> tuple[StoredTensors, str]:
    problems: list[str] = []
    return scan_tensors(directory, label="target", problems=problems), "\n".join(problems)


def problems_of(path: Path) -> str:
    problems: list[str] = []
    assert read_header(path, label="target", problems=problems) is None
    assert len(problems) == 1
    return problems[0]


def write_raw(path: Path, header: object, num_data_bytes: int) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_data_bytes))
    return path


@pytest.mark.parametrize("name", ["qwen3", "sharded"])
def test_the_header_tells_what_the_safetensors_library_reads(checkpoints: Path, name: str) -> None:
    stored, problems = scan(checkpoints / name)
    assert not problems
    num_tensors = 0
    for path in (checkpoints / name).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a dictionary)
                tensor = file.get_slice(key)
                ours = stored.tensors[key]
                assert (ours.path, list(ours.shape), ours.dtype) == (path, tensor.get_shape(), tensor.get_dtype())
                num_tensors += 1
    assert num_tensors == len(stored.tensors)


def test_every_dtype_of_torch_is_read(tmp_path: Path) -> None:
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool)
    save_file({str(dtype): torch.zeros(3, dtype=dtype) for dtype in dtypes}, tmp_path / "model.safetensors")
    stored, problems = scan(tmp_path)
    assert not problems
    assert [stored.tensors[str(dtype)].dtype for dtype in dtypes] == ["F64", "F32", "F16", "BF16", "I64", "I8", "BOOL"]


@settings(max_examples=100, deadline=None)
@given(fraction=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(checkpoints: Path, fraction: float) -> None:
    whole = (checkpoints / "zlab" / "model.safetensors").read_bytes()
    path = checkpoints / "cut.safetensors"
    path.write_bytes(whole[: int(fraction * len(whole))])
    assert "target file 'cut.safetensors': expected" in problems_of(path)


def test_a_file_with_bytes_after_its_end_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((checkpoints / "zlab" / "model.safetensors").read_bytes() + b"x")
    size = sum(tensor.nbytes for tensor in load_file(checkpoints / "zlab" / "model.safetensors").values())
    assert f"expected {size} bytes of tensors, as its header says, found {size + 1}." in problems_of(path)


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, 3000), value=st.integers(0, 255))
def test_a_header_we_accept_is_one_that_the_library_accepts(checkpoints: Path, at: int, value: int) -> None:
    """Flip any byte of length and header: we refuse, or the library opens the file too and sees the same tensors."""
    raw = bytearray((checkpoints / "zlab" / "model.safetensors").read_bytes())
    raw[at] = value
    path = checkpoints / "flipped.safetensors"
    path.write_bytes(raw)
    tensors = read_header(path, label="target", problems=[])
    if tensors is None:
        return
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(tensors)


SPAN = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "num_data_bytes"),
    [
        ([], 0),
        ({"a": 3}, 0),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8),
        ({"a": SPAN | {"shape": [3]}}, 8),
        ({"a": SPAN | {"shape": [-2]}}, 8),
        ({"a": SPAN | {"shape": [True, 2]}}, 8),
        ({"a": SPAN | {"dtype": None}}, 8),
        ({"a": SPAN | {"data_offsets": [8, 0]}}, 8),
        ({"a": SPAN | {"data_offsets": [0, 8, 16]}}, 8),
        ({"a": SPAN, "b": SPAN}, 8),
        ({"a": SPAN, "b": SPAN | {"data_offsets": [12, 20]}}, 20),
        ({"a": SPAN | {"data_offsets": [4, 12]}}, 12),
        ({}, 4),
        ({"a": SPAN, "__metadata__": {"format": 3}}, 8),
        ({"a": SPAN, "__metadata__": []}, 8),
        ({"a": SPAN | {"shape": [10**4000] * 10_000}}, 8),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path: Path, header: object, num_data_bytes: int) -> None:
    path = write_raw(tmp_path / "model.safetensors", header, num_data_bytes)
    assert "target file 'model.safetensors': expected " in problems_of(path)
    with pytest.raises(SafetensorError), safe_open(path, framework="pt"):
        pass


def test_a_git_lfs_pointer_is_recognized(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "found a Git LFS pointer (run `git lfs pull`)" in problems_of(path)


def test_a_directory_without_tensors_is_refused(tmp_path: Path) -> None:
    stored, problems = scan(tmp_path)
    assert not stored.is_complete
    assert "expected model.safetensors or model.safetensors.index.json, found neither" in problems
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "found PyTorch .bin files. Convert the checkpoint to safetensors." in scan(tmp_path)[1]


def test_a_missing_shard_is_named_with_the_tensors_it_should_hold(copy_of: Copy) -> None:
    target = copy_of("sharded")
    (target / "model-00002-of-00007.safetensors").unlink()
    stored, problems = scan(target)
    weight_map = read_json(target / "model.safetensors.index.json")["weight_map"]
    lost = {name for name, file in weight_map.items() if file == "model-00002-of-00007.safetensors"}
    assert stored.unreadable_names == lost
    assert f"file 'model-00002-of-00007.safetensors': expected a shard with {len(lost)} tensors, found none" in problems


def test_a_truncated_shard_is_named(copy_of: Copy) -> None:
    target = copy_of("sharded")
    path = target / "model-00003-of-00007.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    stored, problems = scan(target)
    assert stored.unreadable_names
    assert "file 'model-00003-of-00007.safetensors'" in problems


def test_an_index_of_another_revision_is_refused(copy_of: Copy) -> None:
    target = copy_of("sharded")
    index = target / "model.safetensors.index.json"
    fields = read_json(index)
    fields["weight_map"]["model.extra.weight"] = fields["weight_map"]["model.norm.weight"]
    write_json(index, fields)
    assert "found a difference in 'model.extra.weight'" in scan(target)[1]


@pytest.mark.parametrize(
    "weight_map",
    [
        None,
        [],
        {"a": 3},
        {"a": "../model.safetensors"},
        {"a": "/etc/x.safetensors"},
        {"a": "\0.safetensors"},
        {"a": "x" * 300 + ".safetensors"},
    ],
)
def test_an_index_must_name_files_of_its_own_directory(copy_of: Copy, weight_map: object) -> None:
    target = copy_of("sharded")
    edit_json(target / "model.safetensors.index.json", weight_map=weight_map)
    stored, problems = scan(target)
    assert not stored.is_complete
    assert "expected a weight_map from tensor names to files of the same directory" in problems


def test_a_single_file_is_preferred_to_an_index_as_in_transformers(checkpoints: Path, copy_of: Copy) -> None:
    target = copy_of("sharded")
    shutil.copyfile(checkpoints / "qwen3" / "model.safetensors", target / "model.safetensors")
    stored, problems = scan(target)
    assert not problems
    assert stored.files == (target / "model.safetensors",)


def test_eight_names_are_listed_and_the_rest_is_counted() -> None:
    names = [f"t{i}" for i in range(10)]
    assert listed(names[:8]) == ", ".join(f"'t{i}'" for i in range(8))
    assert listed(names) == f"{listed(names[:8])} and 2 more"


def test_an_index_of_very_many_shards_is_read_in_linear_time(tmp_path: Path) -> None:
    """Sets made for each shard out of all names took 20,000 shards a minute."""
    weight_map = {f"model.layers.{i}.weight": f"model-{i:05}.safetensors" for i in range(20_000)}
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": weight_map})
    write_raw(tmp_path / "model-00000.safetensors", {"model.layers.0.weight": SPAN}, 8)
    started_s = time.monotonic()
    stored, problems = scan(tmp_path)
    assert time.monotonic() - started_s < 5
    assert set(stored.tensors) == {"model.layers.0.weight"}
    assert stored.unreadable_names == weight_map.keys() - {"model.layers.0.weight"}
    assert "expected 20000 shards, found none for 19999 of them" in problems
    assert len(problems.splitlines()) < 12


def test_a_file_is_mapped_anew_after_a_while_and_closed_at_the_end(tmp_path: Path, monkeypatch) -> None:
    """What was read of a mapped file counts as memory of the process until then."""
    save_file({"a": torch.arange(16.0)}, tmp_path / "model.safetensors")
    tensor = StoredTensor(path=tmp_path / "model.safetensors", name="a", dtype="F32", shape=(16,))
    monkeypatch.setattr(weights, "_MAX_MAPPED_BYTES", 2 * tensor.num_bytes - 1)
    opened: list[Any] = []

    class Mapped:
        def __init__(self, *words: Any, **options: Any) -> None:
            self.is_closed = False
            self.file = safe_open(*words, **options)
            opened.append(self)

        def __enter__(self) -> Any:
            return self.file.__enter__()

        def __exit__(self, *exception: object) -> None:
            self.is_closed = True
            self.file.__exit__(*exception)

    monkeypatch.setattr(weights, "safe_open", Mapped)
    with ExitStack() as stack:
        files, num_opened = weights.OpenFiles(stack), []
        for _ in range(6):
            assert torch.equal(files.slice_of(tensor)[:], torch.arange(16.0))
            num_opened.append(len(opened))
        assert num_opened == [1, 1, 2, 2, 3, 3]
        files.slice_of(tensor, num_bytes=0)
        files.slice_of(tensor, num_bytes=0)
        assert [each.is_closed for each in opened] == [True, True, True, False]
    assert all(each.is_closed for each in opened)
