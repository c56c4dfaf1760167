"""Errors that the scheduler survives are errors here, unless a test says so with `silent` or reads them."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_page_is_lost(request: pytest.FixtureRequest) -> Iterator[None]:
    """A page that could not be cached is logged and costs no request a token."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = records.append  # type: ignore[method-assign]
    log = logging.getLogger("dflash_trt.scheduler.request_pool")
    log.addHandler(handler)
    yield
    log.removeHandler(handler)
    assert not records, records[0].getMessage()
