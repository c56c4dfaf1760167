"""The laws of `tests/parity/test_host_tier.py` and `test_prefix_store.py` over TensorRT's executor, interpreted."""

from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from tests.parity.test_host_tier import TALKS, contents, turns
from tests.parity.test_prefix_store import check, check_hand_over
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


@pytest.mark.parametrize("name", ["windows, CPU kernels", "FP8 pages"])
def test_another_engine_begins_where_the_first_one_was(trt: ModuleType, tmp_path: Path, name: str) -> None:
    small = partial(open_engine, trt, name, tmp_path, num_pages=17, num_host_pages=60)
    check(small, partial(open_engine, trt, name, tmp_path, num_pages=80), tmp_path, talks=TALKS[:3])


def test_an_engine_goes_on_with_a_prompt_that_another_has_computed(trt: ModuleType, tmp_path: Path) -> None:
    opened = partial(open_engine, trt, "FP8 pages", tmp_path, num_pages=34, num_host_pages=60)
    check_hand_over(opened, tmp_path, talks=TALKS[:2])
