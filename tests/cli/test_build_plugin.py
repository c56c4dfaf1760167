"""`dflash-trt build-plugin`: options reach the kernel compiler, and what it refuses is no traceback."""

from pathlib import Path
from typing import Any

import pytest

from dflash_trt.compile import plugin_build


def test_every_option_reaches_the_kernel_compiler(invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def build(options: list[str], output: Path, *, kernels_only: bool) -> Path:
        calls.append((options, output, kernels_only))
        return output / "library.so"

    monkeypatch.setattr(plugin_build, "build_plugin_library", build)
    words = ["--engine", "e", "--deterministic", "--arch", "90a", "--jobs", "3", "-o", "out", "--kernels-only"]
    assert invoke("build-plugin", *words).stdout == "out/library.so\n"
    assert invoke("build-plugin", "--config", "c.yaml", "--", "--cache", "x").stdout == "plugin/library.so\n"
    assert calls == [
        (["--engine", "e", "--arch", "90a", "--jobs", "3", "--deterministic"], Path("out"), True),
        (["--config", "c.yaml", "--cache", "x"], Path("plugin"), False),
    ]


def test_what_the_kernel_compiler_refuses_ends_with_its_exit_code(
    invoke: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plugin_build, "_missing_tools", lambda compiler: [])
    done = invoke("build-plugin", "--kernels-only", "--engine", tmp_path / "none", "-o", tmp_path / "out")
    assert done.exit_code == 2
    said = capfd.readouterr().err
    assert said.startswith("error: ") and "none" in said and "Traceback" not in said
