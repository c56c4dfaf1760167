"""Wheels for a machine without a package index: fetched here, unpacked there.

Needs nothing but Python, and pip.
"""

import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

# What the parts import beyond torch, triton and numpy, which must be there.
PACKAGES = (
    *("pydantic>=2.9,<3", "transformers>=4.57,<5.15", "llguidance>=1.9,<2", "jinja2>=3.1,<4", "psutil>=5.9.8,<8"),
    *("pytest>=8.3", "pytest-timeout>=2.3", "hypothesis>=6.120"),
)
_NOT_CARRIED = ("numpy",)  # large, and torch has brought it along
_PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 17)), "manylinux2014_x86_64")


def fetch(directory: Path, *, python_version: str) -> int:
    """Download the packages with all they need; the bytes that lie there then."""
    for wheel in directory.glob("*.whl"):  # another version beside it would stop the installation
        wheel.unlink()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(directory)]
    command += ["--implementation", "cp", "--python-version", python_version]
    command += [word for platform in _PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, *PACKAGES], check=True)
    for name in _NOT_CARRIED:
        for wheel in directory.glob(f"{name}-*.whl"):
            wheel.unlink()
    return sum(wheel.stat().st_size for wheel in directory.glob("*.whl"))


def install(wheels: Path, site: Path) -> list[str]:
    """Unpack all of them into `site`, which goes before what the machine has: these versions were tried together."""
    found = sorted(wheels.glob("*.whl"))
    if found:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*command, "--upgrade", "--target", str(site), *map(str, found)], check=True)
    return [wheel.name for wheel in found]


def missing_packages(parts: Sequence[int], path: Sequence[str]) -> list[str]:
    """What these parts import and `path` lacks; tests are part 1."""
    needed = ["numpy", "torch", "triton", *(["pytest"] if 1 in parts else [])]
    return [name for name in needed if PathFinder.find_spec(name, path) is None]
