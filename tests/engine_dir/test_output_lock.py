"""Two builds of one path: one wins, one is told. What killed builds leave is nobody's, and goes."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_trt.core.errors import BuildError
from dflash_trt.engine_dir import EngineDir, reserve_output
from dflash_trt.engine_dir.writing import _publish
from tests.engine_dir.building import build

# Builds an engine and waits, in the middle of writing its weights, for a line.
BUILDER = """
import sys
from pathlib import Path
from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig

def wait(progress):
    if progress.done_bytes and progress.stage == "writing weights":
        print("writing", flush=True)
        sys.stdin.readline()

base_dir, output, overwrite = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "overwrite"
config = BuildConfig(target="target", dtype="float32")
build_engine(config, output, base_dir=base_dir, overwrite=overwrite, command=("build",), progress=wait)
"""


class Builder:
    """Another process that is building, until `finish` or `kill`."""

    def __init__(self, base_dir: Path, output: Path, *, overwrite: bool = False) -> None:
        words = [sys.executable, "-c", BUILDER, str(base_dir), str(output), "overwrite" if overwrite else ""]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"writing\n"

    def finish(self) -> int:
        self.process.communicate(b"\n" * 1000)
        return self.process.returncode

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_builds_of_one_path_the_later_is_refused_and_the_earlier_finishes(
    checkpoints: Path, tmp_path: Path, overwrite: bool
) -> None:
    output = tmp_path / "engine"
    if overwrite:
        build(checkpoints, output, max_seq_len=64)
    (tmp_path / "link").symlink_to("engine")
    builder = Builder(checkpoints, output, overwrite=overwrite)
    try:
        said = rf"output {output}: expected one build, found another build .* \(process {builder.process.pid} on "
        for other in (output, tmp_path / "link"):
            with pytest.raises(BuildError, match=said):
                build(checkpoints, other, overwrite=True)
        build(checkpoints, tmp_path / "engine2")  # another path is free
    finally:
        assert builder.finish() == 0
    assert EngineDir.open(output).manifest.build_config.max_seq_len == 512
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine", "engine2", "link"]


def test_what_a_killed_build_left_is_named_and_removed_by_the_next_one(checkpoints: Path, tmp_path: Path) -> None:
    output = tmp_path / "engine"
    Builder(checkpoints, output).kill()
    [left] = tmp_path.glob(".engine.tmp-*")
    other = tmp_path / ".engine2.tmp-00000000"  # of another path
    mine = tmp_path / ".engine.tmp-mine"
    for path in (other, mine):
        path.mkdir()
    messages: list[str] = []
    with reserve_output(output, warn=messages.append):
        assert messages == [f"removed {left}, left by a killed build"]
    build(checkpoints, output)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".engine.tmp-mine", ".engine2.tmp-00000000", "engine"]


def test_a_living_builders_directory_is_left_alone(checkpoints: Path, tmp_path: Path) -> None:
    builder = Builder(checkpoints, tmp_path / "engine")
    try:
        with pytest.raises(BuildError, match="expected one build"):
            build(checkpoints, tmp_path / "engine")
        assert len(list(tmp_path.glob(".engine.tmp-*"))) == 1
    finally:
        assert builder.finish() == 0


def test_an_engine_that_a_killed_build_had_moved_aside_comes_back(engine: Path) -> None:
    aside = engine.with_name(".engine.old-0123abcd")
    engine.rename(aside)
    messages: list[str] = []
    with pytest.raises(BuildError, match="found an engine"), reserve_output(engine, warn=messages.append):
        pass
    assert messages == [f"restored {engine}, which a killed build had moved to {aside}"]
    EngineDir.open(engine)


def test_an_engine_that_came_during_the_build_is_not_replaced(engine: Path, checkpoints: Path, tmp_path: Path) -> None:
    """Copied there, by somebody who takes no lock."""
    output, temporary = tmp_path / "output", tmp_path / "temporary"
    temporary.mkdir()
    with reserve_output(output) as reserved:
        engine.rename(output)
        with pytest.raises(BuildError, match="expected a new path, found an engine"):
            _publish(temporary, reserved)
    EngineDir.open(output)


def test_what_killed_builds_left_is_removed_and_nothing_that_only_looks_like_it(engine: Path) -> None:
    beside = engine.parent
    left = [beside / f".engine.{name}" for name in ("old-0123abcd", "tmp-00000000", "tmp-ffffffff")]
    kept = [beside / f".engine.{name}" for name in ("tmp-000000000", "tmp-0000000", "tmp-mine", "new-00000000")]
    for path in (*left, *kept):
        path.mkdir()
    file, link = beside / ".engine.tmp-11111111", beside / ".engine.tmp-22222222"
    file.write_text("mine")
    link.symlink_to("engine")
    messages: list[str] = []
    with reserve_output(engine, overwrite=True, warn=messages.append):
        assert messages == [f"removed {path}, left by a killed build" for path in left]
    assert set(beside.iterdir()) == {engine, file, link, *kept}
    EngineDir.open(engine)


def test_a_lock_that_the_build_before_has_just_removed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, flock = tmp_path / ".engine.lock", fcntl.flock
    ends = iter([lock])

    def flock_late(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        for path in ends:
            path.unlink()

    monkeypatch.setattr(fcntl, "flock", flock_late)
    with reserve_output(tmp_path / "engine"):
        assert lock.exists()
    assert not lock.exists()


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / ".engine.lock").symlink_to("mine")
    (tmp_path / "mine").write_text("my thesis")
    with pytest.raises(BuildError, match="expected a path that can be written"), reserve_output(tmp_path / "engine"):
        pass
    assert (tmp_path / "mine").read_text() == "my thesis"


def test_a_lock_file_that_nobody_holds_stops_nobody(checkpoints: Path, tmp_path: Path) -> None:
    (tmp_path / ".engine.lock").write_text(f"process 1 on {'elsewhere' * 20}")
    with reserve_output(tmp_path / "engine"):
        assert (tmp_path / ".engine.lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    build(checkpoints, tmp_path / "engine")
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_a_build_in_this_process_is_another_build_too(tmp_path: Path) -> None:
    with reserve_output(tmp_path / "engine"):
        with pytest.raises(BuildError, match=rf"process {os.getpid()} on"), reserve_output(tmp_path / "engine"):
            pass
        assert (tmp_path / ".engine.lock").exists()
    assert list(tmp_path.iterdir()) == []
