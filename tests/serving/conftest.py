"""What the tests of the engine loop share."""

from collections.abc import Iterator

import pytest

from dflash_trt.serving.engine_loop import EngineLoop
from dflash_trt.serving.text import TextCodec
from tests.serving.engines import make_codec


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def overlaps(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return make_codec(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def loops() -> Iterator[list[EngineLoop]]:
    """Loops put here are shut down at the end of the test."""
    opened: list[EngineLoop] = []
    yield opened
    for loop in opened:
        loop.close()
