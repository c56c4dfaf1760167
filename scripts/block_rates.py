#!/usr/bin/env python3
"""How fast one thread writes blocks of cached prefixes into a directory, and reads them.

    python -m scripts.block_rates [/dev/shm] [--mebibytes 5] [--rounds 5]

Prefill workers hand prompts over through such a directory.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median

from dflash_trt.scheduler.stored_prefixes import Block
from dflash_trt.serving.prefix_directory import PrefixDirectory

NUM_BLOCKS = 40


def rates(directory: Path, num_bytes: int) -> tuple[float, float]:
    """Gigabytes per second that are written, and read."""
    store = PrefixDirectory(directory, name="rates", max_bytes=2 * NUM_BLOCKS * num_bytes)
    content, place = os.urandom(num_bytes), memoryview(bytearray(num_bytes))
    blocks = [Block(key=index.to_bytes(20), is_state=False, groups=1) for index in range(NUM_BLOCKS)]
    started_s = time.perf_counter()
    is_written = [store.write(block, [content]) for block in blocks]
    written_s = time.perf_counter()
    is_read = [store.read(block, [place]) for block in blocks]
    read_s = time.perf_counter()
    assert all(is_written) and all(is_read) and place == content
    num_gigabytes = NUM_BLOCKS * num_bytes / 1e9
    return num_gigabytes / (written_s - started_s), num_gigabytes / (read_s - written_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=Path("/dev/shm"))
    parser.add_argument("--mebibytes", type=int, default=5, help="of a block")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            found.append(rates(Path(directory), options.mebibytes << 20))
    written, read = map(median, zip(*found, strict=True))
    print(f"written at {written:.2f} GB/s, read at {read:.2f} GB/s")


if __name__ == "__main__":
    main()
