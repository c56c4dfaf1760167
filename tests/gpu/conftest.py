"""On the software GPU no test may do what CUDA forbids."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _nothing_forbidden() -> Iterator[None]:
    if os.environ.get("SOFTWARE_GPU_EXECUTES") != "1":
        yield
        return
    from software_gpu.runtime.library import software_cuda

    num_before = len(software_cuda().problems)
    yield
    assert software_cuda().problems[num_before:] == []
