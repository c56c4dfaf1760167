import hashlib
import json
import os
import shutil
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import BuildError
from dflash_trt.engine_dir import EngineDir, needed_bytes_for, reserve_output, write_engine_dir
from dflash_trt.engine_dir.tensor_file import read_tensor_headers
from dflash_trt.engine_dir.writing import _HashedFile, _Storage
from tests.engine_dir.building import build


def test_the_weights_are_those_of_the_tables_in_their_order(built: Path) -> None:
    manifest = EngineDir.open(built).manifest
    assert manifest.draft is not None
    table = manifest.target.weights() | manifest.draft.weights()
    headers = read_tensor_headers(built / "rank0.safetensors")
    assert {name: header.shape for name, header in headers.items()} == {
        name: spec.shape for name, spec in table.items()
    }
    stored = json.loads(_header_text(built / "rank0.safetensors"))
    assert [name for name in stored if name != "__metadata__"] == list(table)


def test_integer_tensors_stay_int64_in_a_bfloat16_engine(checkpoints: Path, tmp_path: Path) -> None:
    engine = build(checkpoints, tmp_path / "engine", drafter="speculator", dtype="bfloat16")
    tensors = load_file(engine.weights_path(0))
    assert tensors["draft.draft_to_target"].dtype == torch.int64
    assert {tensor.dtype for name, tensor in tensors.items() if name != "draft.draft_to_target"} == {torch.bfloat16}


def test_a_target_without_a_tokenizer_gives_an_engine_without_one(checkpoints: Path, tmp_path: Path) -> None:
    assert build(checkpoints, tmp_path / "engine", target="untokenized").tokenizer_path is None


def test_the_needed_space_is_that_of_all_files_of_all_ranks(checkpoints: Path, tmp_path: Path) -> None:
    """With plans one rank's weights at a time stand beside them; config.json and the like have a MiB."""
    engine = build(checkpoints, tmp_path / "engine", drafter="drafter", tp_size=2)
    config, path = engine.manifest.pretrained_config, engine.path
    (first, second), tokenizer = (sorted(path.glob("rank*")), {"a": b"12345", "b": b"67"})
    weights_bytes = first.stat().st_size
    assert second.stat().st_size == weights_bytes
    assert needed_bytes_for(config, {}) == 2 * weights_bytes + 2**20
    assert needed_bytes_for(config, tokenizer, has_plans=True, plugin_library=path / "config.json") == (
        3 * weights_bytes + 7 + (path / "config.json").stat().st_size + 2**20
    )


def test_a_file_is_written_and_hashed_whole_however_little_the_system_takes_at_once(tmp_path: Path) -> None:
    class Slow(FileIO):
        def write(self, chunk: Any) -> int:
            return super().write(bytes(chunk[:3]))

    with Slow(str(tmp_path / "f"), "w") as stream:
        file = _HashedFile(stream, _Storage(tmp_path / "f"))
        for chunk in (b"0123456789", memoryview(b"abcd")):
            file.write(chunk)
    content = (tmp_path / "f").read_bytes()
    assert (content, file.size_bytes) == (b"0123456789abcd", 14)
    assert file.sha256.hexdigest() == hashlib.sha256(content).hexdigest()


def test_a_disk_with_just_enough_space_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 5))
    for needed_bytes, wanted in ((5, pytest.raises(AssertionError, match="finish")), (6, pytest.raises(BuildError))):
        with wanted, reserve_output(tmp_path / "engine") as output, write_engine_dir(output, needed_bytes=needed_bytes):
            pass
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_build_leaves_nothing(checkpoints: Path, tmp_path: Path) -> None:
    def interrupt(progress: Any) -> None:
        if progress.done_bytes:
            raise KeyboardInterrupt

    config = BuildConfig(target="target")
    with pytest.raises(KeyboardInterrupt):
        build_engine(
            config, tmp_path / "very/deep/engine", base_dir=checkpoints, overwrite=False, command=(), progress=interrupt
        )
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_between_the_renames_brings_the_old_engine_back(
    engine: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (engine / "config.json").read_bytes()
    rename = Path.rename

    def interrupted_rename(self: Path, target: Path) -> Path:
        if ".tmp-" in self.name:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted_rename)
    with pytest.raises(KeyboardInterrupt):
        build(checkpoints, engine, overwrite=True, max_seq_len=64)
    assert (engine / "config.json").read_bytes() == before
    assert [path.name for path in engine.parent.iterdir()] == ["engine"]


def test_a_damaged_engine_may_be_replaced(engine: Path, checkpoints: Path) -> None:
    (engine / "rank0.safetensors").unlink()
    assert build(checkpoints, engine, overwrite=True, max_seq_len=64).manifest.build_config.max_seq_len == 64
    assert [path.name for path in engine.parent.iterdir()] == ["engine"]


def test_an_empty_directory_and_a_link_to_an_engine_may_be_written_to(checkpoints: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    build(checkpoints, tmp_path / "empty")
    (tmp_path / "link").symlink_to("empty")
    build(checkpoints, tmp_path / "link", overwrite=True, max_seq_len=64)
    assert (tmp_path / "link").is_symlink()
    assert EngineDir.open(tmp_path / "empty").manifest.build_config.max_seq_len == 64


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path, checkpoints: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="expected a path that can be written, found Not a directory"):
        build(checkpoints, tmp_path / "file/engine")


def test_the_builders_own_errors_are_not_taken_for_the_disks(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError),
        reserve_output(tmp_path / "engine") as output,
        write_engine_dir(output, needed_bytes=0),
    ):
        (tmp_path / "a checkpoint that went away").read_bytes()
    assert list(tmp_path.iterdir()) == []


def test_permissions_follow_the_umask(checkpoints: Path, tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        engine = build(checkpoints, tmp_path / "engine")
    finally:
        os.umask(old)
    assert engine.path.stat().st_mode & 0o777 == 0o750
    assert engine.weights_path(0).stat().st_mode & 0o777 == 0o640


def test_links_of_a_checkpoint_become_files_as_in_the_hub_cache(checkpoints: Path, tmp_path: Path) -> None:
    """A snapshot of the Hugging Face cache is a directory of links into its blobs."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in (checkpoints / "target").iterdir():
        (snapshot / path.name).symlink_to(path)
    engine = build(tmp_path, tmp_path / "engine", target="snapshot")
    assert not any(path.is_symlink() for path in engine.path.rglob("*"))
    EngineDir.open(engine.path)


def _header_text(path: Path) -> bytes:
    content = path.read_bytes()
    return content[8 : 8 + int.from_bytes(content[:8], "little")]
