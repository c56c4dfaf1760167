import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tiny models run slower on many threads, and results must not depend on their number."""
    torch.set_num_threads(1)
