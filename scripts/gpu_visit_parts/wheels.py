"""Wheels for a machine without a package index: fetched here, installed there as far as they are missing.

Needs nothing but Python, and pip.
"""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

# What the parts import beyond torch, triton and numpy, which must be there.
PACKAGES = ("pydantic>=2.9,<3", "transformers>=4.57,<5.15", "pytest>=8.3", "pytest-timeout>=2.3", "hypothesis>=6.120")
_NOT_CARRIED = ("numpy",)
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def fetch(directory: Path, *, python_version: str) -> int:
    """Download the packages with all they need; the bytes that lie there then."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(directory)]
    command += ["--implementation", "cp", "--python-version", python_version]
    command += [word for platform in _PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, *PACKAGES], check=True)
    for name in _NOT_CARRIED:
        for wheel in directory.glob(f"{name}-*.whl"):
            wheel.unlink()
    return sum(wheel.stat().st_size for wheel in directory.glob("*.whl"))


def install_missing(wheels: Path, site: Path) -> list[str]:
    """Unpack into `site` what this interpreter does not have; the names. What it has is left as it is."""
    missing = [wheel for wheel in sorted(wheels.glob("*.whl")) if not _is_installed(wheel.name.split("-")[0])]
    if missing:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*command, "--upgrade", "--target", str(site), *map(str, missing)], check=True)
    return [wheel.name for wheel in missing]


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
