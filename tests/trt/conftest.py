from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def trt() -> ModuleType:
    return pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: pip install 'dflash-trt[check]'")
