"""Laws of `tests/parity/test_rejection_laws.py` about changed logits, over TensorRT's executor, interpreted."""

from pathlib import Path
from types import ModuleType

import pytest

from dflash_trt.backends.tensorrt.executor import TensorRTExecutor
from tests.parity.test_rejection_laws import MAKERS
from tests.parity.test_rejection_laws import logprobs as logprobs
from tests.parity.test_rejection_laws import target as target
from tests.parity.test_rejection_laws import (
    test_penalties_reach_the_test_of_a_draft as test_penalties_reach_the_test_of_a_draft,
)
from tests.trt.engines import open_pair_engine


@pytest.fixture(scope="module", params=["dflash"])
def executor(
    trt: ModuleType, request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> TensorRTExecutor:
    make, options = MAKERS[request.param]
    drafter = make(tmp_path_factory.mktemp("drafter") / "drafter", target_dir=target, **options)
    return open_pair_engine(trt, target, drafter, max_batch_size=64)
