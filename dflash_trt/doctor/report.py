"""The report: versions, machine and probes, which run in parallel processes with a time limit."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from select import select
from tempfile import TemporaryFile
from typing import IO, Any, Final

from dflash_trt.doctor import machine

# Title of each probe, and the probes that share a process, for their imports.
TITLES: Final = {
    "torch": "engines on a CPU",
    "cuda": "engines on a GPU",
    "tensorrt": "engines of backend tensorrt",
    "tensorrt_rtx": "build --check",
    "quantization": "calibration (build --quantization)",
    "triton_server": "Triton Inference Server",
}
_GROUPS: Final = (("torch", "cuda"), ("tensorrt_rtx", "tensorrt", "quantization"), ("triton_server",))
_SECRET: Final = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_MIN_SECRET_LENGTH: Final = 6


def make_report(*, time_limit_s: float, is_full: bool = False) -> dict[str, Any]:
    """Everything that `doctor` says, as plain JSON types, without secrets and home directories.

    A probe has `time_limit_s`. `is_full` imports all of ModelOpt, too.
    """
    groups = [tuple(f"full_{name}" if is_full and name == "quantization" else name for name in g) for g in _GROUPS]
    with ThreadPoolExecutor(len(groups)) as pool:
        running = [pool.submit(lambda names: list(run_probes(names, time_limit_s)), names) for names in groups]
        report: dict[str, Any] = {
            "versions": machine.versions(),
            "machine": machine.machine(),
            "gpus": machine.gpus(),
            "nvidia_driver": machine.driver_module(),
        }
        results = [result for group in running for result in group.result()]
    found = {result["name"].removeprefix("full_"): result for result in results}
    report["works"] = {name: {key: found[name][key] for key in ("works", "detail")} for name in TITLES}
    cleaned: dict[str, Any] = json.loads(_without_secrets(json.dumps(report)))
    return cleaned


def run_probes(names: Sequence[str], time_limit_s: float) -> Iterator[dict[str, Any]]:
    """Results in the order of `names`. If a probe ends its process or takes too long, a new one continues."""
    left = list(names)
    while left:
        for result in _run_process(tuple(left), time_limit_s):
            yield result
            left.remove(result["name"])


def _run_process(names: tuple[str, ...], time_limit_s: float) -> Iterator[dict[str, Any]]:
    """Results of the probes up to the first that fails to give one, with the reason for that."""
    words = [sys.executable, "-m", "dflash_trt.doctor.probes", *names]
    with (
        TemporaryFile() as errors,
        subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, bufsize=0) as process,
    ):
        assert process.stdout is not None
        for name in names:
            has_answer = bool(select([process.stdout], [], [], time_limit_s)[0])
            line = process.stdout.readline() if has_answer else b""
            if line:
                yield json.loads(line)
                continue
            if not has_answer:
                process.kill()
            code = process.wait()
            reason = f"its process ended with {code}{_last_words(errors)}"
            yield {"name": name, "works": False, "detail": reason if has_answer else f"no answer in {time_limit_s:g} s"}
            return


def _last_words(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = [line.strip() for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1]}" if lines else ""


def _without_secrets(text: str) -> str:
    """The text without values of variables that hold secrets, and with ~ for the home directory."""
    secrets = (value for name, value in os.environ.items() if _SECRET.search(name) and len(value) >= _MIN_SECRET_LENGTH)
    for secret in secrets:
        text = text.replace(json.dumps(secret)[1:-1], "***")
    homes = {str(Path.home()), os.environ.get("HOME", "")} - {"", "/"}
    for home in sorted(homes, key=len, reverse=True):
        text = text.replace(json.dumps(home)[1:-1], "~")
    return text
