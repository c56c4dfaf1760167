"""Files of prefix blocks: what was written comes back, or nothing does."""

import os
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from dflash_trt.core.runtime_config import SettingError
from dflash_trt.scheduler.stored_prefixes import Block
from dflash_trt.serving.prefix_directory import PrefixDirectory


def block(number: int, *, is_state: bool = False, groups: int = 1) -> Block:
    return Block(key=bytes([number]) * 32, is_state=is_state, groups=0 if is_state else groups)


def parts_of(number: int, size: int = 100) -> list[bytes]:
    return [bytes([number]) * size, bytes([number, 1]) * size]


def read(store: PrefixDirectory, wanted: Block, size: int = 100) -> list[bytes] | None:
    parts = [bytearray(size), bytearray(2 * size)]
    return [bytes(part) for part in parts] if store.read(wanted, [memoryview(part) for part in parts]) else None


@pytest.fixture
def store(tmp_path: Path) -> PrefixDirectory:
    return PrefixDirectory(tmp_path, name="engine", max_bytes=10_000)


def the_file(root: Path) -> Path:
    (path,) = root.glob("engine/??/*")
    return path


def test_what_was_written_is_found_and_read_by_another_process(store: PrefixDirectory, tmp_path: Path) -> None:
    assert store.find(block(1).key) == [] and not store.knows(block(1))
    assert store.write(block(1, groups=5), parts_of(1)) and store.write(block(1, is_state=True), parts_of(2))
    for one in (store, PrefixDirectory(tmp_path, name="engine", max_bytes=10_000)):
        assert one.find(block(1).key) == [block(1, groups=5), block(1, is_state=True)]
        assert one.knows(block(1, groups=4)) and not one.knows(block(1, groups=7)) and not one.knows(block(2))
        assert read(one, block(1, groups=5)) == parts_of(1)
        assert read(one, block(1, is_state=True)) == parts_of(2)
    assert PrefixDirectory(tmp_path, name="other", max_bytes=10_000).find(block(1).key) == []


def test_a_block_of_more_groups_replaces_the_file(store: PrefixDirectory) -> None:
    store.write(block(1), parts_of(1))
    size = store.num_bytes
    store.write(block(1, groups=3), parts_of(2))
    assert store.find(block(1).key) == [block(1, groups=3)] and store.num_bytes == size
    assert read(store, block(1)) is None, "it holds more than was asked for, so it was replaced since"


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[:20],
        lambda content: content + b"x",
        lambda content: content[:-7] + bytes([content[-7] ^ 1]) + content[-6:],
        lambda content: b"nothing of ours",
        lambda content: b"",
    ],
)
def test_a_damaged_file_is_a_miss_and_goes(store: PrefixDirectory, tmp_path: Path, damage) -> None:
    store.write(block(1), parts_of(1))
    path = the_file(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert read(store, block(1)) is None
    assert not path.exists() and not store.knows(block(1)) and store.num_bytes == 0
    assert store.write(block(1), parts_of(1)) and read(store, block(1)) == parts_of(1)


def test_a_file_of_another_size_of_places_is_a_miss(store: PrefixDirectory) -> None:
    store.write(block(1), parts_of(1, size=99))
    assert read(store, block(1), size=100) is None


def test_the_least_recently_used_file_goes_first_also_for_the_next_process(
    store: PrefixDirectory, tmp_path: Path
) -> None:
    each = 20 + 300
    for number in range(3):
        store.write(block(number), parts_of(number))
        os.utime(the_file_of(tmp_path, number), (1000 + number, 1000 + number))
    assert store.num_bytes == 3 * each
    assert read(store, block(0)) == parts_of(0)
    small = PrefixDirectory(tmp_path, name="engine", max_bytes=3 * each)
    small.write(block(3), parts_of(3))
    assert [bool(small.find(block(number).key)) for number in range(4)] == [True, False, True, True]
    assert small.num_bytes == 3 * each
    assert not small.write(block(4), parts_of(4, size=10_000)), "larger than all"
    assert small.find(block(3).key)


def the_file_of(root: Path, number: int) -> Path:
    name = block(number).key.hex()
    return root / "engine" / name[:2] / f"{name}.pages"


def test_without_a_size_half_of_what_is_free_is_used(tmp_path: Path) -> None:
    with patch("shutil.disk_usage") as usage:
        usage.return_value.free = 2 * 320
        store = PrefixDirectory(tmp_path, name="engine")
    store.write(block(0), parts_of(0))
    store.write(block(1), parts_of(1))
    assert store.num_bytes == 320 and not store.find(block(0).key)
    with patch("shutil.disk_usage") as usage:
        usage.return_value.free = 320  # and 320 bytes are its own
        store = PrefixDirectory(tmp_path, name="engine")
    assert store.write(block(2), parts_of(2)) and store.num_bytes == 320


def test_a_full_disk_and_a_file_that_is_gone_are_misses(store: PrefixDirectory, tmp_path: Path) -> None:
    with patch("os.replace", side_effect=OSError(28, "No space left on device")):
        assert not store.write(block(1), parts_of(1))
    assert list(tmp_path.glob("engine/.*")) == [], "nothing half written is left"
    store.write(block(1), parts_of(1))
    the_file(tmp_path).unlink()
    assert read(store, block(1)) is None
    assert store.find(block(1).key) == [] and not store.knows(block(1)), "it is written again"


def test_what_a_killed_process_left_half_written_goes_after_an_hour(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    for name, age_s in ((".old", 4000), (".new", 10)):
        path = tmp_path / "engine" / name
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age_s,) * 2)
    assert PrefixDirectory(tmp_path, name="engine").num_bytes == 0
    assert [path.name for path in (tmp_path / "engine").iterdir()] == [".new"]


def test_a_file_that_goes_while_the_directory_is_read_is_none(store: PrefixDirectory, tmp_path: Path) -> None:
    store.write(block(1), parts_of(1))
    with patch("dflash_trt.serving.prefix_directory._known", side_effect=FileNotFoundError):
        assert PrefixDirectory(tmp_path, name="engine").num_bytes == 0


def test_a_directory_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match=r"disk_cache_dir: expected a directory, found .*: .*file/engine"):
        PrefixDirectory.open(tmp_path / "file", name="engine", max_bytes=1)


def test_threads_write_and_read_at_once(store: PrefixDirectory) -> None:
    failures: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            store.write(block(number % 3), parts_of(number % 3))
            if read(store, block(number % 3)) not in (None, parts_of(number % 3)):
                failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and store.num_bytes == 3 * 320
