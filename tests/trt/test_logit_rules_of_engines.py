"""The laws of `tests/parity/test_logit_rules.py`, its tests and fixtures, over TensorRT's executor, interpreted."""

from functools import partial
from types import ModuleType
from typing import Any

import pytest

from tests.parity.test_logit_rules import *  # noqa: F403
from tests.trt.engines import open_pair_engine


@pytest.fixture(scope="module")
def opened(trt: ModuleType) -> Any:
    return partial(open_pair_engine, trt)
