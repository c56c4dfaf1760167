"""Recipes done in copies of the tree, and what runs there."""

import os
import subprocess
import sys
from pathlib import Path

from tests.contributing.page import ROOT, Recipe, apply


def applied(done: Recipe, directory: Path) -> Path:
    """A copy in `directory`, whose tests find the kernels that others compiled: keys are hashes of the sources."""
    apply(done, directory)
    kernels = ROOT / "build" / "test_kernel_cache"
    kernels.mkdir(parents=True, exist_ok=True)
    (directory / "build").mkdir(exist_ok=True)
    (directory / "build" / kernels.name).symlink_to(kernels)
    return directory


def python(tree: Path, *words: str, interprets: bool = True) -> str:
    """In a process whose packages are those of the copy."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "TRITON_INTERPRET": "1"}
    if not interprets:
        del environment["TRITON_INTERPRET"]
    command = [sys.executable, "-P", *words]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_tests(tree: Path, done: Recipe) -> str:
    (path,) = [name for name in done.files if name.startswith("tests/")]
    return python(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", path)
