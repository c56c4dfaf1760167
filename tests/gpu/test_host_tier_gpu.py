"""The law of `tests/parity/test_host_tier.py` on a GPU: copies on the stream of the steps, page-locked memory."""

from pathlib import Path

import pytest
import torch

from tests.parity.test_foreign_state import PAIRS
from tests.parity.test_host_tier import check_pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: an executor on it"),
]


@pytest.mark.parametrize("name", PAIRS)
def test_what_comes_back_is_what_left(name: str, tmp_path: Path) -> None:
    check_pair(name, tmp_path, torch.device("cuda"))
