import pytest
import torch

from tests.kernels.exact_fp8 import convert_exactly
from tests.kernels.exact_scaled_dot import scales_exactly
from tests.kernels.rows_alike import dot_by_shape


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def exact_fp8(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """See exact_fp8.py; real hardware needs no help."""
    if device.type == "cuda":
        return
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter, "_convert_float", convert_exactly(interpreter._convert_float))


@pytest.fixture
def exact_codes(exact_fp8: None, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 and NVFP4; see exact_scaled_dot.py."""
    if device.type == "cuda":
        return
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter, "_dot_scaled_scale_to_f32", scales_exactly(interpreter._dot_scaled_scale_to_f32))


@pytest.fixture
def rows_alike(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """See rows_alike.py; real hardware needs no help."""
    if device.type == "cuda":
        return
    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot_by_shape(InterpreterBuilder.create_dot))
