"""The laws of `test_host_tier.py` and `test_prefix_store.py` of `tests/parity` on a GPU, with page-locked memory."""

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.parity import test_prefix_store
from tests.parity.test_foreign_state import PAIRS, open_pair
from tests.parity.test_host_tier import check_pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: an executor on it"),
]


@pytest.mark.parametrize("name", PAIRS)
def test_what_comes_back_is_what_left(name: str, tmp_path: Path) -> None:
    check_pair(name, tmp_path, torch.device("cuda"))


@pytest.mark.parametrize("name", PAIRS)
def test_another_engine_begins_where_the_first_one_was(name: str, tmp_path: Path) -> None:
    test_prefix_store.check_pair(name, tmp_path, torch.device("cuda"))


@pytest.mark.parametrize("name", PAIRS)
def test_an_engine_goes_on_with_a_prompt_that_another_has_computed(name: str, tmp_path: Path) -> None:
    opened = partial(open_pair, name, tmp_path, torch.device("cuda"), num_sequences=2, host_bytes=1 << 22)
    test_prefix_store.check_hand_over(opened, tmp_path)
