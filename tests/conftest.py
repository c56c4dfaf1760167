"""What every test needs to stand on.

Kernels run natively where there is a CUDA GPU, and otherwise as kernels_on.py says. It must be set up before anything
imports Triton; tests that compile ahead of time start a process without it.
"""

from pathlib import Path

import pytest
import torch

from tests.kernels_on import set_up_kernels

set_up_kernels()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What tests/slow_tests.txt names is slow."""
    slow = {*(Path(__file__).parent / "slow_tests.txt").read_text().splitlines()}
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tiny models run slower on many threads, and results must not depend on their number."""
    torch.set_num_threads(1)
