"""Speed of `dflash-trt run` with one thread and with all, alone and beside one busy process, as a table.

The busy process is this script's own, and ends with it. Runs alternate, so that a change of the machine's load meets
all of them; the numbers are medians. "spinning" are all threads waiting as OpenMP does by default.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

PROMPT = "import os\n\ndef main():\n"
# Columns: words for `run`, and the environment.
MODES: dict[str, tuple[list[str], dict[str, str]]] = {
    "one thread": (["--num-threads", "1"], {}),
    "all threads": ([], {}),
    "all threads, spinning": ([], {"GOMP_SPINCOUNT": "300000"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--no-drafter", action="store_true", help="Plain decoding: more and smaller parallel regions.")
    options = parser.parse_args()
    words = [str(options.engine), "--prompt", PROMPT, "--max-new-tokens", str(options.max_new_tokens), "--ignore-eos"]
    words += ["--no-drafter"] * options.no_drafter
    speeds: dict[tuple[str, bool], list[float]] = {(mode, is_busy): [] for mode in MODES for is_busy in (False, True)}
    for _ in range(options.rounds):
        for (mode, is_busy), found in speeds.items():
            more_words, environment = MODES[mode]
            found.append(tokens_per_s([*words, *more_words], environment, is_busy=is_busy))
    medians = {key: median(found) for key, found in speeds.items()}
    print("| `run` with | alone, tok/s | beside one busy process, tok/s | of one thread's |\n|---|---:|---:|---:|")
    for mode in MODES:
        alone, beside = medians[mode, False], medians[mode, True]
        print(f"| {mode} | {alone:.0f} | {beside:.0f} | {beside / medians['one thread', True]:.2f} |")


def tokens_per_s(words: list[str], environment: dict[str, str], *, is_busy: bool) -> float:
    with busy_process(is_busy):
        ran = subprocess.run(
            [sys.executable, "-m", "dflash_trt.cli.main", "run", *words, "--json"],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            check=True,
        )
    summary = json.loads(ran.stdout)["summary"]
    return float(summary["num_output_tokens"] / summary["wall_time_s"])


@contextmanager
def busy_process(is_wanted: bool) -> Iterator[None]:
    if not is_wanted:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
