"""Runs the commands and the Python of pages in the working directory, as a reader pastes them; a failure ends it.

`.venv/bin` is the working directory's. Pages and their parser are the checkout's; what runs sees nothing else of it.
`--quick` before the pages leaves out the commands that take minutes.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from tests.docs.pages import ROOT, Page  # noqa: E402 - of the checkout

# How a command begins, and why it does not run here.
NOT_RUN = {
    "git clone": "the wheel stands for the clone",
    "cd dflash-trt": "the wheel stands for the clone",
    "scripts/install": "the wheel stands for the clone",
    "scripts/serve_triton_demo": "a checkout's, and installs a server",
    ".venv/bin/pip install 'dflash-trt[serve]'": "check_wheel --extras installs it",
    ".venv/bin/dflash-trt serve": "runs until it is stopped",
    "dflash-trt plan Qwen3-8B": "needs published checkpoints",
    "dflash-trt build --target Qwen3-8B": "needs published checkpoints",
    "dflash-trt run qwen3-8b-dflash": "needs published checkpoints",
}
TAKES_MINUTES = {".venv/bin/dflash-trt bench ": "takes minutes"}


def main() -> None:
    quick = sys.argv[1] == "--quick"
    not_run = NOT_RUN | TAKES_MINUTES if quick else NOT_RUN
    used = set()
    environment = os.environ | {"PATH": f"{Path('.venv/bin').absolute()}:{os.environ['PATH']}"}
    for name in sys.argv[1 + quick :]:
        page = Page.read(str(Path(name).resolve().relative_to(ROOT)))
        for command in page.commands:
            reason = next((start for start in not_run if command.text.startswith(start)), None)
            if reason is not None:
                used.add(reason)
                print(f"-- {page.name}: not run, {not_run[reason]}: {command.text}", flush=True)
                continue
            run(page.name, ["bash", "-ec", command.text], command.text, environment)
        for language, text in page.blocks:
            if language == "python":
                run(page.name, [".venv/bin/python", "-c", text], "python", environment)
    unused = not_run.keys() - used
    if unused:
        sys.exit(f"error: no page has a command that begins with {', '.join(sorted(unused))}")


def run(page: str, words: list[str], text: str, environment: dict[str, str]) -> None:
    started = time.perf_counter()
    done = subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nerror: {page}: {text}: exit code {done.returncode}")
    print(f"== {page}: {time.perf_counter() - started:.1f} s: {text.splitlines()[0]}", flush=True)


if __name__ == "__main__":
    main()
