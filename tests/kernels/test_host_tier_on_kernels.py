"""The laws of `tests/parity/test_host_tier.py` and `test_prefix_store.py` over the GPU's executor and kernels."""

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.parity.test_foreign_state import AnyExecutor, open_pair
from tests.parity.test_host_tier import TALKS, contents, turns
from tests.parity.test_prefix_store import check, check_hand_over


@pytest.mark.parametrize("name", ["FP8 pages"])
def test_what_comes_back_is_what_left(name: str, tmp_path: Path, device: torch.device) -> None:
    found = []
    for num_sequences, host_bytes in ((1, 1 << 20), (6, 0)):
        executor = open_pair(name, tmp_path, device, num_sequences=num_sequences, host_bytes=host_bytes)
        found.append(turns(executor, talks=[talk[:18] for talk in TALKS[:3]], num_new=4))
        executor.close()
    (outputs, counts), (expected, _) = found
    assert contents(outputs) == contents(expected)
    assert [output.logprobs for output in outputs] == [output.logprobs for output in expected]
    assert counts.num_onboarded_pages > 0 and counts.num_prefix_hit_tokens > 0


def test_another_engine_begins_where_the_first_one_was(tmp_path: Path, device: torch.device) -> None:
    def opened(num_sequences: int, host_bytes: int) -> AnyExecutor:
        return open_pair("FP8 pages", tmp_path, device, num_sequences=num_sequences, host_bytes=host_bytes)

    talks = [talk[:18] for talk in TALKS[:2]]
    check(partial(opened, 1, 1 << 20), partial(opened, 6, 0), tmp_path, talks=talks, num_new=3, is_exact=False)


def test_an_engine_goes_on_with_a_prompt_that_another_has_computed(tmp_path: Path, device: torch.device) -> None:
    def opened() -> AnyExecutor:
        return open_pair("FP8 pages", tmp_path, device, num_sequences=2, host_bytes=1 << 20)

    check_hand_over(opened, tmp_path, talks=[talk[:18] for talk in TALKS[:1]])
