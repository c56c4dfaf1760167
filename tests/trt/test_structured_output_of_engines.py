"""The laws of `tests/serving/test_structured_output.py`, its tests and fixtures, over interpreted TensorRT engines."""

from collections.abc import Iterator

import pytest

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: pip install 'dflash-trt[check]'")

from tests.serving.test_structured_output import *  # noqa: F403
from tests.trt.engines import interpreted_engines


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    with interpreted_engines():
        yield
