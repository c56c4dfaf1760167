"""Part 1: tests/gpu, and the tests of tests/kernels that run natively where there is a GPU, each a case."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpu_visit_parts.results import Results
from gpu_visit_parts.setting import SETTING, context_is_broken
from gpu_visit_parts.supervisor import CONTEXT_IS_BROKEN, has_started

ROOT = Path(__file__).resolve().parents[2]
# What needs no GPU; the last file compiles the plugin library, which takes minutes.
_NOT_HERE = (
    *("test_aot.py", "test_gpu_visit.py"),
    *("test_attention_variants.py", "test_gated_delta_variants.py", "test_sampling_variants.py"),
)
_LAST = "test_plugin_library.py"
_DRY_RUN = ("test_norm_kernels.py", "test_argmax_kernels.py", "test_gpu_staging.py")


def run(part: int, results: Results, pattern: str, *, share: Sequence[int] = (0, 1)) -> int:
    """The exit code of this process: 0 when every test of its share has a result whose name matches the pattern.

    A `share` is an index and the number of processes.
    """
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(ROOT)
    recorder = _Recorder(part, results, pattern, share)
    options = ["-q", "-W", "default", "-p", "pytest_timeout", "-p", "no:cacheprovider", "--no-header"]
    code = pytest.main([*options, *_files()], plugins=[recorder])
    if recorder.is_broken:
        return CONTEXT_IS_BROKEN
    return 0 if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED) else 1


def _files() -> list[str]:
    found = [*sorted((ROOT / "tests/gpu").glob("test_*.py")), *sorted((ROOT / "tests/kernels").glob("test_*.py"))]
    wanted = [path for path in found if path.name not in _NOT_HERE]
    if SETTING.is_dry_run:
        wanted = [path for path in wanted if path.parent.name == "gpu" or path.name in _DRY_RUN]
    return [str(path) for path in sorted(wanted, key=lambda path: path.name == _LAST)]


class _Recorder:
    """A pytest plugin: writes each result at once, skips what has one, and stops when the CUDA context is broken."""

    def __init__(self, part: int, results: Results, pattern: str, share: Sequence[int]) -> None:
        self._part, self._results, self._pattern, self._share = part, results, pattern, share
        self.is_broken = False

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        has_started(self._part, self._results)
        done = self._results.done(self._part)
        index, num_shares = self._share
        matching = [item for item in items if re.search(self._pattern, item.nodeid)]
        alone = [item for item in matching if item.path.name == _LAST]  # one process compiles what all of them use
        shared = [item for item in matching if item.path.name != _LAST]
        wanted = [*shared[index::num_shares], *(alone if index == 0 else [])]
        wanted = [item for item in wanted if item.nodeid not in done]
        config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
        items[:] = wanted

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._results.end(self._part, report.nodeid, "failed", why=report.longreprtext)

    def pytest_runtest_logstart(self, nodeid: str, location: Sequence[Any]) -> None:
        self._results.start(self._part, nodeid)
        self._why, self._status = "", "ok"

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.skipped:
            self._status, self._why = "left out", str(report.longrepr[-1])
        elif report.failed:
            self._status, self._why = "failed", f"{self._why}{report.longreprtext}\n"
        if report.when == "teardown":
            self._results.end(self._part, report.nodeid, self._status, why=self._why)
            if self._status == "failed" and context_is_broken():
                self.is_broken = True
                pytest.exit("the CUDA context is broken", returncode=CONTEXT_IS_BROKEN)
