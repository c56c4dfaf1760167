import pytest
import torch

from tests.kernels.exact_fp8 import convert_exactly


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
