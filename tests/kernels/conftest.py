from fnmatch import fnmatch

import pytest
import torch

from tests.kernels.exact_fp8 import convert_exactly
from tests.kernels.exact_scaled_dot import scales_exactly
from tests.kernels.not_compiled import NOT_COMPILED
from tests.kernels.rows_alike import dot_by_shape
from tests.kernels_on import DEVICE, KERNELS_ON


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if KERNELS_ON == "interpreter":
        return
    for item in items:
        for pattern, reason in NOT_COMPILED.items():
            if fnmatch(item.nodeid, f"tests/kernels/{pattern}"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return DEVICE


@pytest.fixture
def exact_fp8(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """See exact_fp8.py; compiled kernels need no help."""
    if KERNELS_ON != "interpreter":
        return
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter, "_convert_float", convert_exactly(interpreter._convert_float))


@pytest.fixture
def exact_codes(exact_fp8: None, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 and NVFP4; see exact_scaled_dot.py."""
    if KERNELS_ON != "interpreter":
        return
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter, "_dot_scaled_scale_to_f32", scales_exactly(interpreter._dot_scaled_scale_to_f32))


@pytest.fixture
def rows_alike(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """See rows_alike.py; compiled kernels need no help."""
    if KERNELS_ON != "interpreter":
        return
    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot_by_shape(InterpreterBuilder.create_dot))
