"""The law of `tests/parity/test_host_tier.py` over TensorRT's executor and an interpreted engine."""

from pathlib import Path
from types import ModuleType

import pytest

from tests.parity.test_host_tier import TALKS, contents, turns
from tests.trt.test_foreign_state_of_engines import open_engine


@pytest.mark.parametrize("name", ["windows, CPU kernels", "FP8 pages", "EAGLE-3"])
def test_what_comes_back_is_what_left(trt: ModuleType, tmp_path: Path, name: str) -> None:
    found = []
    for sizes in ({"num_pages": 17, "num_host_pages": 60}, {"num_pages": 80}):
        executor = open_engine(trt, name, tmp_path, **sizes)
        found.append(turns(executor, talks=TALKS[:3]))
        executor.close()
    (outputs, counts), (expected, _) = found
    assert contents(outputs) == contents(expected)
    assert [output.logprobs for output in outputs] == [output.logprobs for output in expected]
    assert counts.num_onboarded_pages > 0 and counts.num_accepted_tokens > 0
