"""The cache of the CPU kernels: only a whole library that nobody else can write is loaded. The compiler is a script."""

import os
import shutil
import stat
from pathlib import Path

import pytest

from dflash_trt.backends.torch.native import build
from dflash_trt.backends.torch.native.build import UnavailableError, instruction_sets, library_path

try:
    instruction_sets()
except UnavailableError as error:
    pytest.skip(str(error), allow_module_level=True)

CONTENT = b"a library of one line\n"


@pytest.fixture(autouse=True)
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "compiler"
    path.write_text(f'#!/bin/sh\nfor last; do :; done\nprintf "%s\\n" "{CONTENT.decode().strip()}" > "$last"\n')
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


@pytest.mark.parametrize("change", ["empty", "cut", "a byte shorter", "another byte"])
def test_a_library_that_is_not_whole_is_compiled_again(change: str) -> None:
    path = library_path()
    whole = path.read_bytes()
    assert whole.startswith(CONTENT) and len(whole) == len(CONTENT) + 32
    changed = {"empty": b"", "cut": whole[:9], "a byte shorter": whole[:-1], "another byte": b"b" + whole[1:]}[change]
    path.write_bytes(changed)
    assert library_path() == path and path.read_bytes() == whole


def test_a_whole_library_is_not_compiled_again() -> None:
    inode = library_path().stat().st_ino
    assert library_path().stat().st_ino == inode


def test_without_a_compiler_a_library_that_is_not_whole_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    library_path().write_bytes(CONTENT)
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    with pytest.raises(UnavailableError, match=r"no C\+\+ compiler"):
        library_path()


@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("is_directory", [True, False])
def test_a_cache_that_others_can_write_is_not_used(is_directory: bool, mode: int) -> None:
    path = library_path()
    place = path.parent if is_directory else path
    place.chmod(0o755 | mode)
    with pytest.raises(UnavailableError, match=f"{place} can be written by other users; run chmod go-w {place}$"):
        library_path()


@pytest.mark.parametrize("is_directory", [True, False])
def test_a_cache_of_another_user_is_not_used(is_directory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    path = library_path()
    place = path.parent if is_directory else path
    if os.geteuid() == 0:
        os.chown(place, 12345, -1)
    else:
        own = Path.stat

        def stat_of(self: Path, **options: bool) -> os.stat_result:
            found = own(self, **options)
            return os.stat_result([*found[:4], 12345, *found[5:10]]) if self == place else found

        monkeypatch.setattr(Path, "stat", stat_of)
    with pytest.raises(UnavailableError, match=f"{place} belongs to user 12345; set XDG_CACHE_HOME"):
        library_path()


def test_what_is_compiled_can_be_written_by_its_owner_alone() -> None:
    before = os.umask(0)
    try:
        path = library_path()
    finally:
        os.umask(before)
    assert [stat.S_IMODE(place.stat().st_mode) for place in (path.parent, path)] == [0o755, 0o755]
    assert list(path.parent.iterdir()) == [path]


def test_a_library_is_on_disk_before_it_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[tuple[bool, bool]] = []
    own = os.fsync

    def fsync(descriptor: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        flushed.append((is_directory, any((Path(os.environ["XDG_CACHE_HOME"]) / "dflash-trt").glob("*.so"))))
        own(descriptor)

    monkeypatch.setattr(build.os, "fsync", fsync)
    library_path()
    assert flushed == [(False, False), (True, True)]


def test_its_name_changes_with_every_source_and_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "src"
    shutil.copytree(build._SOURCES, sources)
    monkeypatch.setattr(build, "_SOURCES", sources)
    names = [library_path().name]
    files = sorted(sources.iterdir())
    assert {"kernels.h", "attention.cpp"} <= {file.name for file in files}
    for file in files:
        file.write_text(file.read_text() + "// changed\n")
        names.append(library_path().name)
    assert len(set(names)) == len(files) + 1
