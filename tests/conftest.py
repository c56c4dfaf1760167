"""What every test needs to stand on.

Kernels run natively where there is a CUDA GPU, and under Triton's interpreter otherwise. The variable must be set
before anything imports Triton; tests that compile ahead of time start a process without it.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tiny models run slower on many threads, and results must not depend on their number."""
    torch.set_num_threads(1)
