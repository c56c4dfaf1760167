"""The law of `tests/parity/test_host_tier.py` over the GPU's executor and kernels."""

from pathlib import Path

import pytest
import torch

from tests.parity.test_foreign_state import open_pair
from tests.parity.test_host_tier import TALKS, contents, turns


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
