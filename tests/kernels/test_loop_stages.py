"""Loops that load ahead where the compiler puts its fences, and those that do not where it leaves them out."""

import pytest
import triton

from dflash_trt.kernels.compiling import active_architecture, fenced_stages


@pytest.mark.parametrize(
    ("version", "architecture", "stages"),
    [("3.7.1", 100, 1), ("3.7.1", 103, 1), ("3.7.1", 90, 3), ("3.7.1", 120, 3), ("3.9.0", 103, 3), ("3.10.2", 100, 3)],
)
def test_latents_are_loaded_ahead_where_the_tensor_core_waits_for_them(
    monkeypatch: pytest.MonkeyPatch, version: str, architecture: int, stages: int
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert fenced_stages(3, architecture) == stages


def test_interpreted_kernels_are_for_no_architecture() -> None:
    if triton.knobs.runtime.interpret:
        assert active_architecture() == 0
    else:
        assert active_architecture() >= 80
