"""What every test needs to stand on.

Kernels run natively where there is a CUDA GPU, and otherwise as kernels_on.py says. It must be set up before anything
imports Triton; tests that compile ahead of time start a process without it.
"""

import pytest
import torch

from tests.kernels_on import set_up_kernels

set_up_kernels()


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tiny models run slower on many threads, and results must not depend on their number."""
    torch.set_num_threads(1)
